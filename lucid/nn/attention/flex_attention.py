"""``torch.nn.attention.flex_attention`` to a type checker; to an import, that module itself."""

from torch.nn.attention.flex_attention import *
