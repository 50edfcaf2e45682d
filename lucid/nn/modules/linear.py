"""``torch.nn.modules.linear`` to a type checker; to an import, that module itself."""

from torch.nn.modules.linear import *
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as NonDynamicallyQuantizableLinear
