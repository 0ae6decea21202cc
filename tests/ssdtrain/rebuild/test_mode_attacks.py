"""Modes that come, go or change results under programs whose recipes are admitted."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ssdtrain
from ssdtrain.cache.moved import MovedHandle, MovedTensor
from ssdtrain.cache.record import Lane, LaneProfile
from ssdtrain.rebuild.expression import Layout
from tests.ssdtrain.rebuild.bodies import Body, Net, Pure, check


class Altering(TorchDispatchMode):
    """Changes results below autograd."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        return found + 1 if func in (aten.gelu.default, aten.mul.Tensor) else found


class Writing(TorchFunctionMode):
    """Writes to what an operator made."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if "mul" in func.__name__ and isinstance(found, Tensor):
            with torch.no_grad():
                found.detach().mul_(0.5)
        return found


@pytest.mark.parametrize("mode", [Altering, Writing], ids=["Altering", "Writing"])
def test_a_mode_that_comes_later(mode: Any) -> None:
    def body(net: Net, x: Tensor, step: int) -> Tensor:
        if not hasattr(net, "extra"):
            net.extra = Pure()
        h = net.first(x)
        if step < 3:
            return net.last(F.gelu(net.extra(h)))
        with mode():
            return net.last(F.gelu(net.extra(h)))

    check(body)


def entered(step: int) -> Any:
    """The mode, in the later steps."""
    return nullcontext() if step < 3 else Altering()


def saved_later(net: Net, x: Tensor, step: int) -> Tensor:
    """The GELU's result is saved when the mode is gone."""
    h = net.first(x)
    with entered(step):
        h = F.gelu(h)
    return net.last(h)


def saved_nothing(net: Net, x: Tensor, step: int) -> Tensor:
    """Neither does what runs under the mode."""
    a, b = net.first(x), net.second(x)
    squares = a.square() + b.square()
    with entered(step):
        c = a * 0.5
    return net.last(c.square()) + squares


def of_the_step(net: Net, x: Tensor, step: int) -> Tensor:
    """It ran before the model's forward."""
    return net.last(F.gelu(net.second(x)))


@pytest.mark.parametrize("body", [saved_later, saved_nothing])
def test_a_mode_that_is_gone(body: Body) -> None:
    check(body)


def test_a_mode_around_what_the_model_is_given() -> None:
    def given(net: Net, x: Tensor) -> None:
        x.requires_grad_()
        with entered(net.step):
            h = F.gelu(x)
        net(h).backward()

    check(of_the_step, given)


def test_a_mode_around_backward() -> None:
    """What is made again there is what forward made."""

    def around(net: Net, x: Tensor) -> None:
        loss = net(x)
        with entered(net.step):
            loss.backward()

    check(lambda net, x, step: net.last(F.gelu(net.first(x))), around)


def test_an_item_that_was_changed_is_no_operand() -> None:
    """Its bytes are not those that the operator read."""
    with ssdtrain.offload(nn.Linear(2, 2), max_overhead=0.01, target="host") as session:
        recipes: Any = session.cache.recipes
        tensor, run = torch.zeros(2), SimpleNamespace(nothing=torch.empty(0))
        lane = Lane("", LaneProfile())
        moved = MovedTensor(tensor, "item", lane, session.cache.ledger, None)
        handle = MovedHandle(moved, tensor, run, None)
        found = recipes.keeper.saved(handle, None)
        assert found.owner is moved
        assert found.layout == Layout.of(tensor)
        tensor.add_(1)
        assert recipes.keeper.saved(handle, None) is None


def test_an_item_of_another_session_is_no_operand() -> None:
    """It is given back when that session says so."""
    with ssdtrain.offload(nn.Linear(2, 2), max_overhead=0.01, target="host") as session:
        moved = MovedHandle.__new__(MovedHandle)
        moved.moved = SimpleNamespace(ledger=object())  # type: ignore[assignment]
        moved.epsilon = None
        recipes: Any = session.cache.recipes
        assert recipes.keeper.saved(moved, None) is None
