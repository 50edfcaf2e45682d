"""``torch.nn.quantizable.modules.rnn`` to a type checker; to an import, that module itself."""

from torch.nn.quantizable.modules.rnn import *
