"""Which release of PyTorch the tests run with."""

import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
"""Its first two numbers."""
