"""``torch.nn.utils.parametrizations`` to a type checker; to an import, that module itself."""

from torch.nn.utils.parametrizations import *
