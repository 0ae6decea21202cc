"""What a region is given, its re-run is given again."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.regions.arguments import flatten
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.regions.settings import SETTINGS

WIDTH, ROWS, NUM_STEPS = 8, 4, 3
SCALES = {"of": 1.0}
PLAN: dict[str, Any] = {
    "max_overhead": 0.01,
    "plan": "auto",
    "recompute": "regions",
    "min_bytes": 0,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return x + self.down(F.gelu(self.up(self.first(x, *others))))

    first: Callable[..., Tensor]
    """What is made of the arguments."""


def net_of(first: Callable[..., Tensor], given: Callable[[Tensor], Any]) -> nn.Module:
    """Blocks that are given `given(x)`."""
    kind = type("Own", (Block,), {"first": first, "__module__": __name__})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(kind() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x)
            for block in self.blocks:
                x = block(*given(x))
            return x

    return Net()


def train(
    make: Callable[[], nn.Module], settings: dict[str, Any] | None
) -> tuple[list[Any], dict[str, str]]:
    """Gradients of every step, and why regions were refused."""
    torch.manual_seed(0)
    net = make()
    found = []
    session = None if settings is None else ssdtrain.offload(net, **settings)
    for _ in range(NUM_STEPS):
        loss = net(torch.randn(ROWS, WIDTH, requires_grad=True)).square().sum()
        SCALES["of"] = scaled.by = 2.0  # type: ignore[attr-defined]
        loss.backward()
        SCALES["of"] = scaled.by = 1.0  # type: ignore[attr-defined]
        found += [p.grad for p in net.parameters()]
        net.zero_grad()
    if session is None:
        return found, {}
    session.close()
    return found, session.regions_refused


class Attention(nn.Module):
    """Torch asks whether query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def same(block: Any, x: Tensor, y: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
    number = 1 + (x is y) + 2 * (pair[0] is y) + 4 * (pair[1] is x)
    return x * number + pair[1]


@pytest.mark.parametrize("settings", [SETTINGS, PLAN])
@pytest.mark.parametrize(
    "make",
    [Attention, lambda: net_of(same, lambda x: (x, x, (x, x.clone())))],
    ids=["attention", "own"],
)
def test_one_tensor_is_one_again(
    make: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    ours, refused = train(make, settings)
    assert not refused
    assert same_bits(ours, train(make, None)[0])


class Parts(nn.Module):
    """Layers that are given views of parameters, as a resampler its latents and layers
    their rows of a table: what is saved of them is a parameter's."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(WIDTH))
        self.table = nn.Parameter(torch.randn(2 * ROWS, WIDTH), not frozen)
        kind = type("Own", (Block,), {"first": parts, "__module__": __name__})
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.latents.expand(ROWS, WIDTH)
        with torch.no_grad():
            quiet = self.table[ROWS:]
        for block in self.blocks:
            rows = block(rows, x, self.table[:ROWS], quiet, self.latents)
        return rows


def parts(block: Any, x: Tensor, *others: Tensor) -> Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    for other in others:
        y = y * torch.sigmoid(other.square() * x)
    return y


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("settings", [SETTINGS, PLAN])
def test_a_view_of_a_parameter_is_one_again(
    settings: dict[str, Any], frozen: bool
) -> None:
    ours, refused = train(lambda: Parts(frozen), settings)
    assert not refused
    theirs, _ = train(lambda: Parts(frozen), None)
    ours, theirs = ([g for g in each if g is not None] for each in (ours, theirs))
    assert same_bits(ours, theirs)


def marked(x: Tensor) -> tuple[Tensor]:
    x = x * 1
    x.factor = 0.5  # type: ignore[attr-defined]
    return (x,)


class Boxes(Tensor):
    """As torchvision's are."""


def boxes(x: Tensor) -> tuple[Tensor]:
    x = (x * 1).as_subclass(Boxes)
    x.factor = 0.5  # type: ignore[attr-defined]
    return (x,)


def scaled(x: Tensor) -> Tensor:
    by: float = scaled.by * SCALES["of"]  # type: ignore[attr-defined]
    return x * by


scaled.by = 1.0  # type: ignore[attr-defined]


class Scaler:
    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALES["of"]


def called(block: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(x)


def leaves(block: Any, x: Tensor) -> Tensor:
    return x * (1 + x.is_leaf)


def versions(block: Any, x: Tensor) -> Tensor:
    return x * (1 + x._version)


def nodes(block: Any, x: Tensor) -> Tensor:
    return x * (1 + (x.grad_fn is None))


def views(block: Any, x: Tensor) -> Tensor:
    return x * (1 + (x._base is None))


def evaluated(block: Any, x: Tensor) -> Tensor:
    by: float = eval("SCALES['of']")
    return x * by


def any_global(block: Any, x: Tensor) -> Tensor:
    by: float = globals()["SCALES"]["of"]
    return x * by


def ragged(x: Tensor, layout: torch.layout) -> Tensor:
    """(ROWS, WIDTH) to two sequences of other lengths."""
    return torch.nested.as_nested_tensor([x[:3], x[2:]], layout=layout)


def padded(block: Any, x: Tensor, rows: Tensor) -> Tensor:
    found = torch.nested.to_padded_tensor(F.gelu(block.down(rows)), 0.0)
    return x * found.sum((0, 1))


def makes_jagged(block: Any, x: Tensor) -> Tensor:
    return padded(block, x, ragged(x, torch.jagged))


def makes_strided(block: Any, x: Tensor) -> Tensor:
    return padded(block, x, ragged(x, torch.strided))


def given_other(block: Any, x: Tensor, rows: Tensor) -> Tensor:
    return padded(block, x, rows) + makes_jagged(block, x)


OWN_LENGTHS = "it makes a nested tensor"
REFUSED: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Any], str]] = {
    "attribute": (
        lambda block, x: x * getattr(x, "factor", 1.0),
        marked,
        "attributes of its argument",
    ),
    "attribute of a tensor of another class": (
        lambda block, x: (x * getattr(x, "factor", 1.0)).as_subclass(Tensor),
        boxes,
        "attributes of its argument",
    ),
    "function": (called, lambda x: (x, scaled), "its argument of type function"),
    "method": (called, lambda x: (x, Scaler().scaled), "its argument of type method"),
    "eval": (evaluated, lambda x: (x,), "its code names eval"),
    "globals": (any_global, lambda x: (x,), "its code names globals"),
    "leaf": (leaves, lambda x: (x,), "its code names is_leaf"),
    "version": (versions, lambda x: (x,), "its code names _version"),
    "node": (nodes, lambda x: (x,), "its code names grad_fn"),
    "nested": (makes_jagged, lambda x: (x,), OWN_LENGTHS),
    "nested and strided": (makes_strided, lambda x: (x,), OWN_LENGTHS),
    "two nested": (given_other, lambda x: (x, ragged(x, torch.jagged)), OWN_LENGTHS),
    "view": (views, lambda x: (x[:],), "its code names _base"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_rerun_could_not_be_given_runs_once(name: str) -> None:
    first, given, reason = REFUSED[name]
    ours, refused = train(lambda: net_of(first, given), SETTINGS)
    assert same_bits(ours, train(lambda: net_of(first, given), None)[0])
    assert len(refused) == 3
    assert all(reason in each for each in refused.values())


class Leaves(Block):
    """What the code of a subclass names reaches this by `super()` alone."""

    def weighed(self, x: Tensor) -> Tensor:
        return x * (1 + x.is_leaf)


class Weighed(Leaves):
    def first(self, x: Tensor) -> Tensor:
        return super().weighed(x)


def test_what_super_gives_is_looked_at_as_well() -> None:
    """Python 3.12 loads it by an instruction of its own."""
    make = lambda: nn.Sequential(nn.Tanh(), *(Weighed() for _ in range(3)))  # noqa: E731
    ours, refused = train(make, SETTINGS)
    assert same_bits(ours, train(make, None)[0])
    assert len(refused) == 3
    assert all("its code names is_leaf" in each for each in refused.values())


@pytest.mark.parametrize("settings", [SETTINGS, PLAN])
def test_the_lengths_of_a_nested_argument_are_its_own(settings: dict[str, Any]) -> None:
    make = lambda: net_of(padded, lambda x: (x, ragged(x, torch.jagged)))  # noqa: E731
    ours, refused = train(make, settings)
    assert not refused
    assert same_bits(ours, train(make, None)[0])


def test_functions_of_installed_packages_are_given_again() -> None:
    make = lambda: net_of(called, lambda x: (x, F.silu))  # noqa: E731
    ours, refused = train(make, SETTINGS)
    assert not refused
    assert same_bits(ours, train(make, None)[0])


class Shared(UserDict[str, Any]):
    """As the keys and values that layers of Gemma 3n share."""


def sharing(block: Any, x: Tensor, shared: Shared) -> Tensor:
    """The first layer leaves a tensor there, and counts; later ones read both."""
    shared.setdefault("keys", (x.sin(), block.up(x)))
    shared["calls"] = number = shared.get("calls", 0) + 1
    keys, values = shared["keys"]
    return x * keys + values * number


class Sharing(nn.Module):
    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        block = type("Own", (Block,), {"first": sharing, "__module__": __name__})
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        shared, x = self.kind(), torch.tanh(x)
        for block in self.blocks:
            x = block(x, shared)
        return x * shared["calls"]


@pytest.mark.parametrize("kind", [Shared, dict])
@pytest.mark.parametrize("settings", [SETTINGS, PLAN])
def test_what_layers_leave_in_a_dictionary(
    settings: dict[str, Any], kind: type[Any]
) -> None:
    ours, refused = train(lambda: Sharing(kind), settings)
    assert not refused
    assert same_bits(ours, train(lambda: Sharing(kind), None)[0])


def test_a_dictionary_with_attributes_of_its_own_is_refused() -> None:
    class Marked(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.mark = object()

    ours, refused = train(lambda: Sharing(Marked), SETTINGS)
    assert refused
    assert same_bits(ours, train(lambda: Sharing(Marked), None)[0])


class Slotted(UserDict[str, Any]):
    __slots__ = ("extra",)


def test_a_dictionary_with_slots_is_no_argument_that_can_be_made_again() -> None:
    made = Slotted(a=torch.ones(2))
    leaves, _ = flatten((made,), {})
    assert leaves == [made]
