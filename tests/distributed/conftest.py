"""The two teams that the distributed tests share: two processes, and four for two-dimensional meshes."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from team import Team

if not dist.is_available():
    collect_ignore_glob = ["test_*.py"]


class Roster:
    """Keeps one team of each size and replaces it once a test has broken it."""

    def __init__(self) -> None:
        self._teams: dict[int, Team] = {}

    def of(self, size: int) -> Team:
        """A team whose processes all run."""
        if size not in self._teams or not self._teams[size].alive:
            self._teams[size] = Team(size)
        return self._teams[size]

    def dismiss(self) -> None:
        """End all teams."""
        for team in self._teams.values():
            team.dismiss()


@pytest.fixture(scope="session")
def roster() -> Iterator[Roster]:
    """All teams of this run."""
    roster = Roster()
    yield roster
    roster.dismiss()


@pytest.fixture
def pair(roster: Roster) -> Team:
    """Two processes."""
    return roster.of(2)


@pytest.fixture
def quartet(roster: Roster) -> Team:
    """Four processes."""
    return roster.of(4)
