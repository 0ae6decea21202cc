"""Modules whose forward changes something else than its result are no regions."""

import copy
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

import ssdtrain
from ssdtrain.counters import Fallback
from ssdtrain.errors import RegionError
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.unseen import Owner

WIDTH, BATCH, STEPS = 16, 8, 5
SEEN: list[Any] = []
SETTINGS: dict[str, Any] = {"recompute": "regions", "plan": "keep-all", "min_bytes": 0}
COUNT = 0
STEP = [0]


class Block(nn.Module):
    """One block of a stack; a side effect in each subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)
        self.effects()

    def effects(self) -> None:
        """What it keeps."""

    def touch(self, x: Tensor) -> None:
        """What it changes."""

    def forward(self, x: Tensor) -> Tensor:
        self.touch(x)
        return x + torch.sin(self.part(x))


class Counter(Block):
    def effects(self) -> None:
        self.num_calls = 0

    def touch(self, x: Tensor) -> None:
        self.num_calls += 1


class NewBuffer(Block):
    def effects(self) -> None:
        self.register_buffer("tokens", torch.zeros(WIDTH))

    def touch(self, x: Tensor) -> None:
        self.tokens = self.tokens + x.detach().sum(0)


class History(Block):
    """As FP8 recipes keep: tensors in a dictionary."""

    def effects(self) -> None:
        self.meta = {"amax": torch.zeros(4)}

    def touch(self, x: Tensor) -> None:
        self.meta["amax"].copy_(self.meta["amax"].roll(1)).add_(x.detach().amax())


class OwnList(Block):
    def effects(self) -> None:
        self.losses: list[Tensor] = []

    def touch(self, x: Tensor) -> None:
        self.losses.append(x.detach().sum())


class Statistics:
    def __init__(self) -> None:
        self.count = 0


TOTAL = Statistics()


class OwnObject(Block):
    def effects(self) -> None:
        self.stats = Statistics()

    def touch(self, x: Tensor) -> None:
        self.stats.count += 1


class Attribute(Block):
    def touch(self, x: Tensor) -> None:
        self.last = x.sum()


class Global(Block):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return super().forward(x)


class GlobalList(Block):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.shape)
        return super().forward(x)


class Python(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Numpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * drawn()


class Late(Block):
    """Draws when the first calls have not."""

    def forward(self, x: Tensor) -> Tensor:
        scale = drawn() if STEP[0] >= 3 else 1.0
        return super().forward(x) * scale


def drawn() -> float:
    return float(numpy.random.rand())


class OfClass(Block):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).num_calls += 1
        return super().forward(x) * (1 + 0.1 * (OfClass.num_calls % 3))


class OfObject(Block):
    def forward(self, x: Tensor) -> Tensor:
        TOTAL.count += 1
        return super().forward(x) * (1 + 0.1 * (TOTAL.count % 3))


def counting() -> Callable[[], int]:
    num_calls = 0

    def counted() -> int:
        nonlocal num_calls
        num_calls += 1
        return num_calls

    return counted


class OfHeldFunction(Block):
    """A function that an attribute's object holds changes a variable around it."""

    def effects(self) -> None:
        self.held: Any = SimpleNamespace(counted=counting())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * self.held.counted())


class Slot:
    __slots__ = ("counted",)

    def __init__(self) -> None:
        self.counted = counting()


class OfFunctionInSlot(OfHeldFunction):
    def effects(self) -> None:
        self.held = Slot()


class Generator(Block):
    def effects(self) -> None:
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(WIDTH, generator=self.own)


class WritesToInput(Block):
    def touch(self, x: Tensor) -> None:
        x.mul_(0.5)


class WritesToWeight(Block):
    """Its own parameter, as an embedding with `max_norm` does."""

    def touch(self, x: Tensor) -> None:
        with torch.no_grad():
            self.part.weight.clamp_(-0.2, 0.2)


class MarksWeight(Block):
    def touch(self, x: Tensor) -> None:
        weight: Any = self.part.weight
        weight.num_calls = getattr(weight, "num_calls", 0) + 1


