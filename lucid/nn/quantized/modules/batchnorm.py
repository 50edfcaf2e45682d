"""``torch.nn.quantized.modules.batchnorm`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.batchnorm import *
