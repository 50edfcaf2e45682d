"""Recomputation under ``torch.utils.checkpoint`` in the arithmetic of the first computation.

Knows that PyTorch restores its own autocast there but no mode. Refuses to know what is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from lucid.amp import _torch
from lucid.amp._half._mode import Settings, enter, leave, thread


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The ``context_fn`` for ``torch.utils.checkpoint.checkpoint`` inside a scope of ``lucid.amp.autocast``.

    Without it a checkpointed part is computed natively, both times: right, only slower.

    Returns:
        The contexts of the first computation and of the recomputation.
    """
    settings = thread.settings[-1] if thread.settings else None
    return _known(None), _known(settings)


@contextlib.contextmanager
def _known(settings: Settings | None) -> Iterator[None]:
    """Tell the mode that this checkpoint will have it again; turn it on for ``settings``."""
    before = thread.checkpoint
    with contextlib.ExitStack() as stack:
        if settings is not None:
            if thread.settings:
                # A backward inside the scope is run outside the mode.
                stack.enter_context(thread.mode)
            enter(settings)
            stack.callback(leave)
        thread.checkpoint = _torch.checkpoint()
        try:
            yield
        finally:
            thread.checkpoint = before
