"""What a model's forward sets for its layers and sets back at its end, or its program
around it: gone in backward, and there again while a region runs again."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.regions.settings import SETTINGS

WIDTH, NUM_STEPS = 8, 3
LIBRARY = "a_library_of_tests"
CODE = """
import threading
class Context:
    current, stack, own = None, [], threading.local()
    @classmethod
    def scale(cls):
        return cls.current or 1.0
    @classmethod
    def top(cls):
        return cls.stack[-1] if cls.stack else 1.0
    @classmethod
    def of_thread(cls):
        return getattr(cls.own, "scale", 1.0)
class Inner(Context):
    pass
SCALE = 1.0
def scale():
    return SCALE
"""


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A package that is installed."""
    home = tmp_path_factory.mktemp("lib") / "site-packages"
    (home / LIBRARY).mkdir(parents=True)
    Path(home, LIBRARY, "__init__.py").write_text(CODE)
    Path(home, LIBRARY, "later.py").write_text("SCALE = 1.0\n")
    sys.path.insert(0, str(home))
    try:
        yield
    finally:
        sys.path.remove(str(home))
        for name in [each for each in sys.modules if each.startswith(LIBRARY)]:
            del sys.modules[name]


class Context:
    current: float | None = None


class Slots:
    __slots__ = ("scale",)


SCALE, STACK, TABLE = [1.0], list[float](), {"a": {"b": 1.0}}
QUEUE, ARRAY, SLOTS = deque([1.0], maxlen=2), np.ones(1), Slots()
SLOTS.scale = 1.0  # type: ignore[attr-defined]
LEVEL = ContextVar("LEVEL", default=1.0)
GELU, TANH = F.gelu, torch.tanh
VARIABLE = "A_CONTEXT_OF_TESTS"


def library_of() -> Any:
    return sys.modules[LIBRARY]


def by_import(block: Any, x: Tensor) -> Tensor:
    from a_library_of_tests import scale

    return x * scale()


def by_later_import(block: Any, x: Tensor) -> Tensor:
    import a_library_of_tests.later as later

    return x * later.SCALE


def by_class(block: Any, x: Tensor) -> Tensor:
    from a_library_of_tests import Context

    return x * Context.scale() * Context.top()


def by_heir(block: Any, x: Tensor) -> Tensor:
    import a_library_of_tests

    return x * (a_library_of_tests.Inner.current or 1.0)


def by_thread(block: Any, x: Tensor) -> Tensor:
    from a_library_of_tests import Context

    return x * Context.of_thread()


def set_library(name: str, value: Any, kind: str = "") -> None:
    home = getattr(library_of(), kind) if kind else library_of()
    setattr(home, name, value)


def set_later(value: float) -> None:
    import a_library_of_tests.later as later

    later.SCALE = value


