"""``torch.optim.lbfgs`` to a type checker; to an import, that module itself."""

from torch.optim.lbfgs import *
