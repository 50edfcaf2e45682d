"""``torch.nn.intrinsic.quantized.dynamic`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.quantized.dynamic import *
