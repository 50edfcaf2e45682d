"""``torch.nn.quantized.dynamic.modules.rnn`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.dynamic.modules.rnn import *
