"""``torch.nn.modules.sparse`` to a type checker; to an import, that module itself."""

from torch.nn.modules.sparse import *
