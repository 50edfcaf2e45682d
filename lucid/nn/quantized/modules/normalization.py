"""``torch.nn.quantized.modules.normalization`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.normalization import *
