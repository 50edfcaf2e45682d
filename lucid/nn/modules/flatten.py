"""``torch.nn.modules.flatten`` to a type checker; to an import, that module itself."""

from torch.nn.modules.flatten import *
