"""``torch.nn.modules.module`` to a type checker; to an import, that module itself."""

from torch.nn.modules.module import *
from torch.nn.modules.module import T as T
