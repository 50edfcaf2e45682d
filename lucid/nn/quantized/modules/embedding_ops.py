"""``torch.nn.quantized.modules.embedding_ops`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.embedding_ops import *
