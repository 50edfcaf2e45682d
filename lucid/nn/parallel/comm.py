"""``torch.nn.parallel.comm`` to a type checker; to an import, that module itself."""

from torch.nn.parallel.comm import *
