"""``torch.nn.attention.varlen`` to a type checker; to an import, that module itself."""

from torch.nn.attention.varlen import *
from torch.nn.attention.varlen import log as log