Case = tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any], Callable[[], Any]]
CASES: dict[str, Case] = {
    "class": (
        lambda s, x: x * (Context.current or 1.0),
        lambda: setattr(Context, "current", 0.5),
        lambda: setattr(Context, "current", None),
    ),
    "new attribute of a class": (
        lambda s, x: x * getattr(Context, "other", 1.0),
        lambda: setattr(Context, "other", 0.5),
        lambda: delattr(Context, "other"),
    ),
    "stack": (
        lambda s, x: x * (STACK[-1] if STACK else 1.0),
        lambda: STACK.append(0.5),
        lambda: STACK.pop(),
    ),
    "queue": (
        lambda s, x: x * QUEUE[-1],
        lambda: QUEUE.append(0.5),
        lambda: QUEUE.pop(),
    ),
    "nested": (
        lambda s, x: x * TABLE["a"]["b"],
        lambda: TABLE["a"].update(b=0.5),
        lambda: TABLE["a"].update(b=1.0),
    ),
    "slots": (
        lambda s, x: x * getattr(SLOTS, "scale", 1.0),
        lambda: setattr(SLOTS, "scale", 0.5),
        lambda: delattr(SLOTS, "scale"),
    ),
    "array": (
        lambda s, x: x * float(ARRAY[0]),
        lambda: ARRAY.__setitem__(0, 0.5),
        lambda: ARRAY.__setitem__(0, 1.0),
    ),
    "environment": (
        lambda s, x: x * float(os.environ.get(VARIABLE, "1")),
        lambda: os.environ.update({VARIABLE: "0.5"}),
        lambda: os.environ.pop(VARIABLE),
    ),
    "patched function of torch": (
        lambda s, x: F.gelu(x),
        lambda: setattr(F, "gelu", F.silu),
        lambda: setattr(F, "gelu", GELU),
    ),
    "patched by its whole name": (
        lambda s, x: torch.nn.functional.gelu(x),
        lambda: setattr(F, "gelu", F.silu),
        lambda: setattr(F, "gelu", GELU),
    ),
    "default dtype": (
        lambda s, x: x * torch.tensor(0.1).double().float(),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "default device": (
        lambda s, x: x * (0.5 if torch.ones(1).is_meta else 1.0),
        lambda: torch.set_default_device("meta"),
        lambda: torch.set_default_device(None),
    ),
    "class of a library": (
        by_class,
        lambda: (set_library("current", 0.5, "Context"), library_of().Context),
        lambda: set_library("current", None, "Context"),
    ),
    "stack of a library's class": (
        by_class,
        lambda: library_of().Context.stack.append(0.5),
        lambda: library_of().Context.stack.pop(),
    ),
    "heir of a library's class": (
        by_heir,
        lambda: set_library("current", 0.5, "Inner"),
        lambda: set_library("current", None, "Inner"),
    ),
    "imported function": (
        by_import,
        lambda: set_library("SCALE", 0.5),
        lambda: set_library("SCALE", 1.0),
    ),
    "imported later": (by_later_import, lambda: set_later(0.5), lambda: set_later(1.0)),
}
REFUSED: dict[str, Case] = {
    "context variable": (
        lambda s, x: x * LEVEL.get(),
        lambda: LEVEL.set(0.5),
        lambda: LEVEL.set(1.0),
    ),
    "thread's own of a library": (
        by_thread,
        lambda: setattr(library_of().Context.own, "scale", 0.5),
        lambda: delattr(library_of().Context.own, "scale"),
    ),
}


class Block(nn.Module):
    """Reads a context."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        return x + self.down(self.reads(torch.tanh(self.up(x))))

    reads: Callable[[Tensor], Tensor]


class Model(nn.Module):
    """Sets it for its layers, and sets it back."""

    def __init__(self, kind: type, begin: Callable[[], Any], end: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.begin, self.end = [begin], [end]

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        self.begin[0]()
        try:
            for layer in self.layers:
                x = layer(x)
            return x
        finally:
            self.end[0]()


def train(
    case: Case, around: bool, offloaded: bool
) -> tuple[list[Tensor], dict[str, str]]:
    """Gradients of every step, and why layers did not run again."""
    read, begin, end = case
    torch.manual_seed(0)
    kind = type("Reading", (Block,), {"reads": read, "__module__": __name__})
    nothing: Callable[[], Any] = lambda: None  # noqa: E731
    net = Model(kind, *((nothing, nothing) if around else (begin, end)))
    session = ssdtrain.offload(net, **SETTINGS) if offloaded else None
    found = []
    try:
        for number in range(NUM_STEPS):
            torch.manual_seed(number)
            x = torch.randn(4, WIDTH, device="cpu", dtype=torch.float32)
            if around:
                begin()
            try:
                y = net(x)
            finally:
                if around:
                    end()
            y.square().mean().backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                found.append(parameter.grad.clone())
                parameter.grad = None
        return found, {} if session is None else session.regions_refused
    finally:
        if session is not None:
            session.close()


@pytest.fixture(autouse=True)
def imported(library: None) -> None:
    __import__(LIBRARY)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("name", CASES)
def test_a_context_is_there_again(name: str, around: bool) -> None:
    theirs, _ = train(CASES[name], around, False)
    sys.modules.pop(f"{LIBRARY}.later", None)
    ours, refused = train(CASES[name], around, True)
    assert same_bits(ours, theirs)
    assert not refused or name == "imported later"


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_threads_own_context_makes_no_region(name: str, around: bool) -> None:
    ours, refused = train(REFUSED[name], around, True)
    assert same_bits(ours, train(REFUSED[name], around, False)[0])
    assert all("thread of a backward" in each for each in refused.values())
    assert sorted(refused) == ["layers.0", "layers.1"]
