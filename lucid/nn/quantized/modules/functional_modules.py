"""``torch.nn.quantized.modules.functional_modules`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.functional_modules import *
