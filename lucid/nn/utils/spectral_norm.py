"""``torch.nn.utils.spectral_norm`` to a type checker; to an import, that module itself."""

from torch.nn.utils.spectral_norm import *
from torch.nn.utils.spectral_norm import T_module as T_module
