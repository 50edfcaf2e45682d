"""``torch.nn.intrinsic`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic import *
