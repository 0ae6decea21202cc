"""What changes between the forward of a region and its backward: plain autograd does
not notice, so a region that runs again is equal, or says what has changed."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize

import ssdtrain
from ssdtrain.errors import InPlaceError, RegionError
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.regions.settings import SETTINGS

WIDTH, ROWS, NUM_STEPS = 8, 4, 3


class Options:
    def __init__(self) -> None:
        self.scale = 1.0


SCALES = {"all": 1.0}
COUNTS = Options()
BIAS = {"of": torch.zeros(1)}


def reset() -> None:
    """All that a program has changed of what is everybody's."""
    SCALES["all"] = COUNTS.scale = Block.gain = 1.0
    BIAS["of"] = torch.zeros(1)


class Block(nn.Module):
    """Reads its attributes and what is inside of them, and more."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.square = nn.Linear(WIDTH, WIDTH)
        self.scale, self.gated = 1.0, False
        self.table, self.list, self.options = {"x": 1.0}, [1.0], Options()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.square(self.norm(x))) * (self.scale * SCALES["all"])
        y = F.silu(y) if self.gated else F.gelu(y)
        y = y * (self.gain * COUNTS.scale) + BIAS["of"]
        y = y * getattr(self.up.weight, "gain", 1.0)  # as some meta-learners do
        y = y * self.table["x"] * self.list[0] * self.options.scale
        return x + self.drop(self.down(y))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


Change = Callable[[nn.Sequential], Any]


def of_blocks(change: Callable[[Any], Any]) -> Change:
    return lambda net: [change(block) for block in net[:2]]


def assigned(net: nn.Sequential) -> None:
    state = {name: value * 0.5 for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)


def replaced(net: nn.Sequential) -> None:
    torch.manual_seed(3)
    net[1].up = nn.Linear(WIDTH, 2 * WIDTH)


def reordered(net: nn.Sequential) -> None:
    del net[1].norm
    net[1].extra = nn.Linear(WIDTH, WIDTH)
    net[1].norm = nn.Identity()


def patched(block: Any) -> None:
    block.up.forward = lambda x: F.linear(x, block.up.weight)


def turned(weight: Tensor) -> None:
    weight.data = weight.data.t()


EQUAL: dict[str, Change] = {
    "attribute": of_blocks(lambda block: setattr(block, "scale", 0.5)),
    "branch": of_blocks(lambda block: setattr(block, "gated", True)),
    "rate": of_blocks(lambda block: setattr(block.drop, "p", 0.5)),
    "epsilon": of_blocks(lambda block: setattr(block.norm, "eps", 0.1)),
    "in a dictionary": of_blocks(lambda block: block.table.update(x=0.5, y=1.0)),
    "in a list": of_blocks(lambda block: block.list.__setitem__(0, 0.5)),
    "in an object": of_blocks(lambda block: setattr(block.options, "scale", 0.5)),
    "forward": of_blocks(patched),
    "mark of a weight": of_blocks(lambda block: setattr(block.up.weight, "gain", 0.5)),
    "frozen": of_blocks(lambda block: block.requires_grad_(False)),
    "submodule": replaced,
    "submodules": reordered,
    "weights assigned": assigned,
    "global": lambda net: SCALES.update(all=0.5),
    "global object": lambda net: setattr(COUNTS, "scale", 0.5),
    "global tensor": lambda net: BIAS.update(of=torch.ones(1)),
    "class": lambda net: setattr(Block, "gain", 0.5),
}
ERRORS: dict[str, tuple[Change, type[Exception], str]] = {
    "global tensor written": (
        lambda net: BIAS["of"].add_(1),
        RegionError,
        "the global BIAS, which its code reads",
    ),
    "hook": (
        of_blocks(lambda block: block.up.register_forward_hook(lambda *a: a[2] * 2)),
        RegionError,
        "hook of up would run twice",
    ),
    "data": (
        of_blocks(lambda block: setattr(block.up.weight, "data", torch.ones(16, 8))),
        InPlaceError,
        "a parameter or buffer of 1",
    ),
    "data turned": (
        lambda net: setattr(
            net[1].square.weight, "data", net[1].square.weight.data.t()
        ),
        InPlaceError,
        "a parameter or buffer of 1",
    ),
}


def train(change: Change, offloaded: bool) -> tuple[list[Tensor], nn.Sequential]:
    """Gradients of every step, each behind another forward; then undone."""
    torch.manual_seed(0)
    net, found = model(), []
    session = ssdtrain.offload(net, **SETTINGS) if offloaded else None
    try:
        for number in range(NUM_STEPS):
            torch.manual_seed(number)
            loss = net(torch.randn(ROWS, WIDTH)).square().sum()
            parameters = list(net.parameters())
            if number == 1:
                change(net)
            loss.backward()
            grads = [p.grad for p in parameters]
            found += [torch.ones(0) if grad is None else grad for grad in grads]
            for parameter in parameters:
                parameter.grad = None
    finally:
        reset()
        if session is not None:
            assert not session.regions_refused
            session.close()
    return found, net


@pytest.mark.parametrize("name", EQUAL)
def test_what_a_program_changes_is_put_back_for_the_rerun(name: str) -> None:
    (ours, net), (theirs, other) = train(EQUAL[name], True), train(EQUAL[name], False)
    assert same_bits(ours, theirs)
    # And the change itself is there again.
    assert list(net.state_dict()) == list(other.state_dict())
    assert same_bits(net.state_dict(), other.state_dict())
    for one, two in zip(net[:2], other[:2], strict=True):
        assert one.scale == two.scale and one.gated == two.gated
        assert one.table == two.table and one.list == two.list
        assert vars(one.options) == vars(two.options) and one.drop.p == two.drop.p
        assert ("forward" in vars(one.up)) == ("forward" in vars(two.up))
    flags = [p.requires_grad for p in net.parameters()]
    assert flags == [p.requires_grad for p in other.parameters()]


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_put_back_is_an_error(name: str) -> None:
    change, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        train(change, True)


@pytest.mark.parametrize("as_parameters", [True, False])
def test_functional_calls_run_again_with_their_weights(as_parameters: bool) -> None:
    def run(offloaded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = model()
        other = {name: p.detach() * 0.5 for name, p in net.named_parameters()}
        for value in other.values():
            value.requires_grad_()
        given: dict[str, Tensor] = dict(other)
        if as_parameters:
            given = {name: nn.Parameter(p) for name, p in other.items()}
        session = ssdtrain.offload(net, **SETTINGS) if offloaded else None
        loss = net(torch.ones(ROWS, WIDTH)).square().sum()
        loss = loss + functional_call(net, given, (torch.ones(ROWS, WIDTH),)).sum()
        found = torch.autograd.grad(loss, [*net.parameters(), *given.values()])
        if session is not None:
            session.close()
        return list(found)

    assert same_bits(run(True), run(False))


def test_a_cached_parametrization_is_no_part_of_a_region() -> None:
    """What the cache holds is gone in backward."""

    def run(offloaded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = model()
        parametrize.register_parametrization(net[1].up, "weight", Twice())
        session = ssdtrain.offload(net, **SETTINGS) if offloaded else None
        with parametrize.cached():
            loss = net(torch.ones(ROWS, WIDTH)).sum()
            loss = loss + net(torch.ones(ROWS, WIDTH)).square().sum()
        found = torch.autograd.grad(loss, list(net.parameters()))
        if session is not None:
            assert "cached()" in session.regions_refused["1"]
            session.close()
        return list(found)

    assert same_bits(run(True), run(False))


class Inner(nn.Module):
    """Reads what another module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        other = self.other[0] if isinstance(self.other, list) else self.other
        other = other() if isinstance(other, weakref.ref) else other
        return x + torch.sin(self.part(x * other.scale)) * other.table["x"]


