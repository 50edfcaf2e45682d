"""``torch.nn.quantized.modules.activation`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.activation import *
