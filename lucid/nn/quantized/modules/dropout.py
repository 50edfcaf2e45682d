"""``torch.nn.quantized.modules.dropout`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.dropout import *
