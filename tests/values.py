"""Numbers of every kind, and how they pass between PyTorch and NumPy.

Knows bits and dtypes. Refuses to know what is done to the numbers.
"""

import numpy as np
import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
INTEGERS = {"bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}


def bits(dtype: str, count: int = 4099, seed: int = 0) -> Tensor:
    """Numbers of all magnitudes, subnormal, infinite and NaN too: random bits; a count that fills no vector evenly."""
    width = INTEGERS[dtype]
    drawn = np.random.default_rng(seed).integers(0, np.iinfo(width).max, count, dtype=width, endpoint=True)
    return torch.from_numpy(drawn.view(np.int16 if dtype == "bfloat16" else dtype)).view(getattr(torch, dtype))


def numbers(tensor: Tensor) -> np.ndarray:
    """Values as NumPy has them; bfloat16 in float32, which holds them all; of complex ones the real part."""
    tensor = tensor.detach().cpu()
    return np.real((tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy())


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether all values agree to the bit, with NaN equal to NaN."""
    return bool(
        np.array_equal(found, wanted, equal_nan=True)
        and np.array_equal(np.signbit(found)[found == 0], np.signbit(wanted)[wanted == 0])
    )
