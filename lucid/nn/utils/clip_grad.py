"""``torch.nn.utils.clip_grad`` to a type checker; to an import, that module itself."""

from torch.nn.utils.clip_grad import *
