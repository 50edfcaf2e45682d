"""Which arithmetic is picked for this processor, and how it can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lucid.amp import autocast
from lucid.amp._half import _processor


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    """Nothing is remembered from one test to the next."""
    _processor.faster.cache_clear()
    yield
    _processor.faster.cache_clear()


def tell(patch: pytest.MonkeyPatch, **units: Any) -> None:
    """Let PyTorch say this of the processor."""
    patch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64"} | units, raising=False)


@pytest.mark.parametrize("asked", ["native", "float32"])
def test_what_was_asked_is_picked(asked: str) -> None:
    """On the processor an arithmetic that was asked for is what is picked, for every kind of operator."""
    scope = autocast("cpu", arithmetic=asked)
    assert scope.arithmetic == asked
    assert set(scope.arithmetic_by_kind.values()) == {asked}


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_processor_without_units_computes_in_float32(monkeypatch: pytest.MonkeyPatch, half: torch.dtype) -> None:
    """Where PyTorch names no unit for the dtype nothing is measured."""
    tell(monkeypatch)
    monkeypatch.setattr(_processor, "_picked", lambda *_: pytest.fail("measured"))
    assert autocast("cpu", half).arithmetic == "float32"


@pytest.mark.parametrize("unit", ["amx_fp16", "avx512_fp16"])
def test_units_are_measured(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    """Where PyTorch names a unit each kind of operator is measured, once."""
    tell(monkeypatch, **{unit: True})
    measured: list[str] = []

    def picked(make: Any, dtype: torch.dtype) -> str:
        measured.append(make.__name__)
        return "native" if make.__name__ == "_product" else "float32"

    monkeypatch.setattr(_processor, "_picked", picked)
    for _ in range(2):
        scope = autocast("cpu", torch.float16)
        assert scope.arithmetic == "mixed"
        assert scope.arithmetic_by_kind["product"] == "native"
        assert scope.arithmetic_by_kind["attention"] == "float32"
    assert measured == ["_product", "_convolution", "_attention", "_recurrence"]


@pytest.mark.parametrize(("native", "wide", "expected"), [(1.0, 1.0, "native"), (2.0, 1.0, "float32")])
def test_the_faster_one_is_picked(monkeypatch: pytest.MonkeyPatch, native: float, wide: float, expected: str) -> None:
    """As fast as float32 is native; twice as slow is not."""
    monkeypatch.setattr(_processor, "_fastest", lambda _: [native, wide])
    assert _processor._picked(_processor._product, torch.float16) == expected


def test_an_operator_that_pytorch_lacks_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch has no such operator in the dtype, float32 is picked."""

    def fail(_: Any) -> list[float]:
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(_processor, "_fastest", fail)
    assert _processor._picked(_processor._recurrence, torch.float16) == "float32"


def test_measuring_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in a scope, in a mode, under ``no_grad``: the state and the random numbers stay."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    tell(monkeypatch, avx512_bf16=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        kinds = _processor.faster(torch.bfloat16)
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert set(kinds) == set(_processor.KINDS)
    assert set(kinds.values()) <= {"native", "float32"}
    assert torch.equal(torch.get_rng_state(), before)


def test_every_step_can_be_measured() -> None:
    """Each kind's step runs in float32, forward and backward, in measurable time."""
    for make in _processor._STEPS:
        assert 0.0 < _processor._fastest([make(torch.float32)])[0] < 10.0


def test_what_does_not_say_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that does not tell, and another architecture, are measured."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not _processor._lacks_units(torch.float16)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "aarch64"}, raising=False)
    assert not _processor._lacks_units(torch.float16)
