"""Every layout: a step lands on all ranks or on none, and all hold the same scale and the same replicas."""

import pytest
import torch
from drill import SCALES, SKIPS, Report
from network import train_alone
from team import Team

pytestmark = pytest.mark.alone

PAIRS = [
    ("replicas.ddp_before", "sgd"),
    ("replicas.ddp_static_graph", "adam"),
    ("replicas.ddp_bucket_view", "sgd"),
    ("replicas.ddp_no_sync", "adam"),
    ("replicas.ddp_after", "sgd"),
    ("replicas.zero", "adam"),
    ("replicas.zero_after", "sgd"),
    ("replicas.fsdp1_views", "sgd"),
    ("replicas.fsdp1_flat", "adam"),
    ("meshes.fsdp2", "sgd"),
    ("meshes.fsdp2", "adam"),
    ("meshes.fsdp2", "fused adam"),
    ("meshes.fsdp2_half", "adam"),
    ("meshes.fsdp2_half_overflow", "sgd"),
    ("meshes.fsdp2_offload", "sgd"),
    ("meshes.fsdp2_ignored", "sgd one by one"),
    ("meshes.tensor_parallel", "sgd one by one"),
    ("meshes.replicated_first", "adam"),
    ("meshes.sequence_parallel", "sgd"),
    ("handmade.pipeline", "sgd"),
    ("handmade.experts", "adam"),
    ("handmade.without_gradients", "sgd"),
    ("handmade.without_parameters", "sgd"),
]
QUARTETS = [
    ("meshes.hsdp", "sgd"),
    ("meshes.hsdp", "fused adam"),
    ("meshes.sharded_and_parallel", "sgd one by one"),
    ("replicas.ddp_after", "adam"),
    ("replicas.fsdp1_hybrid", "adam"),
]


def label(row: tuple) -> str:
    """How a row is called in pytest's output."""
    return " ".join(map(str, row))


def check(reports: list[Report], optimizer: str) -> None:
    """Compare with the table of skips and scales, the ranks with each other and all with one process."""
    for report in reports:
        assert tuple(report.skips) == SKIPS
        assert tuple(report.scales) == SCALES
        for mine, firsts in zip(report.same, reports[0].same, strict=True):
            assert mine.keys() == firsts.keys()
            assert all(torch.equal(mine[name], firsts[name]) for name in mine)
        if report.whole is not None:
            torch.testing.assert_close(
                report.whole, train_alone(optimizer, [not skip for skip in SKIPS]), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("layout", PAIRS, ids=label)
def test_two_ranks_decide_alike(pair: Team, layout: tuple) -> None:
    """Two ranks skip, land, scale and end as one process would, wherever the overflow was."""
    check(pair.run("drill.drill", *layout), layout[1])


@pytest.mark.parametrize("layout", QUARTETS, ids=label)
def test_four_ranks_decide_alike(quartet: Team, layout: tuple) -> None:
    """Four ranks in a grid skip, land, scale and end as one process would, wherever the overflow was."""
    check(quartet.run("drill.drill", *layout), layout[1])
