"""Ready, unscaled, stepped: what an optimizer may do next, whoever it is."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from lucid.amp._stages import Stage, Stages, Turn


class Plain:
    """An object that can be referred to weakly."""


class Slotted:
    """An object that cannot."""

    __slots__ = ()


class Equal:
    """An object that equals every other and has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """Say yes."""
        return True


KINDS: list[Callable[[], Any]] = [Plain, Slotted, Equal]


def at(stage: Stage) -> Turn:
    """A turn of an ``SGD`` at that stage."""
    turn = Turn(type("SGD", (), {})())
    turn.stage = stage
    return turn


def test_a_new_turn_is_ready_and_may_do_both() -> None:
    """Nothing needs to have been called before."""
    turn = Turn(Plain())
    turn.may_unscale()
    turn.may_step()
    assert turn.stage is Stage.READY


def test_unscaled_may_only_step() -> None:
    """A second unscale_ is refused, and told that step or update comes next."""
    with pytest.raises(RuntimeError, match=r"unscale_\(\) already ran for this SGD.*step\(optimizer\).*update\(\)"):
        at(Stage.UNSCALED).may_unscale()
    at(Stage.UNSCALED).may_step()


def test_stepped_may_do_neither() -> None:
    """Both are refused after a step, each in its own words, with what is legal now."""
    with pytest.raises(RuntimeError, match=r"unscale_\(\) came after step\(\) for this SGD.*update\(\)"):
        at(Stage.STEPPED).may_unscale()
    with pytest.raises(
        RuntimeError, match=r"clip_grad_norm_\(\) came after step\(\).*Call clip_grad_norm_\(\) between"
    ):
        at(Stage.STEPPED).may_unscale("clip_grad_norm_")
    with pytest.raises(RuntimeError, match=r"step\(\) already ran for this SGD.*update\(\)"):
        at(Stage.STEPPED).may_step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_belongs_to_the_object_itself(kind: Callable[[], Any]) -> None:
    """Neither equality nor a hash is asked: two objects have two turns."""
    stages, first, second = Stages(), kind(), kind()
    assert stages.of(first) is stages.of(first)
    assert stages.of(first) is not stages.of(second)


@pytest.mark.parametrize("kind", [Plain, Equal])
def test_an_optimizer_is_not_kept_alive(kind: Callable[[], Any]) -> None:
    """The scaler holds it weakly: the last reference of the user frees it."""
    freed = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __del__(self) -> None:
            freed.append(True)

    stages, optimizer = Stages(), Watched()
    stages.of(optimizer).stage = Stage.UNSCALED
    stages.remember(optimizer, skipped=True)
    del optimizer
    gc.collect()
    assert freed == [True]


def test_the_turn_of_a_freed_optimizer_stays() -> None:
    """Its overflow still counts at the update."""
    stages, optimizer = Stages(), Plain()
    turn = stages.of(optimizer)
    turn.stage, turn.overflow = Stage.UNSCALED, True
    del optimizer, turn
    gc.collect()
    assert [turn.overflow for turn in stages.turns()] == [True]


def test_an_address_that_is_used_again_is_a_new_optimizer() -> None:
    """An object made where another one was freed starts ready, and has no answer of the other."""
    stages, optimizers = Stages(), [Plain() for _ in range(100)]
    for optimizer in optimizers:
        stages.of(optimizer).stage = Stage.STEPPED
        stages.remember(optimizer, skipped=True)
        assert stages.skipped(optimizer) is True
    addresses = set(map(id, optimizers))
    del optimizer, optimizers
    others = [Plain() for _ in range(100)]
    assert addresses & set(map(id, others)), "no address was used again, so nothing was shown"
    for other in others:
        assert stages.of(other).stage is Stage.READY
        with pytest.raises(RuntimeError, match="never stepped"):
            stages.skipped(other)


def test_an_object_without_weak_references_is_held_until_the_update() -> None:
    """Its address cannot be used again before ``clear``, so that its stage stays its own."""
    stages = Stages()
    stages.of(Slotted()).stage = Stage.STEPPED
    others = [Slotted() for _ in range(100)]
    assert all(stages.of(other).stage is Stage.READY for other in others)


def test_turns_come_in_the_order_of_first_calls() -> None:
    """An optimizer that was not used does not appear, and a second call changes no order."""
    stages, a, b, c = Stages(), Plain(), Plain(), Plain()
    for optimizer in (b, a, c, b):
        stages.of(optimizer)
    stages.of(a).stage = Stage.UNSCALED
    stages.of(b).stage = Stage.STEPPED
    assert stages.turns() == [stages.of(b), stages.of(a)]


def test_clear_makes_everyone_ready() -> None:
    """After an update there is no iteration in progress, and every stage is ready."""
    stages, optimizer = Stages(), Plain()
    assert not stages.in_progress()
    stages.of(optimizer).stage = Stage.STEPPED
    assert stages.in_progress()
    stages.clear()
    assert not stages.in_progress()
    assert stages.of(optimizer).stage is Stage.READY


def test_who_was_never_stepped_is_not_kept_beyond_the_update() -> None:
    """An object that allows no weak reference, unscaled and given up, is freed by ``clear``."""
    freed = []

    class Watched(Slotted):
        __slots__ = ()

        def __del__(self) -> None:
            freed.append(True)

    stages = Stages()
    stages.of(Watched()).stage = Stage.UNSCALED
    gc.collect()
    assert freed == []
    stages.clear()
    gc.collect()
    assert freed == [True]


def test_an_answer_outlives_the_update_and_belongs_to_no_iteration() -> None:
    """``clear`` keeps it, and asking or keeping it starts no turn."""
    stages, optimizer = Stages(), Plain()
    turn = stages.of(optimizer)
    turn.stage, turn.skipped = Stage.STEPPED, True
    stages.clear()
    assert stages.skipped(optimizer) is True
    stages.remember(optimizer, skipped=False)
    assert (stages.skipped(optimizer), stages.turns()) == (False, [])


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_the_last_one(kind: Callable[[], Any]) -> None:
    """Each optimizer's own, whatever it equals, and the newer one replaces the older."""
    stages, first, second = Stages(), kind(), kind()
    stages.remember(first, skipped=True)
    stages.remember(second, skipped=False)
    assert (stages.skipped(first), stages.skipped(second)) == (True, False)
    stages.remember(first, skipped=False)
    assert stages.skipped(first) is False


def test_who_was_never_stepped_has_no_answer() -> None:
    """It raises, and says to pass the object that was given to step."""
    with pytest.raises(RuntimeError, match=r"Plain was never stepped.*given to step\(\)"):
        Stages().skipped(Plain())


def test_answers_of_freed_optimizers_are_forgotten() -> None:
    """Of a thousand optimizers that are gone nothing is kept once the next one is met."""
    stages, optimizers = Stages(), [Plain() for _ in range(1000)]
    for optimizer in optimizers:
        stages.remember(optimizer, skipped=False)
    assert len(stages._by_id) == 1000
    del optimizer, optimizers
    gc.collect()
    newcomer = Plain()
    stages.remember(newcomer, skipped=True)
    assert len(stages._by_id) == 1
