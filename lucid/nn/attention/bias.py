"""``torch.nn.attention.bias`` to a type checker; to an import, that module itself."""

from torch.nn.attention.bias import *
