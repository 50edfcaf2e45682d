"""An optimizer that is only shaped like one, and parameters that hold given gradients."""

from typing import Any

import torch
from torch import Tensor


class Duck:
    """What a scaler needs of an optimizer, and nothing more."""

    def __init__(self, *parameters: Any, **group: Any) -> None:
        self.param_groups = [{"params": list(parameters), **group}]
        self.steps = 0

    def step(self) -> None:
        """Count."""
        self.steps += 1


def with_grad(gradient: Tensor, parameter: Tensor | None = None) -> torch.nn.Parameter:
    """A parameter that holds this gradient."""
    made = torch.nn.Parameter(torch.zeros_like(gradient) if parameter is None else parameter)
    made.grad = gradient
    return made
