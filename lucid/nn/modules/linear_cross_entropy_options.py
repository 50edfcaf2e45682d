"""``torch.nn.modules.linear_cross_entropy_options`` to a type checker; to an import, that module itself."""

from torch.nn.modules.linear_cross_entropy_options import *
