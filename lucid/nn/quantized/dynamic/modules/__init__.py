"""``torch.nn.quantized.dynamic.modules`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.dynamic.modules import *
