"""``torch.nn.quantized`` to a type checker; to an import, that module itself."""

from torch.nn.quantized import *
