"""``torch.nn.parallel.data_parallel`` to a type checker; to an import, that module itself."""

from torch.nn.parallel.data_parallel import *
from torch.nn.parallel.data_parallel import T as T
