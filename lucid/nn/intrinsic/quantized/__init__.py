"""``torch.nn.intrinsic.quantized`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.quantized import *
