"""``torch.nn.modules.dropout`` to a type checker; to an import, that module itself."""

from torch.nn.modules.dropout import *
