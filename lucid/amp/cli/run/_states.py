"""PyTorch's table of each optimizer's stage and flags, seen through lucid's stages.

Knows how trainers read and write it: ``scaler._per_optimizer_states[id(optimizer)]["stage"]``. Keeps nothing of
its own, and refuses to know what a flag means for the step.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import OptState

from lucid.amp._stages import Stage

if TYPE_CHECKING:
    from lucid.amp.cli.run._adapter import PyTorchScaler

STAGES = {
    Stage.READY: OptState.READY,
    Stage.UNSCALED: OptState.UNSCALED,
    Stage.STEPPED: OptState.STEPPED,
}


class States(MutableMapping[int, MutableMapping[str, Any]]):
    """PyTorch's table of optimizers by id, seen through lucid's stages."""

    def __init__(self, scaler: PyTorchScaler) -> None:
        self.scaler = scaler

    def __getitem__(self, key: int) -> MutableMapping[str, Any]:
        if key in self.scaler._known:
            return State(self.scaler, self.scaler._known[key])
        # PyTorch's table makes a row for whom it does not know.
        return {"stage": OptState.READY, "found_inf_per_device": {}}

    def __contains__(self, key: object) -> bool:
        return key in self.scaler._known

    def __setitem__(self, key: int, state: Any) -> None:
        for name, value in state.items():
            self[key][name] = value

    def __delitem__(self, key: int) -> None:
        self[key]["stage"] = OptState.READY
        del self.scaler._known[key]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.scaler._known))

    def __len__(self) -> int:
        return len(self.scaler._known)


class State(MutableMapping[str, Any]):
    """One optimizer's row: its stage, and its flags."""

    def __init__(self, scaler: PyTorchScaler, optimizer: Any) -> None:
        self.scaler, self.optimizer = scaler, optimizer

    def __getitem__(self, key: str) -> Any:
        if key == "stage":
            return STAGES[self.scaler._stages.of(self.optimizer).stage]
        if key == "found_inf_per_device":
            return self.scaler._found_inf_per_device(self.optimizer)
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        turn = self.scaler._stages.of(self.optimizer)
        if key == "stage":
            turn.stage = next(ours for ours, theirs in STAGES.items() if theirs is value)
            turn.overflow = turn.overflow if turn.stage is not Stage.READY else False
        elif key == "found_inf_per_device":
            self.scaler._found[id(self.optimizer)] = value
        else:
            raise KeyError(f"{key!r}: a scaler keeps stage and found_inf_per_device of an optimizer")

    def __delitem__(self, key: str) -> None:
        raise KeyError(f"{key!r} cannot be taken from an optimizer's state")

    def __iter__(self) -> Iterator[str]:
        return iter(("stage", "found_inf_per_device"))

    def __len__(self) -> int:
        return 2
