"""The report as one HTML page that needs nothing else: style, script and pictures are inside it.

Knows HTML: headings, tiles, findings, pictures, tables that can be sorted. Refuses to know what any of it means;
all text comes from ``_content``.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from importlib import resources

from lucid.amp.cli.report._content import Cell, Column, Content, Finding, Picture, Section, Table

MARKS = {"act": "▲ act", "look": "◆ look", "fine": "● fine"}


def page(content: Content) -> str:
    """The whole page; every text that comes from outside is escaped."""
    parts = [
        *_header(content),
        "<main>",
        *_findings(content.findings),
        *(line for section in content.sections for line in _section(section)),
        "</main>",
        f"<footer><p>{_text(content.footer)}</p></footer>",
    ]
    return _skeleton(content.title, "\n".join(parts))


def _skeleton(title: str, body: str) -> str:
    style, script = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="lucid-amp">
<link rel="icon" href="data:,">
<title>{_text(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script>
{script}</script>
</body>
</html>
"""


def _header(content: Content) -> Iterable[str]:
    yield f"<header><h1>{_text(content.title)}</h1>"
    yield f'<p class="quiet">{_text(content.subtitle)}</p>'
    yield f'<p class="verdict">{_text(content.verdict)}</p>'
    yield '<dl class="tiles">'
    for tile in content.tiles:
        note = f"<dd>{_text(tile.note)}</dd>" if tile.note else ""
        yield f"<div><dt>{_text(tile.label)}</dt><dd>{_text(tile.value)}</dd>{note}</div>"
    yield "</dl></header>"


def _findings(findings: Sequence[Finding]) -> Iterable[str]:
    yield '<section aria-labelledby="findings"><h2 id="findings">What was found, and what to do</h2>'
    yield '<ol class="findings">'
    for finding in findings:
        yield f'<li class="finding {finding.weight}"><span class="mark">{MARKS[finding.weight]}</span>'
        yield f"<h3>{_text(finding.title)}</h3>"
        yield from (f"<p>{_marked(line)}</p>" for line in finding.facts)
        if finding.advice:
            yield f'<p class="advice"><strong>What to do:</strong> {_marked(finding.advice)}</p>'
        yield "</li>"
    yield "</ol></section>"


def _section(section: Section) -> Iterable[str]:
    yield f'<section aria-labelledby="{section.key}"><h2 id="{section.key}">{_text(section.title)}</h2>'
    yield from (f"<p>{_marked(line)}</p>" for line in section.text)
    yield from (_picture(picture) for picture in section.pictures)
    if section.table is not None:
        yield from _table(section.table, section.key, section.title)
    if section.words:
        rows = (f"<dt>{_text(word)}</dt><dd>{_marked(meaning)}</dd>" for word, meaning in section.words)
        yield f'<dl class="words">{"".join(rows)}</dl>'
    yield "</section>"


def _picture(picture: Picture) -> str:
    """A picture; where a narrow form exists, a phone shows that one."""
    narrow = ""
    if picture.narrow is not None:
        narrow = f'<source media="(max-width: 40rem)" srcset="{_data(picture.narrow)}">'
    image = f'<img src="{_data(picture.png)}" alt="{_text(picture.alt)}">'
    caption = f"<figcaption>{_marked(picture.caption)}</figcaption>" if picture.caption else ""
    wide = "" if narrow else ' class="wide" tabindex="0"'
    return f"<figure{wide}><picture>{narrow}{image}</picture>{caption}</figure>"


def _table(table: Table, key: str, title: str) -> Iterable[str]:
    if len(table.rows) > 12:
        yield f'<div class="tools"><label for="{key}-filter">{_text(table.filter_by)}</label>'
        yield f'<input id="{key}-filter" type="search" autocomplete="off"></div>'
    yield f'<div class="said" id="{key}-said" role="status"></div>'
    yield f'<div class="sheet" tabindex="0" role="region" aria-label="{_text(title)}, table">'
    yield f'<table class="sortable" data-said="{key}-said" data-filter="{key}-filter"><thead><tr>'
    yield from (_heading(column) for column in table.columns)
    yield "</tr></thead><tbody>"
    for row in table.rows:
        cells = [
            _cell(cell, column, index) for index, (cell, column) in enumerate(zip(row, table.columns, strict=True))
        ]
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    explained = [(column.title, column.meaning) for column in table.columns if column.meaning]
    if explained:
        rows = (f"<dt>{_text(word)}</dt><dd>{_marked(meaning)}</dd>" for word, meaning in explained)
        yield f'<details><summary>What the columns mean</summary><dl class="words">{"".join(rows)}</dl></details>'


def _heading(column: Column) -> str:
    side = ' class="left"' if column.is_text else ""
    return f'<th scope="col" aria-sort="none"{side}><button type="button">{_text(column.title)}</button></th>'


def _cell(cell: Cell, column: Column, index: int) -> str:
    words = _text(cell.words)
    if index == 0 and column.is_text:
        # A long dotted name may be broken behind its dots.
        broken = words.replace(".", ".<wbr>")
        return f'<th scope="row" class="left name" title="{words}">{broken}</th>'
    if column.is_text:
        return f'<td class="left wrap">{words}</td>'
    key = "" if cell.key is None else repr(float(cell.key))
    if column.is_share and cell.key:
        return f'<td class="share" style="--share: {min(cell.key, 100.0):.4g}%" data-key="{key}">{words}</td>'
    opening, name = ('th scope="row"', "th") if index == 0 else ("td", "td")
    return f'<{opening} data-key="{key}">{words}</{name}>'


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _text(words: str) -> str:
    return html.escape(words, quote=True)


def _marked(words: str) -> str:
    """Escaped text in which `` `code` `` is code."""
    pieces = words.split("`")
    return "".join(f"<code>{_text(piece)}</code>" if index % 2 else _text(piece) for index, piece in enumerate(pieces))
