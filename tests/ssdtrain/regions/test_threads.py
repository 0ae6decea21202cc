"""A forward reads what its thread has for itself, and backward runs in another one."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from ssdtrain.regions.watch import Watch
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.regions.reading import nothing, train

OWN = threading.local()


class Levels(threading.local):
    """Filled in each thread that asks."""

    default = 1.0

    def __init__(self) -> None:
        self.stack = [self.default]


LEVELS = Levels()
HELD = {"of": (threading.local(), threading.local())}


class Plain:
    def __init__(self) -> None:
        self.own = 1.0


def push(value: float) -> None:
    if not hasattr(OWN, "stack"):
        OWN.stack = []
    OWN.stack.append(value)


def scale() -> float:
    return getattr(OWN, "scale", 1.0)


def top() -> float:
    return OWN.stack[-1] if getattr(OWN, "stack", None) else 1.0


def inner() -> float:
    held = getattr(HELD["of"][0], "inner", None)
    return getattr(held, "scale", 1.0)


def set_inner() -> None:
    outer, held = HELD["of"]
    held.scale, outer.inner = 0.5, held


def unset_inner() -> None:
    del HELD["of"][0].inner, HELD["of"][1].scale


Sets = tuple[Callable[[], float], Callable[[], Any], Callable[[], Any]]
CASES: dict[str, Sets] = {
    "attribute": (
        scale,
        lambda: setattr(OWN, "scale", 0.5),
        lambda: delattr(OWN, "scale"),
    ),
    "stack": (top, lambda: push(0.5), lambda: OWN.stack.pop()),
    "two of a stack": (
        top,
        lambda: (push(0.25), push(0.5)),
        lambda: (OWN.stack.pop(), OWN.stack.pop()),
    ),
    "filled by its class": (
        lambda: LEVELS.stack[-1],
        lambda: LEVELS.stack.append(0.5),
        lambda: LEVELS.stack.pop(),
    ),
    "another stack": (
        lambda: LEVELS.stack[-1],
        lambda: setattr(LEVELS, "stack", [0.5]),
        lambda: setattr(LEVELS, "stack", [1.0]),
    ),
    "one in another": (inner, set_inner, unset_inner),
}


def here(loss: Tensor) -> None:
    loss.backward()


def in_another(loss: Tensor, begin: Callable[[], Any] = nothing) -> None:
    """In a thread that has nothing, or its own values: they are there afterwards."""
    raised: list[BaseException] = []

    def run() -> None:
        begin()
        before = state()
        try:
            loss.backward()
            assert state() == before
        except BaseException as error:
            raised.append(error)

    mine = state()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert state() == mine
    for error in raised:
        raise error


def state() -> list[Any]:
    every = (OWN, LEVELS, *HELD["of"])
    return [{**vars(each)} for each in every] + [[*LEVELS.stack]]


def in_a_set_one(loss: Tensor) -> None:
    def begin() -> None:
        OWN.scale = 0.125
        push(0.25)
        LEVELS.stack.append(2.0)
        HELD["of"][1].scale, HELD["of"][0].inner = 4.0, HELD["of"][1]

    in_another(loss, begin)


@pytest.mark.parametrize("backward", [here, in_another, in_a_set_one])
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("name", CASES)
def test_a_rerun_reads_what_the_forwards_thread_had(
    name: str, where: str, backward: Callable[[Tensor], None]
) -> None:
    read, *sets = CASES[name]
    options: dict[str, Any] = {where: tuple(sets), "read": lambda s, x: x * read()}
    theirs, _ = train(offloaded=False, **options)
    sets[0]()  # else the first forward makes the stack
    sets[1]()
    ours, refused = train(offloaded=True, backward=backward, **options)
    assert not refused
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("backward", [here, in_another])
def test_a_value_that_changes_before_backward(
    backward: Callable[[Tensor], None],
) -> None:
    options: dict[str, Any] = {
        "read": lambda s, x: x * getattr(s.thing[-1], "scale", 1.0),
        "make": lambda: [threading.local()],
        "change": lambda thing: setattr(thing[-1], "scale", 0.5),
    }
    theirs, _ = train(offloaded=False, **options)
    ours, refused = train(offloaded=True, backward=backward, **options)
    assert not refused and same_bits(ours, theirs)


def counted(block: Any, x: Tensor) -> Tensor:
    block.thing.count = getattr(block.thing, "count", 0) + 1
    return x * (1 + 0.1 * block.thing.count)


def test_a_forward_that_changes_it_runs_once() -> None:
    theirs, _ = train(counted, False, make=threading.local)
    ours, refused = train(counted, True, make=threading.local)
    assert same_bits(ours, theirs)
    assert sorted(refused) == ["layers.0", "layers.1"]
    assert all("its attribute thing changed" in each for each in refused.values())


def test_one_pass_reads_it() -> None:
    """It is not gathered by name in each call."""
    module = nn.Linear(2, 2)
    module.own = own = threading.local()  # type: ignore[assignment]
    watch = Watch(module)
    seen = watch.look()
    assert seen.now() is not None and watch.look() is seen
    own.scale = 2.0
    assert watch.look() is not seen
