"""Modes and settings of torch that hold in one of forward and backward alone.

See [Note: modes below autograd] in rebuild/modes.py, [Note: numerics] in numerics.py.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ssdtrain
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import every_other_moved, nearly_all_kept

ROWS, WIDTH, NUM_STEPS, TURN = 8, 16, 6, 4
TINY = 1e-36
"""Inputs of this size have denormals on the way."""
PLANS: list[dict[str, Any]] = [
    {"plan": "offload-all", "window_bytes": 1, "recompute": "full"},
    {"plan": "keep-all", "recompute": "regions"},
    {"plan": "auto", "max_overhead": 1.0},
]
NAMES = ["full", "regions", "auto"]


class Louder(TorchDispatchMode):
    """All that operators make below autograd is louder."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        aliases = func._schema.is_mutable or func.is_view
        made = isinstance(found, Tensor) and not aliases
        return found * 1.25 if made and found.is_floating_point() else found


class LouderCalls(TorchFunctionMode):
    """The same of torch's functions."""

    def __init__(self, factor: float = 1.25) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        made = type(found) is Tensor and func.__name__ != "__get__"
        return found * self.factor if made and found.is_floating_point() else found


@contextmanager
def flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def without_onednn() -> Iterator[None]:
    # torch's own context warns of an interface that it still uses itself.
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@contextmanager
def in_bfloat16() -> Iterator[None]:
    """Products of float32, by the interface of backends and operators."""
    set_precision = torch._C._set_fp32_precision_setter
    set_precision("mkldnn", "matmul", "bf16")
    try:
        yield
    finally:
        set_precision("mkldnn", "matmul", "none")


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch": Louder,
    "function": LouderCalls,
    "inference": torch.inference_mode,
    "denormals": flushed,
    "onednn": without_onednn,
}


class Twice(torch.autograd.Function):
    """Saves behind its forward, where function modes stand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * slopes[0]


class Net(nn.Module):
    """Cheap operators between products."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.context: AbstractContextManager[Any] | None = None
        """Around the sum, the GELU and a custom function alone."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        with self.context or nullcontext():
            y = F.gelu(x + torch.tanh(x))
            if type(self.context) is LouderCalls:
                y = Twice.apply(y)
        return self.last(y).square().mean()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        h = h * torch.tanh(h) + Twice.apply(h)
        return x + self.down(h.bfloat16().float())


Step = Callable[[Net, Tensor, bool], None]


def train(step: Step, settings: dict[str, Any] | None) -> list[Tensor]:
    """Gradients of all steps. The context comes when plans are tables."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    session = None
    if settings is not None:
        session = ssdtrain.offload(net, target="host", min_bytes=0, **settings)
    found: list[Tensor] = []
    try:
        for number in range(NUM_STEPS):
            x = torch.randn(ROWS, WIDTH)
            step(net, x, number >= TURN)
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if session is not None:
            session.close()
    assert all(slope.isfinite().all() for slope in found)
    return found


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
@pytest.mark.parametrize("name", [n for n in CONTEXTS if n != "inference"])
def test_a_forward_inside(name: str, settings: dict[str, Any]) -> None:
    def step(net: Net, x: Tensor, late: bool) -> None:
        if late:
            with CONTEXTS[name]():
                loss = net(x * TINY)
        else:
            loss = net(x)
        loss.backward()

    assert same_bits(train(step, settings), train(step, None))


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_backward_inside(name: str, settings: dict[str, Any]) -> None:
    def step(net: Net, x: Tensor, late: bool) -> None:
        loss = net(x * TINY if late else x)
        if late:
            with CONTEXTS[name]():
                # Not `loss.backward()`: a function mode would hear of that, and rest.
                torch.autograd.backward([loss])
        else:
            loss.backward()

    assert same_bits(train(step, settings), train(step, None))


@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
def test_what_a_mode_made_is_saved_behind_its_end(settings: dict[str, Any]) -> None:
    def step(net: Net, x: Tensor, late: bool) -> None:
        net.context = Louder() if late else None
        net(x).backward()

    assert same_bits(train(step, settings), train(step, None))


