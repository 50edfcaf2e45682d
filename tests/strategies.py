"""What may happen to a scaler: worlds of parameters and optimizers, and the calls of a user's program.

Knows which calls exist, legal or not, and which numbers are worth trying. Refuses to know what any of it should
lead to: ``reference.py`` does.
"""

import math
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

ELEMENTS = 3
PARAMETERS = 4
OPTIMIZERS = 3

# Each against the scales below: ordinary, exact and not, overflowing only once scaled or divided, subnormal.
NUMBERS = [1.0, -3.0, 0.1, 0.0, 65504.0, 3e38, -3e38, 1e-30, 2.0**-120, 2.0**-149, math.inf, -math.inf, math.nan]
SCALES = [65536.0, 1.0, 3.0, 0.25, 0.1, 1000.1, 2.0**-126, 2.0**127]
BAD_SCALES = [0.0, -4.0, math.nan, math.inf, 2.0**-127, 2.0**128, "8", True, None, 1j]
DTYPES = ["float32"] * 5 + ["bfloat16", "float64", "float16", "complex64"]

_parameters = st.integers(0, PARAMETERS - 1)
_optimizers = st.integers(0, OPTIMIZERS - 1)
_gradients = st.lists(st.sampled_from([1.0, 0.5, -3.0] * 4 + NUMBERS), min_size=ELEMENTS, max_size=ELEMENTS)


@dataclass(frozen=True)
class World:
    """What is there before the first call.

    Attributes:
        dtypes: of each parameter.
        optimizers: the kind of each, and its parameters, which others may hold too.
        settings: scale, growth factor, backoff factor and growth interval.
        in_kernel: whether fused optimizers divide in their kernels, however small the gradients.
    """

    dtypes: tuple[str, ...]
    optimizers: tuple[tuple[str, tuple[int, ...]], ...]
    settings: tuple[float, float, float, int]
    in_kernel: bool


Call = tuple[str, tuple[Any, ...]]
"""One call of a program: its name, and what it is about."""


def worlds() -> st.SearchStrategy[World]:
    """Four parameters and three optimizers that may share them or hold none."""
    held = st.lists(_parameters, max_size=PARAMETERS, unique=True).map(tuple)
    kinds = st.sampled_from(["plain", "foreach", "fused", "duck", "unhashable"])
    return st.builds(
        World,
        dtypes=st.tuples(*[st.sampled_from(DTYPES)] * PARAMETERS),
        optimizers=st.tuples(*[st.tuples(kinds, held)] * OPTIMIZERS),
        settings=st.tuples(
            st.sampled_from(SCALES), st.sampled_from([2.0, 1.1, 1e30]), st.sampled_from([0.5, 0.7]), st.integers(1, 3)
        ),
        in_kernel=st.booleans(),
    )


def _calls(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return st.tuples(st.just(name), st.tuples(*arguments))


_GRADIENTS = [
    _calls("backward", st.lists(_parameters, min_size=1, max_size=PARAMETERS, unique=True), _gradients),
    _calls("backward", st.just(list(range(PARAMETERS))), _gradients),
    _calls("assign", _parameters, _gradients),
    _calls("accumulate", _parameters, _gradients),
    _calls("share", _parameters, _parameters),
    _calls("clear", _parameters),
    _calls("fill_with_zero", _parameters),
]
_ITERATION = [
    _calls("unscale", _optimizers),
    _calls("clip", _optimizers, st.sampled_from([1e38, 1.0])),
    _calls("step", _optimizers, st.sampled_from(["alone", "alone", "alone", "None", "closure", "keyword closure"])),
    _calls("step", _optimizers, st.just("alone")),
    _calls("update"),
    _calls("update"),
    _calls("update_to", st.sampled_from(SCALES)),
    _calls("update_to_bad", st.sampled_from([bad for bad in BAD_SCALES if bad is not None])),
]
_BETWEEN = [
    _calls("save"),
    _calls("load"),
    _calls("load_bad", st.sampled_from(["scale", "growth_factor", "backoff_factor", "growth_interval", "missing"])),
    _calls("copy", st.sampled_from(["pickle", "deepcopy"])),
    _calls("set", st.sampled_from([("growth_factor", 4.0), ("backoff_factor", 0.1), ("growth_interval", 2)])),
    _calls("set_bad", st.sampled_from([("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_interval", 0)])),
    _calls("replace_optimizer", _optimizers),
    _calls("add_parameter", _optimizers, _parameters),
]


def programs() -> st.SearchStrategy[list[Call]]:
    """Any calls in any order; gradients and the three of an iteration more often than the rest."""
    return st.lists(st.one_of(*_GRADIENTS, *_ITERATION, *_ITERATION, *_BETWEEN), max_size=25)
