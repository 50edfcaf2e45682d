"""``torch.nn.intrinsic.quantized.modules`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.quantized.modules import *
