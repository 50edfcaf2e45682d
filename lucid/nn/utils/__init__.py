"""``torch.nn.utils`` to a type checker; to an import, that module itself."""

from torch.nn.utils import *
from torch.nn.utils import (
    clip_grad as clip_grad,
    convert_parameters as convert_parameters,
    fusion as fusion,
    init as init,
    memory_format as memory_format,
)