def test_a_custom_function_saves_inside_a_function_mode() -> None:
    """Where a row keeps what it saved, by an alias."""

    def gradients(offloads: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net, found = Net(), []
        with ExitStack() as stack:
            if offloads:
                settings = {"plan": "auto", "max_overhead": 1.0, "recompute": "off"}
                session = ssdtrain.offload(net, target="host", min_bytes=0, **settings)
                stack.enter_context(session)
            for number in range(NUM_STEPS + 2):
                if offloads and number == TURN:
                    session.follow(nearly_all_kept(session))
                # The plan knows of the function, and its table is made.
                net.context = LouderCalls() if number > TURN else LouderCalls(1.0)
                net(torch.randn(ROWS, WIDTH)).backward()
                found += [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]
                torch.optim.SGD(net.parameters(), lr=1e-3).step()
                net.zero_grad()
        return found

    assert same_bits(gradients(True), gradients(False))


def test_an_optimizer_steps_inside() -> None:
    """Regions run again before their weights change."""

    def step(net: Net, x: Tensor, late: bool) -> None:
        first, second = net(x), net(x + 1)
        first.backward()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        if late:
            with Louder():
                optimizer.step()
        else:
            optimizer.step()
        second.backward()

    settings = {"plan": "keep-all", "recompute": "regions"}
    assert same_bits(train(step, settings), train(step, None))


class Products(nn.Module):
    """Large enough for oneDNN to look at its precision."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
            for _ in range(2)
        ]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def gradients_of(
    make: Callable[[], nn.Module],
    step: Callable[[Any, int], None],
    num_steps: int,
    settings: dict[str, Any] | None,
) -> list[Tensor]:
    """Of all steps, with a session (None: without)."""
    torch.manual_seed(0)
    net, found = make(), []
    with ExitStack() as stack:
        if settings is not None:
            session = ssdtrain.offload(net, target="host", min_bytes=0, **settings)
            stack.enter_context(session)
        for number in range(num_steps):
            step(net, number)
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            torch.optim.SGD(net.parameters(), lr=0.01).step()
    return found


def test_products_in_another_precision() -> None:
    """Of forward alone; regions run again without."""

    def step(net: Products, number: int) -> None:
        x = torch.randn(256, 256)
        with in_bfloat16():
            loss = net(x)
        loss.backward()

    settings = {"plan": "keep-all", "recompute": "regions"}
    ours, theirs = (gradients_of(Products, step, 2, each) for each in (settings, None))
    assert same_bits(ours, theirs)


class Teacher(nn.Module):
    """Runs itself in inference mode, too, and multiplies sparse and nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.is_sparse = False

    def body(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.gelu(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.body(x)
        y = self.body(x)
        if self.is_sparse:
            at = torch.arange(ROWS)
            matrix = torch.sparse_coo_tensor(
                at.expand(2, -1), y[:, 0], check_invariants=True
            )
            y = torch.sparse.mm(matrix, y)
            nested = torch.nested.as_nested_tensor([y[:2], y[2:]])
            y = torch.nested.to_padded_tensor(nested * nested, 0.0).flatten(0, 1)[:ROWS]
        return self.body(F.silu(y))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("turn", [0, TURN])
@pytest.mark.parametrize("settings", PLANS, ids=NAMES)
def test_inference_and_sparse_parts(settings: dict[str, Any], turn: int) -> None:
    def step(net: Teacher, number: int) -> None:
        net.is_sparse = number >= turn
        net(torch.randn(ROWS, WIDTH)).square().mean().backward()

    found = (gradients_of(Teacher, step, NUM_STEPS, each) for each in (settings, None))
    assert same_bits(*found)


def test_a_lane_of_a_table_ends_with_its_graph() -> None:
    """Without the garbage collector."""
    net = Net()
    settings = {"plan": "auto", "max_overhead": 1.0, "recompute": "off"}
    gc.collect()
    gc.disable()
    try:
        with ssdtrain.offload(net, target="host", min_bytes=0, **settings) as session:
            for number in range(NUM_STEPS + 2):
                if number == TURN:
                    session.follow(every_other_moved(session))
                net(torch.randn(ROWS, WIDTH)).backward()
                torch.optim.SGD(net.parameters(), lr=1e-3).step()
                assert session.cache.is_idle
            assert session.cache.tables.tables
    finally:
        gc.enable()


class Switched(nn.Module):
    """Sets autocast on without a context: the casts of its weights stay in torch's
    cache from step to step, whatever becomes of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)
        y: Tensor = self.down(F.gelu(self.up(x))).float()
        torch.set_autocast_enabled("cpu", False)
        return y


def test_autocasts_cache_is_the_programs() -> None:
    def run(settings: dict[str, Any] | None) -> list[Tensor]:
        torch.manual_seed(0)
        net, found = Switched(), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        settings = settings and {
            "max_overhead": 0.01,
            **settings,
            "target": "host",
            "min_bytes": 0,
        }
        session = None if settings is None else ssdtrain.offload(net, **settings)
        try:
            for _ in range(3):
                loss = net(torch.randn(ROWS, WIDTH)).square().sum()
                loss.backward()
                found.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.clear_autocast_cache()
            if session is not None:
                session.close()
        return found

    assert same_bits(run(PLANS[0]), run(None))
