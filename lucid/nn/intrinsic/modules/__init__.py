"""``torch.nn.intrinsic.modules`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.modules import *
