"""What lies deep inside of what a region reads, and what goes on from where it stands:
plain autograd needs none of it again."""

import ctypes
import functools
import itertools
import math
import os
import random
import sys
import weakref
from argparse import Namespace
from array import array
from collections import Counter, OrderedDict, UserList
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing import Value
from queue import Queue, SimpleQueue
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain.errors import RegionError
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.regions.reading import WIDTH, Read, nothing, train

LEVEL = ContextVar("LEVEL", default=1.0)


class Config:
    """A class as a namespace."""

    scale = 1.0


class Holder:
    scale = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.own


class Losses(list[float]):
    """A list with more than items."""

    scale = 1.0


class LessLosses(Losses):
    scale = 0.5


@dataclass(slots=True)
class Slots:
    scale: float = 1.0


class SlotsBeside(Slots):
    """Has a dictionary, too."""


class Private:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.__scale = 1.0

    def value(self, new: float = 0.0) -> float:
        self.__scale = new or self.__scale
        return self.__scale


class Inheriting(Config):
    """Whose attribute is of the class that it is made of."""


class OneHalf(Config):
    scale = 0.5


class SlotsOfDict(dict[str, float]):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


def gained(x: Tensor) -> Tensor:
    found: Tensor = x * gained.gain  # type: ignore[attr-defined]
    return found


gained.gain = 1.0  # type: ignore[attr-defined]
SETTINGS_FILE = ModuleType("settings_file")
HOLDER, ARRAY, NESTED = Holder(), np.ones(2, dtype=np.float32), {"a": {"b": 1.0}}
PARTIAL, BOUND = functools.partial(scaled, by=1.0), HOLDER.scaled
GENERATOR, STATE = torch.Generator(), random.Random(0)
VARIABLE = "A_SCALE_OF_TESTS"
ORDERED = OrderedDict[str, float]()
OTHERS = {"x": 1.0}
"""Read by functions that a block finds among its attributes."""


def of_default(x: Tensor, options: dict[str, float] = {"a": 1.0}) -> Tensor:  # noqa: B006
    return x * options["a"]


def counted(x: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006
    calls.append(1)
    return x * (1 + 0.1 * len(calls))


def of_keyword(x: Tensor, *, options: dict[str, float] = {"a": 1.0}) -> Tensor:  # noqa: B006
    return x * options["a"]


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return F.dropout(x, 0.5, training=True)


def imported(x: Tensor) -> Tensor:
    found: Tensor = x * SETTINGS_FILE.scale
    return found


def by_others(x: Tensor) -> Tensor:
    return x * OTHERS["x"]


@functools.lru_cache(0)
def cached(x: Tensor) -> Tensor:
    return by_others(x)


def marked(tensor: Tensor) -> Tensor:
    tensor.scale = 1.0  # type: ignore[attr-defined]
    return tensor


def twice_by_others(number: int, x: Tensor) -> Tensor:
    return by_others(x) * number


class Doer:
    def __call__(self, x: Tensor) -> Tensor:
        return by_others(x)

    @property
    def scale(self) -> float:
        return OTHERS["x"]

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return by_others(x)


def enclosed(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


def changing(scale: float) -> Callable[..., float]:
    """Gives a value; given another one, holds that from then on."""

    def inner(other: float = 0.0) -> float:
        nonlocal scale
        scale = other or scale
        return scale

    return inner


def chained(number: int) -> SimpleNamespace:
    """So many objects, each in another one."""
    found = SimpleNamespace(scale=1.0)
    for _ in range(number):
        found = SimpleNamespace(inner=found)
    return found


def last_of(chain: Any) -> Any:
    while hasattr(chain, "inner"):
        chain = chain.inner
    return chain


def cached_of(holder: Holder) -> Callable[[], float]:
    @functools.lru_cache
    def inner() -> float:
        return holder.own

    return inner


def counting(x: Tensor) -> Tensor:
    SETTINGS_FILE.scale += 0.5
    return x.clone()


FUNCTIONS = {"by": by_others}


def reset() -> None:
    """All that a program has changed of what is everybody's."""
    Config.scale = Holder.scale = HOLDER.own = SETTINGS_FILE.scale = 1.0
    gained.gain = NESTED["a"]["b"] = PARTIAL.keywords["by"] = 1.0  # type: ignore
    ARRAY[:] = OTHERS["x"] = LARGE["x"] = 1.0
    of_default.__defaults__[0]["a"] = of_keyword.__kwdefaults__["options"]["a"] = 1.0
    counted.__defaults__[0].clear()
    ORDERED.clear()
    ORDERED.update(a=1.0, b=0.5)
    GENERATOR.manual_seed(0)
    STATE.seed(0)
    os.environ.pop(VARIABLE, None)


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """What is everybody's is as it was, before and behind a test."""
    reset()
    yield
    reset()


def both(read: Read, **how: Any) -> tuple[list[Tensor], dict[str, str], list[Tensor]]:
    """Gradients with a session, why regions were refused, and gradients without."""
    ours, refused = train(read, True, **how)
    reset()
    theirs, _ = train(read, False, **how)
    return ours, refused, theirs


Case = tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], Callable[[Any], Any]]