class Outer(nn.Module):
    """A model whose layers know it, or a module that is registered nowhere."""

    def __init__(self, lead: Callable[[nn.Module], Any], is_around: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(3))
        other = self if is_around else nn.Identity()
        self.kept = [other]
        other.scale, other.table = 1.0, {"x": 1.0}
        for layer in self.layers:
            object.__setattr__(layer, "other", lead(other))

    def forward(self, x: Tensor) -> Tensor:
        (other,) = self.kept
        for layer in self.layers:
            other.scale += 0.25
            other.table["x"] += 0.5
            x = layer(x)
        other.scale = other.table["x"] = 1.0
        return x


@pytest.mark.parametrize("is_around", [True, False])
@pytest.mark.parametrize("lead", [lambda m: m, lambda m: [m], weakref.ref])
def test_attributes_of_other_modules_are_put_back(
    lead: Callable[[nn.Module], Any], is_around: bool
) -> None:
    def run(offloaded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = Outer(lead, is_around)
        session = ssdtrain.offload(net, **SETTINGS) if offloaded else None
        loss = net(torch.ones(ROWS, WIDTH)).square().sum()
        found = torch.autograd.grad(loss, list(net.parameters()))
        if session is not None:
            assert not session.regions_refused
            session.close()
        return [loss, *found]

    assert same_bits(run(True), run(False))
