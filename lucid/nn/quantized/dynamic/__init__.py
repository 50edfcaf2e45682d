"""``torch.nn.quantized.dynamic`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.dynamic import *
