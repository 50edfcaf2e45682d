"""``torch.nn.intrinsic.quantized.modules.conv_relu`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.quantized.modules.conv_relu import *
