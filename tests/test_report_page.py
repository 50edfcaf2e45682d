"""The report in a real browser: what a person sees on a phone and at a desk, and what the console says.

The run that is shown is a real one. Needs Chromium of the system and Playwright to drive it; without them the
tests are skipped, but not in CI, where they must run.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lucid.amp import GradScaler
from lucid.amp.cli import report
from lucid.amp.cli.run._folder import Folder
from lucid.amp.cli.run._log import Options
from lucid.amp.cli.run._observer import Observer
from lucid.amp.cli.run._script import Script

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = [
    name for name, there in (("Chromium", BROWSER), ("Playwright", importlib.util.find_spec("playwright"))) if not there
]

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        bool(MISSING) and not os.environ.get("CI"), reason=f"not here: {' and '.join(MISSING)}, to look at the page"
    ),
]

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def train() -> None:
    """A training with a search for the scale, a bad batch, and layers enough to sort."""
    torch.manual_seed(0)
    layers = [layer for _ in range(7) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=2.0**24, growth_interval=6)
    for step in range(40):
        x = torch.randn(8, 16)
        if step == 25:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), torch.randint(4, (8,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a browser finds the report of that training."""
    folder = Folder(tmp_path_factory.mktemp("run"))
    observer = Observer(Script("train.py", ("--lr", "0.1"), is_module=False), folder, Options(every=10))
    with observer:
        train()
    observer.end("exit 0")
    report.draw(folder.path)
    return (folder.path / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser of its own, with an empty profile."""
    from playwright.sync_api import sync_playwright

    assert not MISSING, f"CI must look at the page, and these are not here: {MISSING}"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(params=[PHONE, DESK], ids=["phone", "desk"])
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The report, opened; a message on its console or a request for anything fails the test."""
    context = browser.new_context(viewport=request.param)
    opened = context.new_page()
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda asked: said.append(asked.url) if asked.url.startswith("http") else None)
    opened.goto(address)
    yield opened
    context.close()
    assert said == []


def test_the_pictures_are_there(page: Any) -> None:
    """Each picture is loaded, is wide enough to be read, and has words for those who do not see it."""
    pictures = page.eval_on_selector_all(
        "img", "all => all.map(one => [one.complete, one.naturalWidth, one.clientWidth, one.alt])"
    )
    assert len(pictures) == 2
    for complete, natural, shown, alt in pictures:
        assert complete and natural >= 600 and shown >= 300
        assert len(alt) > 40


def test_nothing_is_wider_than_the_screen(page: Any) -> None:
    """The page is never scrolled sideways; a wide table is scrolled in its own frame."""
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]


def test_text_is_large_enough_to_read(page: Any) -> None:
    """No text is smaller than 12 pixels, on a phone or at a desk."""
    sizes = page.eval_on_selector_all(
        "p, td, th, dt, dd, li, h1, h2, h3, figcaption, code",
        "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))",
    )
    assert min(sizes) >= 12


def test_layers_are_sorted_by_each_column(page: Any) -> None:
    """A press on a heading sorts by it, a second one the other way round; what has no number comes last."""
    table = page.locator("#ranges ~ .sheet table")
    headings = table.locator("thead button")
    assert headings.count() == 11
    for column in range(headings.count()):
        ways = []
        for _ in range(2):
            headings.nth(column).click()
            heading = table.locator("thead th").nth(column)
            ways.append(heading.get_attribute("aria-sort"))
            check_order(keys_of(table, column), ways[-1] == "descending")
        assert sorted(ways) == ["ascending", "descending"]
        assert table.locator("th[aria-sort=ascending], th[aria-sort=descending]").count() == 1


def keys_of(table: Any, column: int) -> list[Any]:
    """What the rows hold in a column: numbers, None for none, or text."""
    return table.evaluate(
        """(table, column) => [...table.tBodies[0].rows].map(row => {
            const key = row.cells[column].dataset.key;
            return key === undefined ? row.cells[column].textContent : key === "" ? null : Number(key);
        })""",
        column,
    )


def check_order(keys: list[Any], descending: bool) -> None:
    """Assert that the keys are in order, those without a number behind."""
    there = [key for key in keys if key is not None]
    assert keys == there + [None] * (len(keys) - len(there))
    assert len(there) > 1
    if isinstance(there[0], str):
        assert there[0 if not descending else -1] == min(there, key=natural)
    else:
        assert there == sorted(there, reverse=descending)


def natural(name: str) -> tuple[Any, ...]:
    """The order of people: 2 before 10."""
    head = name.partition(".")[0].split(" ")[0]
    return (0, int(head), name) if head.isdigit() else (1, 0, name)


def test_a_keyboard_sorts_too(page: Any) -> None:
    """A heading is reached and pressed without a mouse, and the sorting is told to those who do not see it."""
    heading = page.locator("#ranges ~ .sheet thead button").nth(2)
    heading.focus()
    page.keyboard.press("Enter")
    assert page.locator("#ranges ~ .sheet thead th").nth(2).get_attribute("aria-sort") == "descending"
    assert page.locator("#ranges-said").text_content() == "sorted by largest, descending"


def test_names_are_filtered(page: Any) -> None:
    """What is typed leaves the rows whose name holds it."""
    rows = page.locator("#ranges ~ .sheet tbody tr")
    everything = rows.count()
    page.locator("#ranges-filter").fill("12.W")
    assert 0 < rows.filter(visible=True).count() < everything
    assert page.locator("#ranges-said").text_content() == f"1 of {everything} shown"


def test_the_explanations_open(page: Any) -> None:
    """What the columns mean is a press away."""
    page.locator("#ranges ~ details summary").click()
    assert page.get_by_text("Below 2⁻¹⁴ while scaled").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser: Any, address: str, scheme: str) -> None:
    """In light and in dark, all text has at least the contrast 4.5 : 1 that WCAG 2.1 asks for (1.4.3)."""
    context = browser.new_context(viewport=DESK, color_scheme=scheme)
    opened = context.new_page()
    opened.goto(address)
    worst = opened.evaluate(CONTRAST)
    context.close()
    assert worst[0] >= 4.5, worst


# The relative luminance and contrast ratio of WCAG 2.1.
CONTRAST = """
() => {
  const numbers = text => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const part = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const groundOf = node => {
    for (; node; node = node.parentElement) {
      const ground = numbers(getComputedStyle(node).backgroundColor);
      if (ground.length === 3 || ground[3] > 0) return ground;
    }
    return [255, 255, 255];
  };
  let worst = [21, ""];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    if (!own || node.matches("script, style")) continue;
    const [a, b] = [light(numbers(getComputedStyle(node).color)), light(groundOf(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.outerHTML.slice(0, 120)];
  }
  return worst;
}
"""


def test_the_page_is_well_formed_for_a_reader(page: Any) -> None:
    """One first heading, a language, headings for every section, and labels for every control."""
    assert page.locator("h1").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("section").count() == page.locator("section[aria-labelledby] > h2").count() > 3
    unlabelled = page.eval_on_selector_all("input", "all => all.filter(one => !one.labels.length).length")
    assert unlabelled == 0
