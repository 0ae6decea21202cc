"""What a model's forward sets for its layers and sets back at its end, or its program
around it: gone in backward, and there again while a region runs again."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.regions.reading import Read, train

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


STACK, QUEUE = list[float](), deque([1.0], maxlen=2)
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
    "thread's own of a library": (
        by_thread,
        lambda: setattr(library_of().Context.own, "scale", 0.5),
        lambda: delattr(library_of().Context.own, "scale"),
    ),
}


@pytest.fixture(autouse=True)
def imported(library: None) -> None:
    __import__(LIBRARY)


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("name", CASES)
def test_a_context_is_there_again(name: str, where: str) -> None:
    read, *sets = CASES[name]
    theirs, _ = train(read, False, **{where: sets})
    sys.modules.pop(f"{LIBRARY}.later", None)
    ours, refused = train(read, True, **{where: sets})
    assert same_bits(ours, theirs)
    assert not refused or name == "imported later"


@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_context_variable_makes_no_region(where: str) -> None:
    read: Read = lambda s, x: x * LEVEL.get()  # noqa: E731
    sets = (lambda: LEVEL.set(0.5), lambda: LEVEL.set(1.0))
    ours, refused = train(read, True, **{where: sets})
    assert same_bits(ours, train(read, False, **{where: sets})[0])
    assert all("thread of a backward" in each for each in refused.values())
    assert sorted(refused) == ["layers.0", "layers.1"]
