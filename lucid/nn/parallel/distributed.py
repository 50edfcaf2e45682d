"""``torch.nn.parallel.distributed`` to a type checker; to an import, that module itself."""

from torch.nn.parallel.distributed import *
from torch.nn.parallel.distributed import RPC_AVAILABLE as RPC_AVAILABLE
from torch.nn.parallel.distributed import logger as logger
