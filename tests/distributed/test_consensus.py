"""What ranks tell each other: refusals, counts of collectives, groups, states that are loaded."""

import math

import pytest
import torch
from team import Team

from lucid.amp import GradScaler

pytestmark = pytest.mark.alone

SIXTEEN = ("all_reduce", 16)
STATE = GradScaler(init_scale=32.0).state_dict()


@pytest.mark.parametrize("kind", ["unscale_", "step"])
@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float16, "ValueError"), (torch.complex64, "NotImplementedError"), (None, "RuntimeError")],
    ids=["float16", "complex", "inference"],
)
def test_a_refusal_on_one_rank_is_an_error_on_every_rank(
    pair: Team, dtype: torch.dtype | None, error: str, kind: str
) -> None:
    """The refusing rank and the other raise the same class, name the parameter, and nothing has changed."""
    first, last = pair.run("decisions.refuse", dtype, kind, False)
    for seen in (first, last):
        assert seen["raised"][0] == error
        assert "'stray'" in seen["raised"][1]
        assert seen["again"] == seen["raised"]
        assert seen["untouched"]
        # Without the stray gradient 1 - 64 / 4 = -15 is what an ordinary step gives.
        assert seen["after"].tolist() == [-15.0] * 3
        assert seen["scale"] == 4.0
    assert "rank 1" in first["raised"][1]
    assert "rank 1" not in last["raised"][1]


def test_a_left_over_factor_on_one_rank_is_an_error_on_every_rank(pair: Team) -> None:
    """The other rank hears of it instead of waiting; without the factor both step to 1 - 64 / 4 = -15."""
    for rank, seen in enumerate(pair.run("decisions.left_over")):
        assert seen["raised"][0] == "RuntimeError"
        assert "grad_scale" in seen["raised"][1]
        assert ("rank 1" in seen["raised"][1]) == (rank == 0)
        assert seen["untouched"]
        assert seen["after"].tolist() == [-15.0] * 3


def test_a_refusal_crosses_a_grid(quartet: Team) -> None:
    """On a 2×2 mesh the rank that shares neither row nor column with the refusing one raises too."""
    for rank, seen in enumerate(quartet.run("decisions.refuse", torch.float16, "unscale_", True)):
        assert seen["raised"][0] == "ValueError"
        assert ("rank 3" in seen["raised"][1]) == (rank != 3)
        assert seen["untouched"]


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_without_a_group_says_which_line_to_add(pair: Team, use_orig_params: bool) -> None:
    """Flat shards and views into them are refused with the argument that is missing."""
    for kind, words in pair.run("decisions.fsdp1_without_group", use_orig_params):
        assert kind == "RuntimeError"
        assert "GradScaler(process_group=torch.distributed.group.WORLD)" in words


@pytest.mark.parametrize(
    ("layout", "given", "in_step", "in_update"),
    [
        ("plain", False, [], []),
        ("plain", True, [SIXTEEN], [SIXTEEN]),
        ("line", False, [SIXTEEN], []),
        ("line", True, [SIXTEEN], [SIXTEEN]),
    ],
)
def test_a_step_and_an_update_make_one_reduction_of_16_bytes(
    pair: Team, layout: str, given: bool, in_step: list, in_update: list
) -> None:
    """One a step where something is shared, one an update where a group was given, and nothing else."""
    for seen in pair.run("decisions.count", layout, given):
        assert seen == {"step": in_step, "update": in_update}


@pytest.mark.parametrize(("given", "in_step"), [(False, [SIXTEEN] * 2), (True, [SIXTEEN])])
def test_a_grid_makes_one_reduction_a_dimension(quartet: Team, given: bool, in_step: list) -> None:
    """Two for two dimensions, and one where a given group holds both."""
    for seen in quartet.run("decisions.count", "grid", given):
        assert seen["step"] == in_step


@pytest.mark.parametrize("how", ["group", "mesh", "list of meshes", "group and mesh", "mapping"])
def test_groups_are_given_in_many_ways(quartet: Team, how: str) -> None:
    """A group, a mesh, several of them and a mapping each make all four ranks skip what overflows on the last."""
    assert quartet.run("decisions.told", how) == [{"skipped": True, "scale": 2.0}] * 4


