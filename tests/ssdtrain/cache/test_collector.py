"""Python's garbage collector: what we hold alive makes it walk nothing old, and what
the program has set is as it was. Collections are counted, never timed."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache.collector import PATIENT, GarbageCollector
from ssdtrain.observe.searching import Searching
from tests.ssdtrain.cache.plans import every_other_moved
from tests.ssdtrain.forking import OK, WRONG, in_child

FOUND = 50, 4, 5
"""Thresholds of the program."""
MANY = 30_000
"""Old objects. The handles of a few steps are a quarter of them."""
MOVED: dict[str, Any] = {"target": "host", "min_bytes": 1, "plan": "offload-all"}


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.enable()
    gc.set_threshold(*FOUND)
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


@pytest.fixture
def old_objects() -> Iterator[None]:
    """They are `MANY`, whatever pytest has loaded."""
    gc.collect()
    gc.freeze()
    old: list[list[int]] = [[] for _ in range(MANY)]
    gc.collect()
    yield
    old.clear()
    gc.unfreeze()


class Look(nn.Module):
    """Calls something in its forward."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        return x


class InBackward(torch.autograd.Function):
    """Calls something in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], Any]) -> Tensor:  # type: ignore[override]
        ctx.call = call
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.call()
        return gradient, None


def net(call: Callable[[], Any] = lambda: None, num: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [each for _ in range(num) for each in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers, Look(call), nn.Tanh())


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(8, 16)).sum()  # type: ignore[no-any-return]


def full_collections() -> int:
    return gc.get_stats()[2]["collections"]


@pytest.mark.usefixtures("old_objects")
def test_settled_steps_have_no_full_collections() -> None:
    model = net(num=40)
    settings = MOVED | {"plan": "auto", "max_overhead": 0.0, "recompute": "off"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    with ssdtrain.offload(model, **settings) as session:
        while session.plan is None:
            step()
        session.follow(every_other_moved(session))
        for _ in range(4):
            step()
        gc.collect()
        before = full_collections()
        for _ in range(40):
            step()
        assert full_collections() == before


def test_generation_1_waits_from_forward_to_the_end_of_backward() -> None:
    seen: list[tuple[int, int, int]] = []

    def look() -> None:
        seen.append(gc.get_threshold())

    model = net(look)
    with ssdtrain.offload(model, **MOVED):
        x = torch.ones(8, 16, requires_grad=True)
        loss = model(InBackward.apply(x, look)).sum()
        look()
        # The last operator of backward saved nothing: all that was saved is dead there.
        loss.backward()
        assert gc.get_threshold() == FOUND
    in_forward, behind_forward, behind_backward = seen
    assert in_forward == behind_forward
    assert (in_forward[0], in_forward[2]) == (FOUND[0], FOUND[2])
    assert in_forward[1] > 100 * FOUND[1]
    assert behind_backward == FOUND


def raise_it() -> None:
    raise KeyError


def test_a_forward_that_raises() -> None:
    model = net(raise_it)
    with ssdtrain.offload(model, **MOVED):
        with pytest.raises(KeyError):
            loss_of(model)
        assert gc.get_threshold() == FOUND


def test_a_backward_that_raises() -> None:
    model = net()
    with ssdtrain.offload(model, **MOVED):
        loss = InBackward.apply(loss_of(model), raise_it)
        with pytest.raises(KeyError):
            loss.backward()
        assert gc.get_threshold() != FOUND  # backward may come again
        del loss
        assert gc.get_threshold() == FOUND


def test_a_graph_in_a_cycle_of_garbage() -> None:
    model = net()
    with ssdtrain.offload(model, **MOVED):
        cycle: list[Any] = [loss_of(model)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert gc.get_threshold() == FOUND


def test_all_forwards_in_flight_are_waited_for() -> None:
    model = net()
    with ssdtrain.offload(model, **MOVED):
        losses = [loss_of(model) for _ in range(3)]
        for at in (2, 0):
            losses[at].backward()
            assert gc.get_threshold() != FOUND
        losses[1].backward()
        assert gc.get_threshold() == FOUND


def test_close_before_backward() -> None:
    model = net()
    session = ssdtrain.offload(model, **MOVED)
    loss = loss_of(model)
    session.close()
    assert gc.get_threshold() == FOUND
    gc.set_threshold(60, 6, 6)
    del loss
    assert gc.get_threshold() == (60, 6, 6)


def test_what_the_program_sets_meanwhile_stays() -> None:
    model = net(lambda: gc.set_threshold(60, 6, 6))
    with ssdtrain.offload(model, **MOVED):
        loss_of(model).backward()
        assert gc.get_threshold() == (60, 6, 6)
        loss_of(model).backward()
    assert gc.get_threshold() == (60, 6, 6)


@pytest.mark.parametrize(
    "found", [(0, 10, 10), (50, 100_000, 10), (50, 10, 0), (50, 0, 10)]
)
def test_nothing_is_set_where_it_would_not_help(found: tuple[int, int, int]) -> None:
    """No collections, patient already, no generation 1 (the incremental collector and
    that of free-threaded builds), each collection one of generation 1."""
    gc.set_threshold(*found)
    seen: list[tuple[int, int, int]] = []
    model = net(lambda: seen.append(gc.get_threshold()))
    with ssdtrain.offload(model, **MOVED):
        loss_of(model).backward()
    assert [*seen, gc.get_threshold()] == [found, found]


def test_nothing_is_set_where_the_program_has_switched_it_off() -> None:
    gc.disable()
    seen: list[tuple[int, int, int]] = []
    model = net(lambda: seen.append(gc.get_threshold()))
    with ssdtrain.offload(model, **MOVED):
        loss_of(model).backward()
    assert [*seen, gc.get_threshold()] == [FOUND, FOUND]
    assert not gc.isenabled()


def test_a_session_knows_its_own() -> None:
    """One that has ended takes nothing from another one."""
    first, second = GarbageCollector(), GarbageCollector()
    hold = first.hold()
    assert hold is not None
    del hold
    gc.set_threshold(60, 6, 6)
    hold = second.hold()
    held = gc.get_threshold()
    first.let_go()
    assert gc.get_threshold() == held
    del hold
    assert gc.get_threshold() == (60, 6, 6)


def test_forward_and_backward_in_other_threads() -> None:
    model = net()
    losses: list[Tensor] = []
    with ssdtrain.offload(model, **MOVED):
        for work in (
            lambda: losses.append(loss_of(model)),
            lambda: losses.pop().backward(),
        ):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert gc.get_threshold() == FOUND


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_trains_as_if_nothing_were_held_back() -> None:
    model = net()
    with ssdtrain.offload(model, **MOVED):
        loss = loss_of(model)

        def child() -> int:
            loss_of(model)
            return OK if gc.get_threshold() == FOUND else WRONG

        assert in_child(child) == OK
        loss.backward()
        assert gc.get_threshold() == FOUND


class Node:
    """Garbage in a cycle."""

    def __init__(self) -> None:
        self.own = self


def test_young_garbage_is_freed_within_a_forward() -> None:
    alive: list[bool] = []

    def litter() -> None:
        found = weakref.ref(Node())
        _ = [[] for _ in range(4 * FOUND[0])]  # type: ignore[var-annotated]
        alive.append(found() is not None)

    model = net(litter)
    with ssdtrain.offload(model, **MOVED):
        loss_of(model).backward()
    assert alive == [False]


def test_older_garbage_is_freed_before_the_next_forward() -> None:
    """Also where there is no time for it between steps."""
    garbage: list[Any] = []
    alive: list[bool] = []

    def litter() -> None:
        alive.append(bool(garbage) and garbage[0]() is not None)
        node = Node()
        garbage[:] = [weakref.ref(node)]
        _ = [[] for _ in range(4 * FOUND[0] * FOUND[1])]  # type: ignore[var-annotated]
        del node  # it is old by now

    model = net(litter)
    with ssdtrain.offload(model, **MOVED):
        loss_of(model).backward()
        assert garbage[0]() is not None
        loss_of(model).backward()
    assert alive == [False, False]


def test_a_loss_that_is_kept_does_not_hold_it_back_for_ever() -> None:
    model = net()
    gc.set_threshold(10, *FOUND[1:])
    with ssdtrain.offload(model, **MOVED):
        loss = loss_of(model)
        found = weakref.ref(Node())
        gc.collect(0)
        before = gc.get_stats()[1]["collections"]
        _ = [[] for _ in range(30_000)]  # type: ignore[var-annotated]
        assert gc.get_stats()[1]["collections"] > before
        assert found() is None
        del loss


def test_what_is_made_between_two_steps_does_not_grow_old() -> None:
    """Where it has gone behind the block, nothing has looked at it."""
    collector, looks = GarbageCollector(), []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"]:
            looks.append(info["generation"])

    many = 4 * FOUND[0] * FOUND[1]
    gc.collect()
    gc.callbacks.append(look)
    try:
        with pytest.raises(RuntimeError), collector.held():
            made: list[list[int]] = [[] for _ in range(many)]
            assert gc.get_threshold() != FOUND and not looks
            raise RuntimeError
        assert gc.get_threshold() == FOUND
        made += [[] for _ in range(many)]
        assert looks
    finally:
        gc.callbacks.remove(look)


def test_a_planner_works_while_it_is_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[int, int, int]] = []
    starts = Searching.step_starts

    def step_starts(own: Searching) -> None:
        found.append(gc.get_threshold())
        starts(own)

    monkeypatch.setattr(Searching, "step_starts", step_starts)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with ssdtrain.offload(net, max_overhead=0.01, target="host", min_bytes=1):
        for _ in range(4):
            net(torch.ones(2, 4)).sum().backward()
            assert gc.get_threshold() == FOUND
    assert found and all(middle >= PATIENT for _, middle, _ in found)
    assert all(each[::2] == FOUND[::2] for each in found)
