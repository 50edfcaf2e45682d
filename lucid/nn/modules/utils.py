"""``torch.nn.modules.utils`` to a type checker; to an import, that module itself."""

from torch.nn.modules.utils import *