def _halve(values: Any, key: Any) -> None:
    values[key] = 0.5


def _write(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(0.5)


LARGE: dict[Any, float] = {**dict.fromkeys(range(3000), 0.0), "x": 1.0}
CHANGED: dict[str, Case] = {
    "nested dictionary": (
        lambda: {"a": {"b": 1.0}},
        lambda s, x: x * s.thing["a"]["b"],
        lambda thing: _halve(thing["a"], "b"),
    ),
    "containers in containers": (
        lambda: [[[[[[[{"b": 1.0}]]]]]]],
        lambda s, x: x * s.thing[0][0][0][0][0][0][0]["b"],
        lambda thing: _halve(thing[0][0][0][0][0][0][0], "b"),
    ),
    "large global": (
        lambda: None,
        lambda s, x: x * LARGE["x"],
        lambda _: _halve(LARGE, "x"),
    ),
    "nested object": (
        lambda: SimpleNamespace(rope=SimpleNamespace(factor=1.0)),
        lambda s, x: x * s.thing.rope.factor,
        lambda thing: setattr(thing.rope, "factor", 0.5),
    ),
    "namespace": (
        lambda: {"rope": Namespace(factor=1.0)},
        lambda s, x: x * s.thing["rope"].factor,
        lambda thing: setattr(thing["rope"], "factor", 0.5),
    ),
    "list of the standard library": (
        lambda: UserList([1.0]),
        lambda s, x: x * s.thing[0],
        lambda thing: _halve(thing, 0),
    ),
    "attribute of a list": (
        Losses,
        lambda s, x: x * s.thing.scale,
        lambda thing: setattr(thing, "scale", 0.5),
    ),
    "view of a dictionary": (
        lambda: MappingProxyType(OTHERS),
        lambda s, x: x * s.thing["x"],
        lambda _: _halve(OTHERS, "x"),
    ),
    "attribute of a tensor": (
        lambda: marked(torch.ones(1)),
        lambda s, x: x * s.thing.scale,
        lambda thing: setattr(thing, "scale", 0.5),
    ),
    "global of a function with a cache": (
        nothing,
        lambda s, x: cached(x),
        lambda _: _halve(OTHERS, "x"),
    ),
    "variable of an inner function": (
        lambda: enclosed([1.0]),
        lambda s, x: x * s.thing()[0],
        lambda thing: _halve(thing(), 0),
    ),
    "variable that another value gets": (
        lambda: SimpleNamespace(scale=changing(1.0)),
        lambda s, x: x * s.thing.scale(),
        lambda thing: thing.scale(0.5),
    ),
    "behind a weak proxy": (
        lambda: [weakref.proxy(HOLDER)],
        lambda s, x: x * s.thing[0].own,
        lambda _: setattr(HOLDER, "own", 0.5),
    ),
    "counts": (
        lambda: Counter(a=2),
        lambda s, x: x * s.thing["a"],
        lambda thing: thing.update("a"),
    ),
    "order of a dictionary": (
        lambda: [OrderedDict(a=1.0, b=0.5)],
        lambda s, x: x * next(iter(s.thing[0].values())),
        lambda thing: thing[0].move_to_end("a"),
    ),
    "order of a global dictionary": (
        nothing,
        lambda s, x: x * next(iter(ORDERED.values())),
        lambda _: ORDERED.move_to_end("a"),
    ),
    "objects in objects": (
        lambda: chained(9),
        lambda s, x: x * last_of(s.thing).scale,
        lambda thing: setattr(last_of(thing), "scale", 0.5),
    ),
    "slots": (
        Slots,
        lambda s, x: x * s.thing.scale,
        lambda thing: setattr(thing, "scale", 0.5),
    ),
    "slots beside a dictionary": (
        SlotsBeside,
        lambda s, x: x * s.thing.scale,
        lambda thing: setattr(thing, "scale", 0.5),
    ),
    "slot of a private name": (
        Private,
        lambda s, x: x * s.thing.value(),
        lambda thing: thing.value(0.5),
    ),
    "attribute that a class inherits": (
        Inheriting,
        lambda s, x: x * s.thing.scale,
        lambda _: setattr(Config, "scale", 0.5),
    ),
    "another class": (
        Config,
        lambda s, x: x * s.thing.scale,
        lambda thing: setattr(thing, "__class__", OneHalf),
    ),
    "another class, deep inside": (
        lambda: [[Config()]],
        lambda s, x: x * s.thing[0][0].scale,
        lambda thing: setattr(thing[0][0], "__class__", OneHalf),
    ),
    "another class of a list": (
        lambda: [Losses()],
        lambda s, x: x * s.thing[0].scale,
        lambda thing: setattr(thing[0], "__class__", LessLosses),
    ),
    "sign of zero": (
        lambda: [[0.0]],
        lambda s, x: x * math.copysign(1.0, s.thing[0][0]),
        lambda thing: thing[0].__setitem__(0, -0.0),
    ),
    "array": (
        lambda: np.ones(1, dtype=np.float32),
        lambda s, x: x * float(s.thing[0]),
        lambda thing: _halve(thing, 0),
    ),
    "list in a tuple": (
        lambda: ([1.0],),
        lambda s, x: x * s.thing[0][0],
        lambda thing: _halve(thing[0], 0),
    ),
    "tensor in a tuple": (
        lambda: (torch.zeros(WIDTH),),
        lambda s, x: x + s.thing[0],
        lambda thing: _write(thing[0]),
    ),
    "module that is registered nowhere": (
        lambda: [nn.Linear(WIDTH, WIDTH)],
        lambda s, x: s.thing[0](x),
        lambda thing: _write(thing[0].bias),
    ),
    "class as a namespace": (
        nothing,
        lambda s, x: x * Config.scale,
        lambda _: setattr(Config, "scale", 0.5),
    ),
    "class of an object": (
        nothing,
        lambda s, x: x * HOLDER.scale,
        lambda _: setattr(Holder, "scale", 0.5),
    ),
    "bound method": (
        nothing,
        lambda s, x: BOUND(x),
        lambda _: setattr(HOLDER, "own", 0.5),
    ),
    "partial function": (
        nothing,
        lambda s, x: PARTIAL(x),
        lambda _: _halve(PARTIAL.keywords, "by"),
    ),
    "attribute of a function": (
        nothing,
        lambda s, x: gained(x),
        lambda _: setattr(gained, "gain", 0.5),
    ),
    "default": (
        nothing,
        lambda s, x: of_default(x),
        lambda _: _halve(of_default.__defaults__[0], "a"),  # type: ignore[index]
    ),
    "keyword's default": (
        nothing,
        lambda s, x: of_keyword(x),
        lambda _: _halve(of_keyword.__kwdefaults__["options"], "a"),
    ),
    "module of Python": (
        nothing,
        lambda s, x: imported(x),
        lambda _: setattr(SETTINGS_FILE, "scale", 0.5),
    ),
    "global array": (
        nothing,
        lambda s, x: x * float(ARRAY[0]),
        lambda _: _halve(ARRAY, 0),
    ),
    "nested global": (
        nothing,
        lambda s, x: x * NESTED["a"]["b"],
        lambda _: _halve(NESTED["a"], "b"),
    ),
    "environment": (
        nothing,
        lambda s, x: x * float(os.environ.get(VARIABLE, "1")),
        lambda _: os.environ.update({VARIABLE: "0.5"}),
    ),
}
GOES_ON: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], str]] = {
    "container with slots": (
        SlotsOfDict,
        lambda s, x: x * s.thing.scale,
        "is a container with slots",
    ),
    "array of objects": (
        lambda: np.array([1.0], dtype=object),
        lambda s, x: x * s.thing[0],
        "is an array",
    ),
    "pointer": (
        lambda: ctypes.pointer(ctypes.c_double(1.0)),
        lambda s, x: x * s.thing.contents.value,
        "whose changes nobody counts",
    ),
    "method of an iterator": (
        lambda: itertools.count(1).__next__,
        lambda s, x: x * s.thing(),
        "is an iterator",
    ),
    "counter": (
        lambda: itertools.count(1),
        lambda s, x: x * (1 + 0.1 * next(s.thing)),
        "is an iterator",
    ),
    "generator of Python": (
        lambda: (number for number in range(1, 1000)),
        lambda s, x: x * (1 + 0.1 * next(s.thing)),
        "is an iterator",
    ),
    "random state": (
        lambda: random.Random(0),
        lambda s, x: x * s.thing.random(),
        "is a random state of its own",
    ),
    "NumPy's generator": (
        lambda: np.random.default_rng(0),
        lambda s, x: x * float(s.thing.random()),
        "is a random state of its own",
    ),
    "torch's in a dictionary": (
        lambda: {"of": torch.Generator().manual_seed(0)},
        lambda s, x: x * torch.rand(WIDTH, generator=s.thing["of"]),
        "is a generator of its own",
    ),
    "global generator": (
        nothing,
        lambda s, x: x * torch.rand(WIDTH, generator=GENERATOR),
        "is a generator of its own",
    ),
    "global random state": (
        nothing,
        lambda s, x: x * STATE.random(),
        "is a random state of its own",
    ),
    "context variable": (
        nothing,
        lambda s, x: x * LEVEL.get(),
        "may be another in the thread of a backward",
    ),
    "large array": (
        lambda: np.ones(1 << 15),
        lambda s, x: x * float(s.thing[0]),
        "whose changes nobody counts",
    ),
    "array of another class": (
        lambda: np.ones(1).view(np.recarray),
        lambda s, x: x * float(s.thing[0]),
        "whose changes nobody counts",
    ),
    "array of the standard library": (
        lambda: array("d", [1.0]),
        lambda s, x: x * s.thing[0],
        "is of type array",
    ),
    "number of C": (
        lambda: ctypes.c_double(1.0),
        lambda s, x: x * s.thing.value,
        "is of type c_double",
    ),
    "number that processes share": (
        lambda: Value("d", 1.0),
        lambda s, x: x * s.thing.value,
        "is of type Synchronized",
    ),
    "queue": (
        SimpleQueue,
        lambda s, x: x * (1 + s.thing.qsize()),
        "is of type SimpleQueue",
    ),
    "queue of threads": (
        Queue,
        lambda s, x: x * (1 + s.thing.qsize()),
        "is of type Queue",
    ),
    "numbers of the machine": (
        nothing,
        lambda s, x: x * (1 + 0 * np.random.default_rng().random()),
        "its code names default_rng",
    ),
    "cache of what may change": (
        lambda: cached_of(HOLDER),
        lambda s, x: x * s.thing(),
        "caches what may change",
    ),
    "objects deeper in objects than is looked at": (
        lambda: chained(20),
        lambda s, x: x * last_of(s.thing).scale,
        "holds more than is looked at",
    ),
    "module of Python that counts": (nothing, lambda s, x: counting(x), "global scale"),
    "default that grows": (nothing, lambda s, x: counted(x), "global counted changed"),
}


