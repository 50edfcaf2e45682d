"""``torch.nn.quantized.dynamic.modules.linear`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.dynamic.modules.linear import *
