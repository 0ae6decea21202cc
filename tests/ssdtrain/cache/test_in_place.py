"""[Note: in-place changes]: what plain autograd refuses, we refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.errors import InPlaceError
from tests.ssdtrain.bits import same_bits

Run = Callable[..., Any]


def changed_later(_: nn.Module, x: Tensor) -> Tensor:
    y = x.exp()
    z = y * y
    y.add_(1)
    return z.sum()


def view_changed_later(_: nn.Module, x: Tensor) -> Tensor:
    y = x.exp()
    z = y * y
    y[0].zero_()
    return z.sum()


@pytest.mark.parametrize("function", [changed_later, view_changed_later])
@pytest.mark.parametrize("plan", ["offload-all", "keep-all"])
@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_change_after_save_raises(
    function: Callable[..., Tensor],
    plan: str,
    min_bytes: int,
    gradients: Run,
    everything: Any,
) -> None:
    x = torch.randn(64, requires_grad=True)
    with pytest.raises(RuntimeError, match="inplace"):
        gradients(function, [x])
    settings = {**everything, "plan": plan, "min_bytes": min_bytes}
    with pytest.raises(InPlaceError, match="inplace operation"):
        gradients(function, [x], settings)


def test_changed_parameter_raises(everything: Any) -> None:
    model = nn.Linear(4, 4)
    with ssdtrain.offload(model, **everything):
        loss = model(torch.randn(2, 4, requires_grad=True)).sum()
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(InPlaceError, match="a parameter"):
            loss.backward()


def test_probe_keeps_no_memory_alive(everything: Any, around: Any) -> None:
    import weakref

    held: list[weakref.ref[Any]] = []

    def function(_: nn.Module, x: Tensor) -> Tensor:
        y = x.exp()
        held.append(weakref.ref(y.untyped_storage()))
        return (y * 2).exp()

    model = around(function)
    with ssdtrain.offload(model, **everything):
        out = model(torch.randn(1000, requires_grad=True))
        # exp saves its result, which left at once with a window of one byte.
        assert held[0]() is None
        out.sum().backward()


@pytest.mark.parametrize("plan", ["offload-all", "keep-all"])
@pytest.mark.parametrize("training", [True, False])
def test_rrelu_fills_its_noise_after_autograd_has_saved_it(
    training: bool, plan: str, gradients: Run, everything: Any
) -> None:
    """Without a word this gave other gradients; found by torch's operator database."""

    def function(_: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return nn.functional.rrelu(x, training=training).square().sum()

    x = torch.randn(64, requires_grad=True)
    expected, _ = gradients(function, [x])
    settings = {**everything, "plan": plan}
    if training and plan == "offload-all":
        with pytest.raises(InPlaceError, match="rrelu"):
            gradients(function, [x], settings)
        return
    found, _ = gradients(function, [x], settings)
    assert all(gradient is not None for gradient in found)
    assert same_bits(found, expected)
