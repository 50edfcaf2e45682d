"""``torch.optim.optimizer`` to a type checker; to an import, that module itself."""

from torch.optim.optimizer import *
from torch.optim.optimizer import (
    Args as Args,
    DeviceDict as DeviceDict,
    DeviceDtypeDict as DeviceDtypeDict,
    GlobalOptimizerPostHook as GlobalOptimizerPostHook,
    GlobalOptimizerPreHook as GlobalOptimizerPreHook,
    Kwargs as Kwargs,
    ParamsT as ParamsT,
    R as R,
    StateDict as StateDict,
    T as T,
    required as required,
)
