"""``torch.nn.quantized.modules.rnn`` to a type checker; to an import, that module itself."""

from torch.nn.quantized.modules.rnn import *
