"""What a scaler keeps alive, what a copy of it keeps, and when there is none."""

import copy
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from weights import sgd, trained

from lucid.amp import GradScaler


def test_a_scaler_keeps_no_optimizer_and_no_gradient_alive() -> None:
    """Stages, answers, the record of an update and what was divided are weak."""
    weight, optimizer = sgd(math.inf)
    scaler = GradScaler(4.0)
    scaler.step(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)
    alive = [weakref.ref(optimizer), weakref.ref(weight.grad), weakref.ref(weight)]
    del weight, optimizer
    assert [reference() for reference in alive] == [None] * 3


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_copy_keeps_settings_scale_and_count(how: Any, enabled: bool) -> None:
    """And goes on by itself; hooks and answers are not carried over."""
    scaler = GradScaler(8.0, 4.0, 0.25, 7, enabled)
    scaler.register_update_hook(lambda *_: pytest.fail("a hook was copied"))
    if not enabled:
        scaler.update()
    copied = how(scaler)
    assert repr(copied) == repr(scaler)
    assert copied.is_enabled() is enabled
    copied.update()
    assert copied.last_update is None or copied.last_update.index == 0
    assert scaler.state_dict()["_growth_tracker"] == 0
    assert copied.state_dict()["_growth_tracker"] == int(enabled)


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_in_the_middle_of_an_iteration_there_is_no_copy(how: Any, call: str) -> None:
    """RuntimeError names update(); after it, and after a refusal, copying works."""
    _, optimizer = sgd()
    scaler = GradScaler()
    getattr(scaler, call)(optimizer)
    with pytest.raises(RuntimeError, match=r"update\(\)"):
        how(scaler)
    scaler.update()
    how(scaler)
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2).half()))
    optimizer.param_groups[0]["params"][1].grad = torch.ones(2).half()
    with pytest.raises(ValueError, match="float16"):
        getattr(scaler, call)(optimizer)
    how(scaler)


def test_a_subclass_is_a_scaler() -> None:
    """Its own methods see the scaler's, and a copy keeps its class."""

    class Logged(GradScaler):
        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale)
            self.seen = self.get_scale()

    scaler = Logged(4.0, growth_interval=1)
    trained(1.0, scaler=scaler)
    assert scaler.seen == 8.0
    assert isinstance(copy.deepcopy(scaler), Logged)
    assert repr(scaler).startswith("Logged(")
