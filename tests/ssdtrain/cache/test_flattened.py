"""[Note: flattened]: wrappers that can be taken apart are moved by their inner tensors,
and backward gets them as what they were."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import ssdtrain
from ssdtrain.errors import InPlaceError
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.metered import copy_at_once
from tests.ssdtrain.cache.steps import train


class Pair(Tensor):
    """A wrapper around two tensors: every operator runs on both. Gradients are
    wrappers, too."""

    a: Tensor
    b: Tensor
    label: str

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor, label: str = "a pair") -> "Pair":
        self: Pair = torch.Tensor._make_wrapper_subclass(
            cls, a.size(), strides=a.stride(), dtype=a.dtype, device=a.device
        )
        self.a, self.b, self.label = a, b, label
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], self.label

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], label: str, size: Any, stride: Any
    ) -> "Pair":
        assert parts["a"].size() == size and parts["a"].stride() == stride
        return cls(parts["a"], parts["b"], label)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        labels = []
        tree_map_only(Pair, lambda each: labels.append(each.label), (args, kwargs))
        made = [
            function(
                *tree_map_only(Pair, lambda each, s=side: getattr(each, s), args),
                **tree_map_only(
                    Pair, lambda each, s=side: getattr(each, s), kwargs or {}
                ),
            )
            for side in "ab"
        ]
        if not isinstance(made[0], Tensor):
            return made[0]
        if function.overloadpacket._qualified_op_name.endswith("_"):
            return args[0]
        return Pair(*made, labels[0])


class ToPair(torch.autograd.Function):
    """One tensor as a pair of itself and twice itself, perhaps of pairs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nested: bool) -> Tensor:
        ctx.nested = nested
        other = Pair(x * 3, x * 4, "inside") if nested else x * 2
        return Pair(x.clone(), other, "outside")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        assert gradient.label == "outside"
        b = gradient.b.a * 3 + gradient.b.b * 4 if ctx.nested else gradient.b * 2
        return gradient.a + b, None


class FromPair(torch.autograd.Function):
    """The sum of both."""

    @staticmethod
    def forward(ctx: Any, pair: Any) -> Tensor:
        ctx.save_for_backward(pair)
        total = pair.b.a + pair.b.b if isinstance(pair.b, Pair) else pair.b
        return (pair.a + total) * pair.a

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [pair], [gradient] = ctx.saved_tensors, gradients
        assert type(pair) is Pair and pair.label == "outside"
        if not isinstance(pair.b, Pair):
            return Pair(gradient * (2 * pair.a + pair.b), gradient * pair.a, "outside")
        inside = Pair(gradient * pair.a, gradient * pair.a, "inside")
        first = gradient * (2 * pair.a + pair.b.a + pair.b.b)
        return Pair(first, inside, "outside")


def saved_twice(pair: Tensor) -> Tensor:
    y = pair.exp()
    return y * y


def a_view(pair: Tensor) -> Tensor:
    y = pair.exp()
    return (y.t() * y.t()).t()


def in_a_row(pair: Tensor) -> Tensor:
    return pair.sigmoid().tanh()


class Net(nn.Module):
    """A wrapper between two linear layers, that operators and functions save."""

    def __init__(self, on_pair: Callable[[Tensor], Tensor], *, nested: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 1)
        self.on_pair, self.nested = on_pair, nested

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        pair: Any = ToPair.apply(y, self.nested)  # type: ignore[no-untyped-call]
        both: Any = FromPair.apply(self.on_pair(pair))  # type: ignore[no-untyped-call]
        found: Tensor = self.last(both.sigmoid())
        return found


def step(net: nn.Module, number: int) -> Tensor:
    torch.manual_seed(number)
    loss: Tensor = net(torch.randn(16, 32)).square().mean()
    return loss


