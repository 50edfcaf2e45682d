"""``torch.nn.parallel`` to a type checker; to an import, that module itself."""

from torch.nn.parallel import *
from torch.nn.parallel import DistributedDataParallelCPU as DistributedDataParallelCPU
