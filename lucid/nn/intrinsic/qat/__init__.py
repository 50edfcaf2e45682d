"""``torch.nn.intrinsic.qat`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.qat import *
