"""A traceback without what stands between a script and PyTorch; nothing that tells a fault is lost."""

import sys
import traceback
from typing import Any

import pytest
import torch

from lucid.amp.cli.run._frames import without_ours
from lucid.amp.cli.run._notice import Notice
from lucid.amp.diagnosis import Listener, listen


class Hears(Listener):
    """Hears updates, so that stand-ins are there."""

    def updated(self, scaler: Any, update: Any) -> None:
        """Do nothing."""


def raised() -> ValueError:
    """What PyTorch's scaler raises for a float16 parameter, through the stand-ins of a listener."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    weight.grad = torch.ones(1, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with listen(scaler, Hears()), pytest.raises(ValueError, match="FP16") as caught:
        scaler.step(torch.optim.SGD([weight], lr=0.1))
    return caught.value


def frames(error: BaseException) -> list[str]:
    """The functions of a traceback, outermost first."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


CLEAN = ["raised", "step", "unscale_", "_unscale_grads_"]


def test_stand_ins_are_left_out_and_all_else_stays() -> None:
    """Of ten frames the four remain that are there without a listener, with their lines."""
    error = raised()
    assert len(frames(error)) == 10
    assert frames(without_ours(error, error.__traceback__)) == CLEAN


def test_what_stands_behind_is_cleaned_too() -> None:
    """A cause, a context and, where Python has them, the members of a group; a ring of contexts ends."""
    error, cause, context = KeyError("mine"), raised(), raised()
    error.__cause__, cause.__context__, context.__context__ = cause, context, error
    without_ours(error, None)
    assert (frames(cause), frames(context)) == (CLEAN, CLEAN)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups")
def test_the_members_of_a_group_are_cleaned() -> None:
    """Each of them has a traceback of its own."""
    member = raised()
    without_ours(ExceptionGroup("many", [member]), None)  # noqa: F821
    assert frames(member) == CLEAN


def test_a_fault_of_a_stand_in_is_shown() -> None:
    """Where it was a stand-in that raised, its frame is the one to see."""
    notice = Notice(lambda scaler: None)
    notice._is_new = None  # type: ignore[assignment, method-assign]
    with notice, pytest.raises(TypeError) as found:
        torch.amp.GradScaler("cpu")
    assert frames(without_ours(found.value, found.value.__traceback__))[-1] == "constructed"
