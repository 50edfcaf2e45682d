"""LSTM, GRU and simple recurrent networks, whole sequences at a time.

Knows what PyTorch casts of them and to what their outputs are rounded. Refuses to know the cells.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lucid.amp._half._operands import Operands, are_plain
from lucid.amp._half._wide import Kept, Replay, apply


def recurrence(operands: Operands, func: Any, *args: Any) -> Any:
    """``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``, padded or packed.

    Their arguments are (input, state, weights, ...), or (data, batch sizes, state, weights, ...) if packed;
    an LSTM's state is two tensors.
    """
    packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()
    place = 2 if packed else 1
    state = list(args[place]) if isinstance(args[place], (list, tuple)) else [args[place]]
    weights, rest = list(args[place + 1]), args[place + 2 :]
    if not are_plain(args[0], *state, *weights):
        return NotImplemented
    # Where PyTorch computes the cells outside its cast lists, they keep the dtype of the state.
    keeps_state = func is torch.gru or (func is torch.lstm and packed)
    if not keeps_state:
        state = [operands.cast(tensor) for tensor in state]
    sizes = [args[1]] if packed else []
    half = [operands.cast(args[0]), *sizes, *state, *(operands.cast(weight) for weight in weights)]
    call = functools.partial(_run, func, place, place + len(state), rest)
    # PyTorch has no float16 LSTM on a processor whose memory this could exceed.
    if func is torch.lstm and not packed and operands.half is torch.float16 and torch.is_grad_enabled():
        return apply(Kept, call, operands.half, *half)
    random = torch.get_rng_state() if rest[2] > 0 and rest[3] else None
    return apply(Replay, call, state[0].dtype if keeps_state else operands.half, random, *half)


def _run(func: Any, state: int, weights: int, rest: tuple[Any, ...], wide: Sequence[Tensor]) -> Any:
    hidden = list(wide[state:weights]) if func is torch.lstm else wide[state]
    return func(*wide[:state], hidden, list(wide[weights:]), *rest)
