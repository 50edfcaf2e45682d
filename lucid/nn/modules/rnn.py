"""``torch.nn.modules.rnn`` to a type checker; to an import, that module itself."""

from torch.nn.modules.rnn import *
from torch.nn.modules.rnn import apply_permutation as apply_permutation
