"""Mixed-precision training: ``GradScaler``, ``autocast`` and what they tell.

The files, in the order in which they are best read::

    _schedule.py       how the scale moves: pure arithmetic on floats
    _stages.py         ready → unscaled → stepped, for each optimizer
    _alarm.py          when a falling scale is spoken of
    _torch.py          PyTorch's private names, each with a public fallback
    _memory.py         which tensors are the same memory, and which overlap
    _seen.py           which tensors were divided in this iteration
    _division.py       division by the scale, and the verdict on the quotients
    _refusals.py       why a gradient is not unscaled, by name
    _gradients.py      an optimizer's gradients: found, refused, or handed over
    _outputs.py        the outputs that are scaled, in any nesting
    _norms.py          the norm of many tensors in one read
    _reading.py        would a quotient overflow? One read that changes nothing
    _fused.py          the division inside a fused optimizer's kernel
    _clip.py           unscaling and clipping in one multiplication
    _meshes.py         which ranks share an optimizer
    _shares.py         which gradients a rank counts in a norm over all ranks
    _ballots.py        what ranks exchange, as integers
    _unread.py         what a rank tells before its host has read it
    _rounds.py         numbers that go round groups of processes
    _consensus.py      did any rank overflow?
    _clip_together.py  clipping by the norm and the verdict of all ranks
    _unscaling.py      every gradient divided once, one verdict for all ranks
    _settings.py       what a scaler is set to, and what a checkpoint keeps
    _events.py         what happened, for those who ask and those who listen
    _causes.py         which gradients were not finite
    _grad_scaler.py    GradScaler: a short story told with the files above
    _autocast.py       autocast, a torch.autocast
    _half/             half-precision arithmetic on processors without half-precision units
    diagnosis/         what float16 does to a model
    _journal.py        a file of JSON lines that survives a kill
    history/           the record of a run
    cli/               lucid-amp demo | run | report
"""

from lucid.amp._autocast import autocast
from lucid.amp._grad_scaler import GradScaler
from lucid.amp._schedule import ScaleUpdate

__all__ = ["GradScaler", "ScaleUpdate", "autocast"]

# Errors, pickles and help pages show the path that a user types.
for _public in (GradScaler, ScaleUpdate, autocast):
    _public.__module__ = __name__
del _public
