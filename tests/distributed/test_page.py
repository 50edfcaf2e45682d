"""The programs on the page about many processes run on two ranks."""

import pathlib

import pytest
from team import Team

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "distributed.md"

pytestmark = pytest.mark.alone


def test_the_page_runs_on_two_ranks(pair: Team) -> None:
    """Every program that is marked for torchrun runs to its end, in order, on both ranks."""
    marked = PAGE.read_text().count("<!-- needs: torchrun -->")
    assert pair.run("page.run", str(PAGE)) == [marked, marked]
