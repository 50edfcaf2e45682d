"""The total norm over all ranks, and what it does to every rank's gradients."""

import math

import pytest
from drill import SCALE
from network import norm_alone
from team import Team

pytestmark = pytest.mark.alone

PAIRS = [
    "replicas.ddp_before",
    "replicas.ddp_after",
    "replicas.zero_after",
    "replicas.fsdp1_flat",
    "replicas.fsdp1_views",
    "meshes.fsdp2",
    "meshes.fsdp2_offload",
    "meshes.fsdp2_ignored",
    "meshes.tensor_parallel",
    "meshes.replicated_first",
    "meshes.sequence_parallel",
    "handmade.pipeline",
    "handmade.experts",
]
QUARTETS = ["meshes.hsdp", "meshes.sharded_and_parallel", "replicas.fsdp1_hybrid"]
ONE_BY_ONE = {"meshes.tensor_parallel", "meshes.fsdp2_ignored", "meshes.sharded_and_parallel"}


def check(team: Team, layout: str, max_norm: float, norm_type: float) -> None:
    """The norm is that of one process, and every gradient was multiplied by the one factor it implies."""
    optimizer = "sgd one by one" if layout in ONE_BY_ONE else "sgd"
    expected = norm_alone(norm_type)
    factor = min(1.0, max_norm / (expected + 1e-6)) / SCALE
    reports = team.run("clipping.clip", layout, max_norm, norm_type, optimizer)
    assert len({seen["norm"] for seen in reports}) == 1
    for seen in reports:
        assert seen["plain"]
        assert seen["norm"] == pytest.approx(expected, rel=1e-4)
        assert seen["ratios"] == pytest.approx([factor] * len(seen["ratios"]), rel=1e-4)


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0, 3.0, -1.0, -math.inf])
@pytest.mark.parametrize("layout", PAIRS)
def test_the_norm_over_two_ranks_is_that_of_one_process(pair: Team, layout: str, norm_type: float) -> None:
    """Parts add up, replicas count once, and all ranks get the same number and clip by it."""
    check(pair, layout, 0.05, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("layout", QUARTETS)
def test_the_norm_over_a_grid_is_that_of_one_process(quartet: Team, layout: str, norm_type: float) -> None:
    """In two dimensions too, with a norm's weight on the rows only."""
    check(quartet, layout, 0.05, norm_type)


def test_a_norm_below_the_bound_only_unscales(pair: Team) -> None:
    """Nothing is clipped where the norm is small enough."""
    check(pair, "meshes.fsdp2", 1e6, 2.0)


@pytest.mark.parametrize("layout", ["meshes.fsdp2", "replicas.ddp_after", "handmade.experts"])
def test_an_overflow_on_one_rank_clips_nothing_on_any(pair: Team, layout: str) -> None:
    """All ranks hear of an infinite norm, gradients are divided and not clipped, and the step is skipped."""
    for seen in pair.run("clipping.clip_overflow", layout):
        assert not math.isfinite(seen["norm"])
        assert seen["ratios"] == [1 / SCALE] * 2
        assert seen["skipped"]


@pytest.mark.parametrize(
    ("gradients", "norm_type", "expected"),
    [
        ([{"a": [3.0]}, {"a": [4.0]}], 2.0, 5.0),
        ([{"a": [3.0, 4.0]}, {"a": [3.0, 4.0]}], 2.0, 5.0),
        ([{"same": [3.0], "part": [0.0]}, {"same": [3.0], "part": [4.0]}], 2.0, 5.0),
        ([{"a": [3.0, 4.0]}, {}], 2.0, 5.0),
        ([{"a": [3.0]}, {"a": [-4.0]}], math.inf, 4.0),
        ([{"a": [3.0]}, {"a": [-4.0]}], 1.0, 7.0),
        ([{"a": [3.0]}, {"a": [4.0]}], -math.inf, 3.0),
        ([{"a": [1e-30]}, {"a": [0.0]}], 2.0, 1e-30),
        ([{"a": [0.0]}, {"a": [0.0]}], 2.0, 0.0),
    ],
)
def test_plain_tensors_under_a_given_group(
    pair: Team, gradients: list[dict[str, list[float]]], norm_type: float, expected: float
) -> None:
    """Different values are parts and add up; values that both ranks hold are replicas and count once."""
    assert pair.run("clipping.by_hand", gradients, norm_type) == [pytest.approx(expected, rel=1e-6)] * 2


def test_a_refusal_while_clipping_is_an_error_on_every_rank(pair: Team) -> None:
    """A float16 gradient on rank 1 is a ValueError on both, and no gradient was touched."""
    for rank, seen in enumerate(pair.run("clipping.refuse_while_clipping")):
        assert seen["raised"][0] == "ValueError"
        assert "'stray'" in seen["raised"][1]
        assert ("rank 1" in seen["raised"][1]) == (rank == 0)
        assert seen["untouched"]


@pytest.mark.parametrize("norm_type", [math.inf, 2.0, 1.0, 3.0])
def test_a_nan_of_another_dtype_is_not_lost(pair: Team, norm_type: float) -> None:
    """The largest of 1 and NaN is no number: both ranks skip."""
    for norm, skipped in pair.run("clipping.hidden_nan", norm_type):
        assert not math.isfinite(norm)
        assert skipped


REFUSED = [
    ("a parameter of nobody", "ValueError", "parameters[0]"),
    ("no parameter", "TypeError", "parameters[0]"),
    ("order 0", "ValueError", "norm_type 0"),
    ("order NaN", "ValueError", "norm_type must be"),
    ("a negative bound", "ValueError", "max_norm must be"),
]


@pytest.mark.parametrize(("what", "kind", "words"), REFUSED)
def test_a_wrong_question_of_one_rank_is_an_error_on_every_rank(pair: Team, what: str, kind: str, words: str) -> None:
    """Nobody waits for a rank that cannot tell that norm, no gradient was touched, and the next question is heard."""
    for rank, seen in enumerate(pair.run("clipping.ask_wrongly", what)):
        assert seen["raised"][0] == kind
        assert words in seen["raised"][1]
        assert ("rank 1" in seen["raised"][1]) == (rank == 0)
        assert seen["untouched"]
        assert seen["norm"] == pytest.approx(16.0 * math.sqrt(3))


@pytest.mark.parametrize("what", ["another bound", "another order"])
def test_ranks_that_ask_for_different_clips_are_told(pair: Team, what: str) -> None:
    """They would multiply by different factors: an error on both, and no gradient was touched."""
    for seen in pair.run("clipping.ask_wrongly", what):
        assert seen["raised"][0] == "RuntimeError"
        assert "different norms or bounds" in seen["raised"][1]
        assert seen["untouched"]


@pytest.mark.parametrize(
    ("gradient", "read", "clips", "landed"),
    [
        (8.0, "power", False, -1.0),
        (8.0, "power", True, -1.0),
        (8.0, "write", False, -1.0),
        (8.0, "write", True, -1.0),
        (2.0**70, "judge_quotients", False, -(2.0**68)),
        (2.0**70, "judge_quotients", True, -(2.0**68)),
        (8.0, "_mark", True, -1.0),
    ],
)
def test_a_rank_without_memory_for_its_norm_is_an_error_on_every_rank(
    pair: Team, gradient: float, read: str, clips: bool, landed: float
) -> None:
    """Nothing was changed yet, so both raise and both may try again: 1 - 8/4 = -1.

    Of 2⁷⁰ the square is infinite, so that all ranks look again.
    """
    for rank, seen in enumerate(pair.run("clipping.full", clips, gradient, read)):
        assert seen["raised"][0] == ("MemoryError" if rank else "RuntimeError")
        assert "no memory" in seen["raised"][1]
        assert seen["untouched"]
        assert seen["landed"] == [landed] * 4


def test_groups_that_are_no_grid_end_no_process(quartet: Team) -> None:
    """Not every rank hears of all then, which the documents say: √(1 + 4 + 9 + 16), and √(1 + 4 + 9)."""
    assert quartet.run("clipping.chained") == pytest.approx([30**0.5, 14**0.5, 14**0.5, 30**0.5])


def test_every_rank_is_told_the_same_norm(pair: Team) -> None:
    """In the widest dtype of any rank: √(3 · 1.1² + 3 · 2.09375²) where bfloat16 holds 2.1 as 2.09375."""
    seen = pair.run("clipping.narrow_and_wide")
    assert [dtype for dtype, _ in seen] == ["torch.float32"] * 2
    assert seen[0] == seen[1]
    assert seen[0][1] == pytest.approx(math.sqrt(3 * 1.1**2 + 3 * 2.09375**2), rel=1e-6)


def test_a_gradient_without_elements_tells_the_dtype_of_the_norm(pair: Team) -> None:
    """As in PyTorch's total norm of one process, which promotes over all gradients."""
    assert pair.run("clipping.empty_shard") == ["torch.float64"] * 2


def test_a_sum_of_addends_that_overflows_is_an_overflow(pair: Team) -> None:
    """3e38 + 3e38 is beyond float32: the norm says so, nothing is clipped to zero, and the step is skipped."""
    for norm, skipped in pair.run("clipping.sums_beyond_float32"):
        assert norm == math.inf
        assert skipped


def test_a_clip_that_stops_in_the_middle_is_given_up(pair: Team) -> None:
    """One gradient is divided and one is not: no retry divides, and the step is skipped."""
    for seen in pair.run("clipping.stop_in_the_middle"):
        assert [kind for kind, _ in seen["raised"]] == ["MemoryError", "RuntimeError"]
        assert seen["gradients"] == [3.0, 9.0]
        assert seen["skipped"]


def test_the_norm_of_some_parameters(pair: Team) -> None:
    """parameters= restricts norm and clipping to them on every rank: 3 and 4 make 5, halved by a bound of 2.5."""
    for rank, (norm, gradients) in enumerate(pair.run("clipping.subset")):
        assert norm == 5.0
        assert gradients == pytest.approx([(3.0 + rank) / 2, 100.0], rel=1e-5)


def test_squares_beyond_float32_are_no_overflow(pair: Team) -> None:
    """3e38 twice and 2e38 twice at scale 2²⁰: the norm is √(2·9 + 2·4)·1e38 / 2²⁰ and the step lands."""
    for norm, skipped in pair.run("clipping.huge"):
        assert norm == pytest.approx(math.sqrt(26.0) * 1e38 / 2**20, rel=1e-5)
        assert not skipped
