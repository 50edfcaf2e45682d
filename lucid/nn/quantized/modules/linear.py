"""``torch.nn.quantized.modules.linear`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.linear import *
