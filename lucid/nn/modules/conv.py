"""``torch.nn.modules.conv`` to a type checker; to an import, that module itself."""

from torch.nn.modules.conv import *
from torch.nn.modules.conv import convolution_notes as convolution_notes
