"""``torch.nn.utils.convert_parameters`` to a type checker; to an import, that module itself."""

from torch.nn.utils.convert_parameters import *
