"""A scaler in torch.distributed's checkpoints."""

import pathlib
from collections.abc import Iterator

import pytest
import torch
from team import Team

pytestmark = pytest.mark.alone


@pytest.fixture
def soloist() -> Iterator[Team]:
    """One process."""
    team = Team(1)
    yield team
    team.dismiss()


def test_saved_on_two_ranks_and_loaded_on_one_and_two(pair: Team, soloist: Team, tmp_path: pathlib.Path) -> None:
    """A run goes on after the checkpoint as if it had never stopped, on as many ranks or on fewer."""
    uninterrupted = pair.run("checkpointing.save", str(tmp_path))
    # On paper: 1024, a good step, a skip (512), good, good (grown to 1024): saved. Good, good (2048), good.
    for standing, _ in uninterrupted:
        assert standing == [2048.0, 1]
    for standing, parameters, scale in pair.run("checkpointing.load", str(tmp_path)):
        assert standing == [2048.0, 1]
        assert scale == 1024.0
        torch.testing.assert_close(parameters, uninterrupted[0][1], rtol=0, atol=0)
    for standing, parameters, scale in soloist.run("checkpointing.load", str(tmp_path)):
        assert standing == [2048.0, 1]
        assert scale == 1024.0
        torch.testing.assert_close(parameters, uninterrupted[0][1], rtol=1e-4, atol=1e-5)


def test_collecting_optimizer_state_never_moves_the_scale(pair: Team) -> None:
    """PyTorch steps an optimizer to create its state; the scaler neither counts nor moves, at any stage."""
    for seen in pair.run("checkpointing.collect_optimizer_state"):
        assert seen[0::2] == seen[1::2]
        assert [(scale, count) for scale, count, _ in seen[0::2]] == [(1024.0, 0)] * 4 + [(1024.0, 1)]