def test_update_is_shared_where_the_step_is_not(quartet: Team) -> None:
    """With a group for another optimizer only, the steps are decided alone and the scale is one everywhere."""
    seen = quartet.run("decisions.told", "mapping of another")
    assert [each["skipped"] for each in seen] == [False, False, False, True]
    assert [each["scale"] for each in seen] == [2.0] * 4


@pytest.mark.parametrize("how", ["none", "lower half"])
def test_ranks_outside_a_group_decide_alone(quartet: Team, how: str) -> None:
    """Plain tensors that no given group covers are this rank's own affair."""
    alone = {"skipped": False, "scale": 4.0}
    assert quartet.run("decisions.told", how) == [alone] * 3 + [{"skipped": True, "scale": 2.0}]


def test_copies_do_not_carry_the_group(pair: Team) -> None:
    """A pickled and a copied scaler keep the scale and talk to nobody."""
    assert pair.run("decisions.copies_go_alone") == [[[32.0, 32.0], []]] * 2


@pytest.mark.parametrize("layout", ["fsdp2", "replicated_first"])
def test_a_clip_makes_one_collective_of_16_bytes_and_its_step_none(pair: Team, layout: str) -> None:
    """Verdict and norm travel together."""
    assert pair.run("decisions.count_clip", layout) == [[("all_gather", 16)]] * 2


@pytest.mark.parametrize("scale", [65536.0, 3.0, 0.5])
@pytest.mark.parametrize(("layout", "clips"), [("plain", False), ("line", False), ("line", True)])
def test_a_shared_decision_is_one_read_of_the_host(pair: Team, layout: str, clips: bool, scale: float) -> None:
    """This rank's verdict and norm travel unread; the answer of all is what the host reads."""
    for seen in pair.run("decisions.count_reads", layout, scale, clips):
        assert seen == {"scale": 0, "unscale": 1, "step": 0, "skips": 0}


@pytest.mark.parametrize("clips", [False, True])
def test_a_grid_is_read_once_too(quartet: Team, clips: bool) -> None:
    """However many groups the answer goes through."""
    for seen in quartet.run("decisions.count_reads", "grid", 65536.0, clips):
        assert seen == {"scale": 0, "unscale": 1, "step": 0, "skips": 0}


def test_nothing_is_said_where_nothing_is_shared(pair: Team) -> None:
    """A model in plain tensors without a group trains without a collective, clipping included."""
    assert pair.run("decisions.single_process_costs_nothing") == [[], []]


def test_no_sharded_tensor_is_assembled(pair: Team) -> None:
    """Clipping, stepping and updating FSDP2 calls neither full_tensor nor redistribute."""
    assert pair.run("decisions.never_gathers") == [{"full_tensor": 0, "redistribute": 0}] * 2


def test_ranks_that_load_the_same_state_load_it(pair: Team) -> None:
    """The scale of the state is in force on both."""
    assert [seen["scale"] for seen in pair.run("decisions.load", [STATE, STATE])] == [32.0, 32.0]


