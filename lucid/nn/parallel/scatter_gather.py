"""``torch.nn.parallel.scatter_gather`` to a type checker; to an import, that module itself."""

from torch.nn.parallel.scatter_gather import *
from torch.nn.parallel.scatter_gather import T as T
from torch.nn.parallel.scatter_gather import is_namedtuple as is_namedtuple