_BY_OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "function": (lambda: by_others, lambda s, x: s.thing(x)),
    "lambda": (lambda: lambda x: by_others(x), lambda s, x: s.thing(x)),
    "partial": (
        lambda: functools.partial(twice_by_others, 2),
        lambda s, x: s.thing(x),
    ),
    "function in a list": (lambda: [by_others], lambda s, x: s.thing[0](x)),
    "function in a global": (nothing, lambda s, x: FUNCTIONS["by"](x)),
    "function in an object": (
        lambda: SimpleNamespace(by=by_others),
        lambda s, x: s.thing.by(x),
    ),
    "object": (Doer, lambda s, x: s.thing(x)),
    "bound method": (lambda: Doer().__call__, lambda s, x: s.thing(x)),
    "property": (Doer, lambda s, x: x * s.thing.scale),
    "class": (lambda: Doer, lambda s, x: s.thing.static(x)),
    "new object": (nothing, lambda s, x: Doer()(x)),
}
CHANGED |= {
    f"global of a {name}": (*case, lambda _: _halve(OTHERS, "x"))
    for name, case in _BY_OTHERS.items()
}


WRITTEN = ("tensor in a tuple", "module that is registered nowhere")
"""Tensors, whose bytes are gone."""


@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_deep_inside_is_put_back_for_the_rerun(name: str) -> None:
    make, read, change = CHANGED[name]
    if name in WRITTEN:
        with pytest.raises(RegionError, match="inside its attribute thing"):
            train(read, True, make=make, change=change)
        return
    ours, refused, theirs = both(read, make=make, change=change)
    assert not refused and same_bits(ours, theirs)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_stays_runs_again(name: str) -> None:
    make, read, _ = CHANGED[name]
    ours, refused, theirs = both(read, make=make)
    assert not refused and same_bits(ours, theirs)


