"""``torch.nn.qat.dynamic`` to a type checker; to an import, that module itself."""

from torch.nn.qat.dynamic import *
