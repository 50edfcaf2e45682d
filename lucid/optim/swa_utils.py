"""``torch.optim.swa_utils`` to a type checker; to an import, that module itself."""

from torch.optim.swa_utils import *
from torch.optim.swa_utils import PARAM_LIST as PARAM_LIST
