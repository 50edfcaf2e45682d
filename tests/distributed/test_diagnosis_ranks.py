"""Rank 0 tells the causes of all ranks, and nobody hangs where only some of them are watched."""

import pytest
from team import Team

from lucid.amp import _torch

SCALERS = pytest.mark.parametrize("kind", ["lucid", "torch"])


@pytest.fixture
def store(request: pytest.FixtureRequest) -> None:
    """Skip where PyTorch's private name for the common store is hidden: then only each rank's own cause is known."""
    if request.config.getoption("--public-torch"):
        pytest.skip("the common store has only a private name")


@SCALERS
@pytest.mark.usefixtures("store")
def test_another_rank_s_loss_is_told_on_rank_0(pair: Team, kind: str) -> None:
    """After DDP's all-reduce rank 0 sees bad gradients only; that rank 1's batch held the NaN comes first."""
    first, second = pair.run("watching.replicated", kind, 1, "nan")
    assert (first["kind"], first["where"]) == ("loss not finite", ("0",))
    assert first["causes"] == [(1, "loss not finite", ("0",)), (0, "backward overflowed", ("2",))]
    assert "rank 1: SGD: loss not finite in 0" in first["text"]
    assert second["causes"] == [(1, "loss not finite", ("0",))]


@SCALERS
@pytest.mark.usefixtures("store")
def test_rank_0_s_own_loss_is_told(pair: Team, kind: str) -> None:
    """The rank at fault may be rank 0 itself."""
    first, _ = pair.run("watching.replicated", kind, 0, "nan")
    assert first["causes"][0] == (0, "loss not finite", ("0",))


@SCALERS
def test_nothing_wrong_on_any_rank(pair: Team, kind: str) -> None:
    """A sound run has no cause anywhere."""
    for rank in pair.run("watching.replicated", kind, None, "nan"):
        assert rank["causes"] == [] and "No step was skipped" in rank["text"]


@SCALERS
@pytest.mark.usefixtures("store")
def test_a_rank_that_is_not_watched_is_named(pair: Team, kind: str) -> None:
    """Rank 0 waits once, two seconds, and says that nothing was heard."""
    first, _ = pair.run("watching.watched_on_one", kind)
    assert "Nothing was heard from rank 1" in first["text"]
    assert first["second"] == first["kind"] and first["again"] < 1.0


@SCALERS
@pytest.mark.usefixtures("store")
def test_rank_0_reports(pair: Team, kind: str) -> None:
    """One report of one skip, on rank 0, with what rank 1 told; also after rank 0 alone had watched that model."""
    pair.run("watching.watched_on_one", kind)
    first, second = pair.run("watching.reporting", kind)
    assert len(first) == 1 and "rank 1: SGD: loss not finite" in first[0]
    assert second == []


def test_a_sharded_model(pair: Team) -> None:
    """With FSDP2 the rank at fault tells the kind; its forward is not run again."""
    _, second = pair.run("watching.sharded")
    assert second["kind"] == "loss not finite"
    assert "spread over ranks (DTensor)" in second["text"]


@pytest.mark.usefixtures("store")
def test_fsdp_s_scaler_skips_for_another_rank(pair: Team) -> None:
    """The rank whose gradients are finite says so; on rank 0 the other's overflow comes first."""
    first, second = pair.run("watching.sharded_by_pytorch")
    assert [rank["moved"] for rank in (first, second)] == [False, False]
    assert [cause[:2] for cause in first["causes"]] == [(1, "backward overflowed"), (0, "another rank overflowed")]


def test_the_store_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes, or without PyTorch's name for it, there is no common store."""
    assert _torch.common_store() is None
