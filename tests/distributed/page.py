"""Runs the marked programs of a page on every rank."""

import pathlib
import re
from typing import Any
from unittest import mock

import torch.distributed as dist

MARKED = re.compile(r"<!-- needs: torchrun -->\n```python\n(.*?)```", re.DOTALL)


def run(page: str) -> int:
    """Run the page's blocks one after the other as one program; how many there were."""
    blocks = MARKED.findall(pathlib.Path(page).read_text())
    names: dict[str, Any] = {"__name__": "page"}
    # The team has its group already.
    with mock.patch.object(dist, "init_process_group"):
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    return len(blocks)
