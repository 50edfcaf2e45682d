"""``torch.nn.grad`` to a type checker; to an import, that module itself."""

from torch.nn.grad import *
