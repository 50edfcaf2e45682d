"""``torch.nn.modules.pixelshuffle`` to a type checker; to an import, that module itself."""

from torch.nn.modules.pixelshuffle import *