@pytest.mark.parametrize("name", GOES_ON)
def test_what_goes_on_from_where_it_stands_runs_once(name: str) -> None:
    make, read, text = GOES_ON[name]
    ours, refused, theirs = both(read, make=make)
    assert same_bits(ours, theirs)
    assert sorted(refused) == ["layers.0", "layers.1"]
    assert all(text in reason for reason in refused.values())


THINGS = Holder()
GLOBAL_PROXY = weakref.proxy(THINGS)


class Closed:
    """Raises where anything but its one attribute is asked for."""

    def __init__(self) -> None:
        self.own = 2.0

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"there is no {name}")


class Disguised:
    """Does not say what it is."""

    own = 2.0
    __class__ = property(lambda self: 1 // 0)  # type: ignore[assignment]


Homeless = type("Homeless", (), {"__module__": None, "own": 2.0})


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (Closed, "LookupError: there is no __self__"),
        (lambda: [Disguised()], "ZeroDivisionError"),
        (lambda: [Homeless()], ""),
    ],
)
def test_objects_that_raise_when_looked_at(make: Callable[[], Any], error: str) -> None:
    """Plain training never asks them: a layer that has one runs once."""

    def read(layer: Any, x: Tensor) -> Tensor:
        thing = layer.thing
        return x * (thing[0] if type(thing) is list else thing).own

    plain, _ = train(read, False, make=make)
    ours, refused = train(read, True, make=make)
    assert same_bits(ours, plain)
    assert len(refused) == (2 if error else 0)
    assert all(f"looked at ({error}" in reason for reason in refused.values())