BUDGET = {False: 18_000, True: 20_000}
"""Bytes, by whether pairs hold pairs: less than is saved, by as much as a plan can move
on a slow machine, too."""
PART = 16 * 48 * 4
"""Bytes of an inner tensor."""


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("on_pair", [saved_twice, a_view, in_a_row])
@pytest.mark.parametrize("planned", [False, True], ids=["all", "planned"])
@pytest.mark.usefixtures("quick_links")
def test_equal_bits_and_moved(
    on_pair: Callable[[Tensor], Tensor],
    nested: bool,
    planned: bool,
    everything: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if planned:  # how late a copy is depends on the machine
        copy_at_once(monkeypatch)

    def made() -> Net:
        torch.manual_seed(7)
        return Net(on_pair, nested=nested)

    plain, ours = made(), made()
    budget = {"min_bytes": 0, "memory_budget_bytes": BUDGET[nested]}
    settings = {**budget, "recompute": "off"} if planned else everything
    with ssdtrain.offload(ours, **settings) as session:
        steps = zip(train(ours, step, 8), train(plain, step, 8), strict=True)
        for mine, others in steps:
            assert all(map(same_bits, mine, others))
        reports = session.steps
    last = reports[-1]
    assert last.fallbacks == {} and last.bytes_saved > 2 * (2 + nested) * PART
    if planned:
        assert last.bytes_saved > BUDGET[nested] >= last.saved_peak_bytes
    else:
        assert last.bytes_kept <= PART  # what the loss needs at once


def test_a_wrapper_that_is_saved_twice_is_moved_once(
    everything: dict[str, Any],
) -> None:
    """Three nodes save what exp gives, one the product."""
    net = Net(saved_twice, nested=False)
    with ssdtrain.offload(net, **everything) as session:
        list(train(net, step, 2))
        plain = 16 * 32 * 4 + 2 * PART  # the input, relu's and sigmoid's results
        assert session.steps[-1].bytes_saved - plain == 2 * 2 * PART


def test_uses_before_a_wrapper_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that stays is used first: by rows, what is loaded after its uses comes
    back when it did on the general path, and as many bytes are on the device."""
    copy_at_once(monkeypatch)
    load_at = {1: 9, 3: 2}
    keep = {"placement": Placement.KEEP, "release_after": 0, "load_at": 0}
    move = {"placement": Placement.OFFLOAD, "release_after": 1}

    def moved(plan: Plan) -> Plan:
        own = [
            replace(each, **(move | {"load_at": load_at[n]} if n in load_at else keep))
            for n, each in enumerate(plan.orders["model/0"])
        ]
        return replace(plan, orders={"model/0": tuple(own)})

    net, followed = Net(saved_twice, nested=False), 0
    settings = {"min_bytes": 0, "max_overhead": 0.0, "recompute": "off"}
    with ssdtrain.offload(net, target="host", **settings) as session:
        for number, _ in enumerate(train(net, step, 9)):
            if session.plan is not None and not followed:
                session.follow(moved(session.plan))
                followed = number + 1
        assert session.cache.tables.tables
        steps = session.steps[followed:]
    assert 0 < followed < 7 and len({each.saved_peak_bytes for each in steps}) == 1


@pytest.mark.parametrize("through", ["the wrapper", "a view", "an inner tensor"])
def test_a_change_after_it_was_saved_is_found(
    through: str, everything: dict[str, Any]
) -> None:
    def changed(pair: Any) -> Any:
        y = pair.exp()
        z = y * y
        with torch.no_grad():
            if through == "an inner tensor":
                y.b.add_(1)
            else:
                (y if through == "the wrapper" else y.t()).add_(1)
        return z

    net = Net(changed, nested=False)
    with ssdtrain.offload(net, **everything):
        loss = step(net, 0)
        with pytest.raises(InPlaceError, match="inplace operation"):
            loss.backward()


def test_a_small_one_and_one_of_a_parameter_stay(everything: dict[str, Any]) -> None:
    net = Net(saved_twice, nested=False)
    with ssdtrain.offload(
        net, **{"max_overhead": 0.01, **everything, "min_bytes": 1 << 20}
    ) as session:
        list(train(net, step, 2))
        assert not any(each.bytes_offloaded for each in session.steps)
        assert not any(each.fallbacks for each in session.steps)


def test_inner_tensors_of_a_parameter_stay(everything: dict[str, Any]) -> None:
    class OfParameter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(Pair(torch.randn(48, 48), torch.randn(48, 48)))

        def forward(self, x: Tensor) -> Any:
            return self.weight.detach() * x  # the parameter's own bytes

    x, model = Pair(torch.randn(48, 48), torch.randn(48, 48)), OfParameter()
    with ssdtrain.offload(model, **everything) as session:
        found: Any = model(x.requires_grad_())
        assert session.live_bytes == 0
        found.backward(Pair(torch.ones(48, 48), torch.ones(48, 48)))
    weight: Any = model.weight
    gradient: Any = x.grad
    assert torch.equal(gradient.a, weight.a) and torch.equal(gradient.b, weight.b)


class Turned(Pair):
    """A pair whose sizes are the other way round, which its class forgets."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor, turned: bool = True) -> "Turned":
        size, stride = a.size(), a.stride()
        size = size[::-1] if turned else size
        self: Turned = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride[::-1] if turned else stride, dtype=a.dtype
        )
        self.a, self.b, self.label = a, b, "turned"
        return self

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], label: str, size: Any, stride: Any
    ) -> "Turned":
        return cls(parts["a"], parts["b"], False)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function is torch.ops.aten.detach.default
        return cls(args[0].a, args[0].b)


class Base(Turned):
    """As the base class of a library's wrappers, which names no inner tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        raise NotImplementedError


class Strict(Turned):
    """Does not put together what it was not made for."""

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], label: str, size: Any, stride: Any
    ) -> "Strict":
        if parts["a"].size() != size:
            raise ValueError("the other way round")
        return cls(parts["a"], parts["b"], False)


class Weighted(torch.autograd.Function):
    """A wrapper's part times a weight, if the wrapper has its sizes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, wrapper: Any) -> Tensor:
        ctx.save_for_backward(wrapper)
        return weight * wrapper.a

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [wrapper], [gradient] = ctx.saved_tensors, gradients
        assert wrapper.size() == (48, 16) and wrapper.stride() == (1, 48)
        return gradient * wrapper.a, None


@pytest.mark.parametrize("kind", [Turned, Base, Strict])
def test_what_is_not_put_together_as_it_was_stays(
    kind: type[Turned], everything: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 48))

        def forward(self, x: Tensor) -> Any:
            return Weighted.apply(self.weight, kind(x, x.clone()))  # type: ignore[no-untyped-call]

    model, x = Weights(), torch.randn(16, 48)
    with ssdtrain.offload(model, **everything) as session:
        model(x).sum().backward()
        assert session.live_bytes == 0
    assert "kept: no plain storage" in caplog.text
    assert model.weight.grad is not None and torch.equal(model.weight.grad, x)
