"""[Note: in-place changes]: what plain autograd refuses, we refuse."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.errors import InPlaceError
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.steps import train

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
    if plan == "keep-all":
        settings["recompute"] = "auto"  # else there are no hooks
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


def released_late(session: ssdtrain.Session, load_at: int) -> Plan:
    """Everything leaves at the second mark behind it: the last at its own use."""
    plan = session.plan
    assert plan is not None
    moved = {"placement": Placement.OFFLOAD, "release_after": 2, "load_at": load_at}
    return Plan(
        orders={
            kind: tuple(replace(order, **moved) for order in own)  # type: ignore[arg-type]
            for kind, own in plan.orders.items()
        },
        policy="released late",
    )


class Noisy(torch.autograd.Function):
    """Saves what rrelu saves, once it is drawn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        noise = torch.rand_like(x)
        ctx.save_for_backward(x, noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.saved_tensors[1]


class Net(nn.Module):
    """Ends with rrelu, from some step on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.first = first

    def forward(self, number: int) -> Tensor:
        torch.manual_seed(number)
        x = self.net(torch.randn(512, 64))
        if number < self.first:
            made: Tensor = Noisy.apply(x)
            return made.mean()
        return nn.functional.rrelu(x, training=True).mean()


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("load_at", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 5])
def test_noise_that_leaves_at_its_own_use_is_refused(first: int, load_at: int) -> None:
    """By the general path, and by a table."""

    def call(net: nn.Module, number: int) -> Tensor:
        loss: Tensor = net(number)
        return loss

    expected = list(train(Net(first), call, 8))
    settings: dict[str, Any] = {
        "max_overhead": 0.01,
        "target": "host",
        "min_bytes": 1,
        "recompute": "off",
    }
    with ssdtrain.offload(net := Net(first), **settings) as session:
        done = 0
        with pytest.raises(InPlaceError, match="rrelu"):
            for number, found in enumerate(train(net, call, 8)):
                assert same_bits(found, expected[number]), number
                done += 1
                if session.plan is not None and session.plan.policy != "released late":
                    session.follow(released_late(session, load_at))
        assert done == max(3, first)
