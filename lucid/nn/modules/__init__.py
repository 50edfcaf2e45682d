"""``torch.nn.modules`` to a type checker; to an import, that module itself."""

from torch.nn.modules import *
from torch.nn.modules import (
    activation as activation,
    adaptive as adaptive,
    batchnorm as batchnorm,
    channelshuffle as channelshuffle,
    container as container,
    conv as conv,
    distance as distance,
    dropout as dropout,
    flatten as flatten,
    fold as fold,
    instancenorm as instancenorm,
    linear as linear,
    linear_cross_entropy_options as linear_cross_entropy_options,
    loss as loss,
    module as module,
    normalization as normalization,
    padding as padding,
    pixelshuffle as pixelshuffle,
    pooling as pooling,
    rnn as rnn,
    sparse as sparse,
    transformer as transformer,
    upsampling as upsampling,
)
