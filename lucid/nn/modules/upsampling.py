"""``torch.nn.modules.upsampling`` to a type checker; to an import, that module itself."""

from torch.nn.modules.upsampling import *
