"""``torch.nn.quantized.dynamic.modules.conv`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.dynamic.modules.conv import *