class HooksWeight(Block):
    """One hook more at each call."""

    def touch(self, x: Tensor) -> None:
        self.part.weight.register_hook(lambda gradient: gradient * 0.9)


class Stack(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


EFFECTS = [
    Counter,
    NewBuffer,
    History,
    OwnList,
    OwnObject,
    Attribute,
    Global,
    GlobalList,
    Python,
    Numpy,
    OfClass,
    OfObject,
    OfHeldFunction,
    OfFunctionInSlot,
    Generator,
    WritesToInput,
    WritesToWeight,
    MarksWeight,
    HooksWeight,
]


def state_of(model: nn.Module) -> Iterator[Any]:
    yield COUNT, len(SEEN), random.getstate(), OfClass.num_calls, TOTAL.count
    yield numpy.random.get_state()[1].tolist()
    for module in model.modules():
        yield [b.tolist() for b in module.buffers()]
        for name in ("num_calls", "losses", "meta", "last"):
            yield str(getattr(module, name, None))
        yield getattr(getattr(module, "stats", None), "count", None)


def trained(kind: type[Block], regions: bool) -> tuple[Any, ...]:
    global COUNT
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    SEEN[:] = range(100)  # too many to be compared one by one
    COUNT = OfClass.num_calls = TOTAL.count = 0
    model, reports, found = Stack(kind), [], []
    session = None
    if regions:
        session = ssdtrain.offload(model, **SETTINGS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for STEP[0] in range(STEPS):
        loss = model(torch.randn(BATCH, WIDTH))
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.zero_grad()
    if session is not None:
        reports = session.steps
        found_reasons = session.regions_refused
        session.close()
        return found, list(state_of(model)), reports, found_reasons
    return found, list(state_of(model))


@pytest.mark.parametrize("kind", EFFECTS)
def test_side_effects_happen_once(kind: type[Block]) -> None:
    plain, plain_state = trained(kind, regions=False)
    ours, our_state, reports, reasons = trained(kind, regions=True)
    assert same_bits(plain, ours)
    assert plain_state == our_state
    assert sorted(reasons) == ["blocks.0", "blocks.1"]
    for report in reports:
        assert report.fallbacks[Fallback.NO_REGION.value] == 2
        assert report.recipes.get("region", 0) == 0


def late_in_a_closure() -> type[Block]:
    draw = drawn

    class Closure(Late):
        def forward(self, x: Tensor) -> Tensor:
            scale = draw() if STEP[0] >= 3 else 1.0
            return Block.forward(self, x) * scale

    return Closure


@pytest.mark.parametrize("kind", [Late, late_in_a_closure()])
def test_a_draw_that_comes_later_is_seen(kind: type[Block]) -> None:
    """The code of a helper names the generator."""
    plain, plain_state = trained(kind, regions=False)
    ours, our_state, reports, _ = trained(kind, regions=True)
    assert same_bits(plain, ours)
    assert plain_state == our_state
    again = [report.recipes.get("region", 0) > 0 for report in reports]
    assert again[:2] == [True, True] and not again[-1]


def test_what_is_made_once_and_stays_is_forgiven() -> None:
    class Constants(Block):
        def effects(self) -> None:
            self.table: Tensor | None = None

        def touch(self, x: Tensor) -> None:
            if self.table is None:
                self.table = torch.arange(WIDTH).float()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (
                1 + self.table if self.table is not None else 1
            )

    _, _, reports, _ = trained(Constants, regions=True)
    assert reports[0].fallbacks[Fallback.NO_REGION.value] == 2
    assert not reports[1].fallbacks and reports[1].recipes["region"] > 0


def test_hooks_inside_would_run_twice() -> None:
    model, calls = Stack(Block), []
    model.blocks[0].part.register_forward_hook(lambda *_: calls.append(1))
    model.blocks[1].register_forward_hook(lambda *_: calls.append(2))  # around it
    with ssdtrain.offload(model, **SETTINGS) as session:
        model(torch.randn(BATCH, WIDTH)).backward()
        assert session.regions_refused == {
            "blocks.0": "a forward hook of part would run twice"
        }
    assert calls == [1, 2]


@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook]
)
def test_hooks_of_all_modules_would_run_twice(register: Any) -> None:
    model, calls = Stack(Block), []
    handle = register(lambda *_: calls.append(1))
    try:
        with ssdtrain.offload(model, **SETTINGS) as session:
            model(torch.randn(BATCH, WIDTH)).backward()
            told = "a forward hook of all modules would run twice"
            assert session.regions_refused == {"blocks.0": told, "blocks.1": told}
    finally:
        handle.remove()
    assert len(calls) == 1 + 1 + 2 * 2


