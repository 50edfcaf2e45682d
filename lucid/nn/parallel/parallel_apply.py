"""``torch.nn.parallel.parallel_apply`` to a type checker; to an import, that module itself."""

from torch.nn.parallel.parallel_apply import *
