"""``torch.nn.quantized.modules.utils`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.utils import *