def test_proxies_are_not_what_they_lead_to() -> None:
    """A proxy of a dictionary says that it is one."""
    counts = Counter(a=1)

    def read(block: Any, x: Tensor) -> Tensor:
        by = block.thing["a"] + block.inner[0]["a"] + GLOBAL_PROXY.own
        return x * float(by)

    inner = [weakref.proxy(counts)]
    ours, refused, theirs = both(read, make=lambda: weakref.proxy(counts), inner=inner)
    assert not refused and same_bits(ours, theirs)


@pytest.mark.parametrize("kind", [list, tuple])
def test_containers_may_be_in_one_another_deeper_than_calls(kind: type) -> None:
    """A linked list, which is more than is compared; and one that holds itself."""

    def make() -> Any:
        found, ring = kind(), [1.0]
        ring.append(ring)  # type: ignore[arg-type]
        for _ in range(2 * sys.getrecursionlimit()):
            found = kind((1.0, found))
        return [found, ring]

    ours, refused, theirs = both(lambda s, x: x * s.thing[0][0], make=make)
    assert same_bits(ours, theirs)
    assert len(refused) == (2 if kind is list else 0)
    assert all("more than is looked at" in each for each in refused.values())


def test_draws_that_leave_no_trace_are_drawn_again() -> None:
    """`fork_rng` sets the generator back, and so the forward seems to draw nothing."""
    ours, refused, theirs = both(lambda s, x: forked(x), change=lambda _: torch.rand(3))
    assert not refused and same_bits(ours, theirs)
