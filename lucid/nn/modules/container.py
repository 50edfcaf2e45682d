"""``torch.nn.modules.container`` to a type checker; to an import, that module itself."""

from torch.nn.modules.container import *
from torch.nn.modules.container import T as T
