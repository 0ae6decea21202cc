"""One pass over what a forward reads and may change: whatever is another is seen."""

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssdtrain.regions.before import Before
from ssdtrain.regions.inventory import MAX_ITEMS
from ssdtrain.regions.watch import MAX_LOOKS, Watch
from ssdtrain.regions.weights import RegionWeights

WIDTH = 4


SHARED = SimpleNamespace(scale=1.0)
TABLE, SET, LARGE = {"x": torch.zeros(1)}, {1}, list(range(MAX_ITEMS + 1))
BIAS = torch.zeros(1)
SCALE = 1.0


class Held:
    """What an attribute may hold."""


def times(value: float, by: float = 1.0, *, more: float = 2.0) -> float:
    """Its defaults and an attribute are read."""
    return value * by * more * times.gain  # type: ignore[attr-defined]


times.gain = 0.5  # type: ignore[attr-defined]


def with_cell() -> tuple[Callable[[], float], Callable[[float], None]]:
    inner = 1.0

    def get() -> float:
        return inner

    def put(value: float) -> None:
        nonlocal inner
        inner = value

    return get, put


GET, PUT = with_cell()


class Part(nn.Module):
    kind = 1

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.register_buffer("buffer", torch.zeros(2))
        self.rate, self.last = 0.5, Held()
        self.table, self.items, self.queue = {"x": 1.0}, [1.0], deque((1.0,))
        self.set, self.options = {1.0}, SimpleNamespace(scale=1.0)
        self.tensor, self.tensors = torch.zeros(1), {"x": torch.zeros(1)}

    def forward(self, x: Tensor) -> Tensor:
        """Reads everything that the tests change."""
        scale = times(SHARED.scale) * SCALE * GET() * len(SET) * len(LARGE)
        scale *= getattr(self.list[1].weight, "gain", 1.0)
        hidden: Tensor = self.list(x) * scale + BIAS + TABLE["x"]
        return hidden


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.part(x)
        return hidden


def renamed(part: Any) -> None:
    part.other = part.__dict__.pop("tensors")


def other_attributes(part: Any) -> None:
    part.__dict__ = dict(part.__dict__, rate=1.0)


def turned(part: Any) -> None:
    modules = vars(part.list)["_modules"]
    modules["0"] = modules.pop("0")


def swapped(part: Any) -> None:
    part.list[1].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda part: setattr(part, "rate", 1.0),
    "attribute equal": lambda part: setattr(part, "table", {"x": 1.0}),
    "attribute new": lambda part: setattr(part, "more", 1.0),
    "attribute gone": lambda part: delattr(part, "rate"),
    "attribute renamed": renamed,
    "attributes": other_attributes,
    "training": lambda part: part.list[2].eval(),
    "submodule": lambda part: part.list.__setitem__(2, nn.ReLU()),
    "order of submodules": turned,
    "parameter": swapped,
    "frozen": lambda part: part.list[1].weight.requires_grad_(False),
    "buffer": lambda part: setattr(part, "buffer", torch.zeros(2)),
    "buffer written": lambda part: part.buffer.add_(1),
    "in a dictionary": lambda part: part.table.update(x=2.0),
    "new in a dictionary": lambda part: part.table.update(y=1.0),
    "in a list": lambda part: part.items.__setitem__(0, 2.0),
    "in a deque": lambda part: part.queue.append(1.0),
    "in a set": lambda part: part.set.update((2.0,)),
    "in an object": lambda part: setattr(part.options, "scale", 2.0),
    "new in an object": lambda part: setattr(part.options, "more", 2.0),
    "tensor written": lambda part: part.tensor.add_(1),
    "tensor in a dictionary written": lambda part: part.tensors["x"].add_(1),
    "hook": lambda part: part.register_forward_hook(lambda *_: None),
    "hook before": lambda part: part.register_forward_pre_hook(lambda *_: None),
    "global": lambda part: globals().update(SCALE=2.0),
    "global gone": lambda part: globals().pop("SCALE"),
    "in a global object": lambda part: setattr(SHARED, "scale", 2.0),
    "in a global dictionary": lambda part: TABLE.update(x=torch.zeros(1)),
    "written in a global dictionary": lambda part: TABLE["x"].add_(1),
    "in a global set": lambda part: SET.add(2),
    "global tensor written": lambda part: BIAS.add_(1),
    "a large global that is small now": lambda part: LARGE.clear(),
    "variable of a function around it": lambda part: PUT(2.0),
    "default of a function": lambda part: setattr(times, "__defaults__", (2.0,)),
    "keyword's default": lambda part: setattr(times, "__kwdefaults__", {"more": 1.0}),
    "attribute of a function": lambda part: setattr(times, "gain", 1.0),
    "mark of a parameter": lambda part: setattr(part.list[1].weight, "gain", 2.0),
    "class": lambda part: setattr(Part, "kind", 2),
    "new in a class": lambda part: setattr(Part, "other_kind", 2),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    """What is everybody's gets its values back."""
    yield
    globals().update(SCALE=1.0)
    SHARED.scale = 1.0
    times.__defaults__, times.__kwdefaults__ = (1.0,), {"more": 2.0}
    times.gain = 0.5  # type: ignore[attr-defined]
    TABLE["x"] = torch.zeros(1)
    SET.discard(2)
    LARGE[:] = range(MAX_ITEMS + 1)
    PUT(1.0)
    Part.kind = 1
    if hasattr(Part, "other_kind"):
        del Part.other_kind


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_another_is_seen(name: str) -> None:
    block = Block()
    seen = Watch(block).look()
    block(torch.randn(2, WIDTH)).sum().backward()
    assert seen.stands()
    CHANGES[name](block.part)
    assert not seen.stands()


