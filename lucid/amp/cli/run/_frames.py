"""Which frames of a script's traceback are not the script's, and a traceback without them.

Knows what stands between a script and PyTorch while it is watched. Refuses to know what was raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, TracebackType

from lucid.amp.cli.run import _clipping, _notice
from lucid.amp.diagnosis import _taps

BETWEEN = frozenset(str(module.__file__) for module in (_clipping, _notice, _taps))
"""The files whose functions call what they stand in for."""


def without_ours(error: BaseException, begin: TracebackType | None) -> BaseException:
    """The same exception with the frames of its script and what the script called, and so are those behind it.

    Args:
        error: what is raised; its causes, contexts and the members of a group are told with it.
        begin: where its traceback begins in the script.
    """
    error.__traceback__ = begin
    for each in _all_of(error):
        each.__traceback__ = _without_stand_ins(each.__traceback__)
    return error


def _all_of(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that are printed with it, each once."""
    waiting, met = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) not in met:
            met.add(id(each))
            yield each
            behind = (each.__cause__, each.__context__, *getattr(each, "exceptions", ()))
            waiting += [one for one in behind if isinstance(one, BaseException)]


def _without_stand_ins(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without what stands between; of a stand-in that itself raised, the last frame stays."""
    kept: list[TracebackType] = []
    ours, wrapper = False, None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        ours = file in BETWEEN or (ours and file == wrapper)
        if file in BETWEEN:
            wrapper = _wrapper_of(trace.tb_frame)
        if not ours or (trace.tb_next is None and file in BETWEEN):
            kept.append(trace)
        trace = trace.tb_next
    told = None
    for each in reversed(kept):
        told = TracebackType(told, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return told


def _wrapper_of(frame: FrameType) -> str | None:
    """The file of the frame by which PyTorch keeps a stand-in's work out of compiled code; None where there is none.

    Asked of the stand-in: to make such a wrapper here would load the compiler, and Python would then forget that it
    has to die of SIGINT.
    """
    around = getattr(frame.f_locals.get("self"), "around", None)
    return getattr(getattr(around, "__code__", None), "co_filename", None)
