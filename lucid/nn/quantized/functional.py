"""``torch.nn.quantized.functional`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.functional import *
