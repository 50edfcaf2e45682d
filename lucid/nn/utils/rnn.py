"""``torch.nn.utils.rnn`` to a type checker; to an import, that module itself."""

from torch.nn.utils.rnn import *
from torch.nn.utils.rnn import PackedSequence_ as PackedSequence_
from torch.nn.utils.rnn import bind as bind
