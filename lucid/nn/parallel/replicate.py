"""``torch.nn.parallel.replicate`` to a type checker; to an import, that module itself."""

from torch.nn.parallel.replicate import *
from torch.nn.parallel.replicate import T as T
