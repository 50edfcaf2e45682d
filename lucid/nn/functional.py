"""``torch.nn.functional`` to a type checker; to an import, that module itself."""

from torch.nn.functional import *
