"""``torch.nn.qat`` to a type checker; to an import, that module itself."""

from torch.nn.qat import *
