"""``torch.nn.intrinsic.quantized.modules.bn_relu`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.quantized.modules.bn_relu import *
