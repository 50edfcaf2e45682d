"""``torch.nn.utils.parametrize`` to a type checker; to an import, that module itself."""

from torch.nn.utils.parametrize import *