def test_a_cache_among_the_arguments() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    class Cached(Block):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            cache.keys.append(x)
            return super().forward(x)

    class WithCache(Stack):
        def forward(self, x: Tensor) -> Tensor:
            cache = Cache()
            for block in self.blocks:
                x = block(x, cache=cache)
            assert len(cache.keys) == 2
            return x.square().mean()

    model = WithCache(Cached)
    with ssdtrain.offload(model, **SETTINGS) as session:
        model(torch.randn(BATCH, WIDTH)).backward()
        assert "Cache" in session.regions_refused["blocks.0"]


def test_modes_would_not_see_the_rerun() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = Stack(Block), torch.randn(BATCH, WIDTH)
    totals = []
    for regions in (False, True):
        own = copy.deepcopy(model)
        recompute = "regions" if regions else "off"
        with ssdtrain.offload(own, recompute=recompute, plan="keep-all"):
            with FlopCounterMode(display=False) as flops:
                own(x).backward()
            totals.append(flops.get_total_flops())
    assert totals[0] == totals[1]


class Dropped(Block):
    """Draws, and lets another thread draw when it runs again."""

    other: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5)
        if torch._C._current_graph_task_id() != -1 and self.other is not None:
            thread = threading.Thread(target=self.other)
            thread.start()
            thread.join()
        return super().forward(nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("times", [1, 1000])
def test_a_thread_that_draws_from_the_same_generator(times: int) -> None:
    counted = Owner(times)
    unseen = counted.proxy()

    def draw() -> None:
        unseen.value -= 1
        if unseen.value >= 0:
            torch.rand(1)

    torch.manual_seed(0)
    model, x = Stack(Dropped), torch.randn(BATCH, WIDTH)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    twin(x).backward()
    torch.manual_seed(1)
    with ssdtrain.offload(model, **SETTINGS):
        Dropped.other = staticmethod(draw)
        try:
            loss = model(x)
            if times > 1:
                with pytest.raises(RegionError, match="draws random numbers"):
                    loss.backward()
                return
            loss.backward()
        finally:
            Dropped.other = None
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert same_bits(ours.grad, theirs.grad)


def test_tensors_of_inference_mode_count_no_changes() -> None:
    model, twin = Stack(Block), Stack(Block)
    twin.load_state_dict(model.state_dict())
    with torch.inference_mode():
        table = torch.ones(WIDTH)
    model.blocks[0].register_buffer("table", table, persistent=False)
    model.blocks[1].part.table = {"x": table}
    x = torch.randn(BATCH, WIDTH)
    with ssdtrain.offload(model, **SETTINGS) as session:
        model(x).backward()
        told = "table is an inference tensor, which counts no changes"
        assert session.regions_refused == {"blocks.0": told, "blocks.1": told}
    twin(x).backward()
    grads = [[p.grad for p in each.parameters()] for each in (model, twin)]
    assert same_bits(*grads)


@pytest.mark.parametrize("package", ["megatron.core", "transformer_engine.pytorch"])
def test_modules_with_states_that_nobody_sees(package: str) -> None:
    class Foreign(nn.Linear):
        pass

    Foreign.__module__ = f"{package}.layers"
    model = Stack(Block)
    model.blocks[0].part = Foreign(WIDTH, WIDTH)
    with ssdtrain.offload(model, **SETTINGS) as session:
        model(torch.randn(BATCH, WIDTH)).backward()
        assert list(session.regions_refused) == ["blocks.0"]
        assert "Foreign" in session.regions_refused["blocks.0"]
