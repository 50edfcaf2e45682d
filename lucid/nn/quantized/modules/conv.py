"""``torch.nn.quantized.modules.conv`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.conv import *
