"""Ranks that are late, and a rank that dies."""

import os
import signal
import time

import pytest
from team import Team

pytestmark = pytest.mark.alone


def test_200_repeats_with_random_delays_give_the_same(pair: Team) -> None:
    """Each rank sleeps at random before every call; skips, scale and parameter never depend on it."""
    # On paper: iteration 1 overflows on rank 0, 2 on rank 1, 4 on both; 0, 3 and 5 land with a true gradient of 1.
    # 64 → 32 → 16 after 1 and 2; 3 counts one; 4 halves; 5 counts one: 8.
    expected = ([False, True, True, False, True, False], 8.0, [0.25, 0.25])
    for results in pair.run("decisions.repeated", 200, 0.002):
        assert results == [expected] * 200


@pytest.mark.skipif(os.name != "posix", reason="no such signals on this system")
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_is_an_error_and_leaves_the_scaler_usable(fault: str) -> None:
    """The survivor's step fails within the group's time-out, unchanged; alone it then steps and updates."""
    team = Team(2, patience=5.0)
    try:
        begun = time.monotonic()
        for pipe in team.pipes:
            pipe.send(("casualty.lose_a_rank", (getattr(signal, fault),)))
        ok, seen = team.answer(0, begun + 60)
        assert ok, seen
        assert time.monotonic() - begun < 45
        assert seen["error"] in ("RuntimeError", "DistBackendError", "DistNetworkError")
        assert seen["gradient"] == [64.0, 64.0]
        assert seen["parameter"] == [1.0, 1.0]
        # 1 - 64 / 4, and an interval of 1 grows the scale.
        assert seen["alone"] == {"parameter": [-15.0, -15.0], "scale": 8.0, "state": 4.0}
    finally:
        team.dismiss()
