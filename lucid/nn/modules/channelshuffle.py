"""``torch.nn.modules.channelshuffle`` to a type checker; to an import, that module itself."""

from torch.nn.modules.channelshuffle import *
