"""``torch.nn.utils.fusion`` to a type checker; to an import, that module itself."""

from torch.nn.utils.fusion import *
from torch.nn.utils.fusion import ConvT as ConvT
from torch.nn.utils.fusion import LinearT as LinearT