@pytest.mark.parametrize("key", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
def test_ranks_that_load_different_states_all_refuse(pair: Team, key: str) -> None:
    """One value that differs on one rank is an error on both, and neither has loaded anything."""
    other = STATE | {key: {"scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.25}.get(key, 7)}
    for rank, seen in enumerate(pair.run("decisions.load", [STATE, other])):
        assert seen["raised"][0] == "RuntimeError"
        assert f"rank {rank}" in seen["raised"][1]
        assert seen["scale"] == 8.0


def test_a_bad_state_on_one_rank_is_refused_by_all(pair: Team) -> None:
    """The rank with the NaN raises its own error; the other hears of it and has loaded nothing."""
    first, last = pair.run("decisions.load", [STATE | {"scale": math.nan}, STATE])
    assert first["raised"][0] == last["raised"][0] == "ValueError"
    assert "scale" in first["raised"][1]
    assert "rank 0" in last["raised"][1]
    assert first["scale"] == last["scale"] == 8.0


@pytest.mark.parametrize("in_update", [False, True])
def test_ranks_with_different_scales_are_told(pair: Team, in_update: bool) -> None:
    """Scales of 8 and 16 are an error on both ranks that names them, in a step and in an update."""
    for kind, words in pair.run("decisions.different_scales", in_update):
        assert kind == "RuntimeError"
        assert "8.0" in words
        assert "16.0" in words


def test_a_scale_that_is_none_on_one_rank_is_an_error_on_every_rank(pair: Team) -> None:
    """Nobody waits for the rank that cannot update, and the next update is shared."""
    for rank, ((kind, words), scale) in enumerate(pair.run("decisions.update_wrongly")):
        assert kind == "ValueError"
        assert "new_scale" in words
        assert ("rank 1" in words) == (rank == 0)
        assert scale == 4.0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_state_that_one_rank_alone_loads_is_told(pair: Team, enabled: bool) -> None:
    """Met by a step, or by a disabled scaler that loads nothing: both raise and nothing has changed."""
    for (kind, words), untouched in pair.run("decisions.load_alone", enabled):
        assert kind == "RuntimeError"
        assert "load_state_dict" in words
        assert untouched


def test_what_is_no_optimizer_on_one_rank_is_an_error_on_every_rank(pair: Team) -> None:
    """A TypeError that says what an optimizer is, from every call that takes one."""
    for rank, raised in enumerate(pair.run("decisions.no_optimizer")):
        for kind, words in raised:
            assert kind == "TypeError"
            assert "param_groups" in words
            assert ("rank 1" in words) == (rank == 0)


def test_a_step_that_is_done_again_is_decided_by_all(pair: Team) -> None:
    """A rank without gradients the second time still hears the other's overflow, and no other optimizer does."""
    for skipped, other, scale in pair.run("decisions.redone"):
        assert (skipped, other, scale) == (True, [0.0, 0.0], 4.0)


def test_a_destroyed_group_is_named(pair: Team) -> None:
    """Step and update say what happened and what to do."""
    for raised in pair.run("decisions.destroyed"):
        for kind, words in raised:
            assert kind == "RuntimeError"
            assert "was destroyed" in words


def test_a_step_never_pairs_with_an_update(pair: Team) -> None:
    """A rank in step and a rank in update are both told so, instead of taking each other's answer."""
    (first, words_of_first), (last, words_of_last) = pair.run("decisions.out_of_step")
    assert first == last == "RuntimeError"
    assert "rank 0 is in a step" in words_of_first
    assert "rank 1 is in update()" in words_of_last


@pytest.mark.parametrize("meshed", [False, True], ids=["given", "meshed"])
@pytest.mark.parametrize("overflowing", [None, 0, 1])
def test_an_optimizer_on_half_of_the_ranks(quartet: Team, overflowing: int | None, meshed: bool) -> None:
    """Its overflow skips its own step on its own ranks, the other optimizer lands, the scale halves everywhere."""
    overflow = overflowing is not None
    for rank, seen in enumerate(quartet.run("decisions.two_optimizers", overflowing, meshed)):
        assert seen["skips"] == ([False, overflow] if rank < 2 else [False])
        assert seen["scale"] == (2.0 if overflow else 4.0)
        # 1 - 8 / 4
        assert seen["shared"].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("kind", ["regular", "crooked"])
def test_the_order_of_groups_is_the_same_on_all_ranks(quartet: Team, kind: str) -> None:
    """Ranks that meet the dimensions in different orders ask rows and columns alike, and hear of every rank."""
    columns = {"regular": [{0, 2}, {1, 3}], "crooked": [{0, 2}, {3, 1}]}[kind]
    for groups, heard in quartet.run("decisions.orders", kind):
        assert set(groups[0]) in columns
        assert set(groups[1]) not in columns
        assert heard == [True] * 4


@pytest.mark.parametrize("bad", ["world", 3, [3], {"a": 1.5}])
def test_what_is_no_group_is_refused(bad: object) -> None:
    """A process_group of the wrong type is a TypeError that says what is accepted."""
    with pytest.raises(TypeError, match="ProcessGroup, a DeviceMesh"):
        GradScaler(process_group=bad)
