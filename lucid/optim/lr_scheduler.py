"""``torch.optim.lr_scheduler`` to a type checker; to an import, that module itself."""

from torch.optim.lr_scheduler import *
from torch.optim.lr_scheduler import EPOCH_DEPRECATION_WARNING as EPOCH_DEPRECATION_WARNING
