"""``torch.nn.backends.thnn`` to a type checker; to an import, that module itself."""

from torch.nn.backends.thnn import *