def test_a_large_global_is_told_by_identity_alone() -> None:
    seen = Watch(Block()).look()
    LARGE.append(0)
    assert seen.stands()


def test_attributes_that_a_class_computes_are_never_known() -> None:
    class Computed:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            return {"scale": 1.0}

    block = Block()
    block.part.options = Computed()  # type: ignore[assignment]
    watch = Watch(block)
    seen = watch.look()
    assert not seen.stands() and watch.change(Before("", seen), watch.slow()) is None


def test_a_call_without_changes_looks_by_name_once() -> None:
    watch = Watch(Block())
    first = watch.look()
    assert watch.look() is first and watch.change(Before("", first), []) is None
    assert watch.look() is first


def test_weights_that_are_taken_out_and_put_back_are_the_same() -> None:
    """As FSDP2 does around each forward and each backward."""
    block = Block()
    seen = Watch(block).look()
    held = vars(block.part.list[1])["_parameters"]
    weight = held["weight"]
    held["weight"] = nn.Parameter(torch.ones(WIDTH, WIDTH))
    assert not seen.stands()
    held["weight"] = weight
    assert seen.stands()


def test_what_is_set_and_set_back_is_no_change_of_the_program() -> None:
    """As `eval()` and `train()` between two steps."""
    block = Block()
    watch = Watch(block)
    for _ in range(2 * MAX_LOOKS):
        seen = watch.look()
        block.eval().train()
    found = weakref.ref(seen)
    del seen
    gc.collect()
    assert found() is not None


def test_what_changes_in_every_step_is_not_kept() -> None:
    """A tensor among the attributes would live until the next step."""
    block = Block()
    watch = Watch(block)
    for _ in range(MAX_LOOKS + 1):
        block.part.last = last = Held()
        seen = watch.look()
        assert watch.look() is seen
    found = weakref.ref(last)
    block.part.last = Held()
    del last, seen
    gc.collect()
    assert found() is None


def test_what_a_forward_changes_is_not_kept() -> None:
    block = Block()
    watch = Watch(block)
    block.part.last = last = Held()
    seen = watch.look()
    block.part.last = Held()
    assert watch.change(Before("", seen), []) == "its attribute last changed"
    found = weakref.ref(last)
    del last, seen
    gc.collect()
    assert found() is None


def other_place(weight: Tensor) -> None:
    weight.data = torch.stack((weight.detach(), weight.detach()))[1]


def moved_on(weight: Tensor) -> None:
    weight.data = weight.detach().view(-1)[1:]


WRITES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda weight: None, True),
    "gradient": (lambda weight: setattr(weight, "grad", torch.ones(4)), True),
    "written": (lambda weight: weight.detach().add_(1), False),
    "other data": (lambda weight: setattr(weight, "data", torch.ones(4)), False),
    "in another tensor": (other_place, False),
    "elsewhere in its storage": (moved_on, False),
    "emptied and filled": (
        lambda weight: [weight.untyped_storage().resize_(each) for each in (0, 16)],
        True,
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_weights_that_were_written_or_replaced(name: str) -> None:
    write, stands = WRITES[name]
    weight = nn.Parameter(torch.zeros(4))
    tensors = [weight, torch.zeros(2)]
    weights = RegionWeights(tensors, tensors)
    write(weight)
    assert weights.stand() is stands


def test_data_of_gathered_weights_may_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    weight: Any = nn.Parameter(torch.zeros(4))
    weight.ds_id = 1
    tensors = [weight, torch.zeros(2)]
    weights = RegionWeights(tensors, tensors)
    data = weakref.ref(weight.data.untyped_storage())
    weight.data = torch.empty(0)
    assert weights.stand()
    gc.collect()
    assert data() is None
