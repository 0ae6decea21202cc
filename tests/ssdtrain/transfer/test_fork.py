"""`os.fork` under a session: the child never touches the parent's slots or waits for
its threads; see [Note: after a fork] in ssdtrain/forks.py."""

import contextlib
import ctypes
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.counters import Counters, Trace
from ssdtrain.errors import ForkedError
from ssdtrain.transfer.device import CpuDevice
from ssdtrain.transfer.offloader import Drain, Meters, Offloader
from ssdtrain.transfer.pinned import PinnedPool
from ssdtrain.transfer.workers import Workers
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.forking import (
    LIMIT_S,
    OK,
    RAISED,
    WRONG,
    end_soon,
    held_by_a_thread,
    in_child,
)
from tests.ssdtrain.mlp import mlp
from tests.ssdtrain.targets import TARGETS, settings_of

PAGE = 4096

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """OpenMP's threads do not survive a fork either, with us or without."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_threads_of_another_process_are_not_waited_for() -> None:
    workers = Workers(1, "ssdtrain-test")
    assert workers.submit(lambda: 3).result() == 3

    def child() -> int:
        workers.shutdown(wait=True)
        try:
            workers.submit(lambda: 3)
        except ForkedError as error:
            return OK if str(os.getppid()) in str(error) else WRONG
        return WRONG

    assert in_child(child) == OK
    assert workers.submit(lambda: 4).result() == 4
    workers.shutdown()


def test_a_copy_under_way_at_the_fork_is_an_error() -> None:
    device, started, go = CpuDevice(), threading.Event(), threading.Event()

    class Slow:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            started.set()
            go.wait()

    source, target = torch.ones(8), torch.zeros(8)
    event = device.copy_out(source, target, [Slow()])
    started.wait()

    def child() -> int:
        try:
            event.synchronize()
        except ForkedError:
            device.close()
            return OK
        return WRONG

    code = in_child(child)
    go.set()
    event.synchronize()
    assert code == OK and same_bits(source, target)
    device.close()


def test_a_child_stores_and_loads_nothing() -> None:
    device, meters = CpuDevice(), Meters(counters=Counters(), trace=Trace(False))
    pool = PinnedPool(device, 1 << 20)
    offloader = Offloader(device, pool, None, Drain.NEVER, 1, meters)
    source, patient = torch.ones(PAGE, dtype=torch.uint8), lambda: True
    transfer = offloader.store(source, "before", patient)
    assert transfer is not None

    def child() -> int:
        if offloader.store(source, "after", patient) is not None:
            return WRONG
        try:
            offloader.load(transfer, torch.empty_like(source))
        except ForkedError:
            offloader.discard(transfer)
            offloader.wait_io()
            offloader.close()
            return OK
        return WRONG

    with held_by_a_thread(offloader._lock), held_by_a_thread(pool._changed):
        assert in_child(child) == OK
    assert pool.used_bytes == PAGE
    offloader.discard(transfer)
    offloader.close()


def step(net: nn.Module) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).requires_grad_()
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("plan", ["offload-all", "auto"])
def test_a_child_trains_without_us_and_the_parent_with_us(
    num_steps: int, target: str, plan: str, tmp_path: Path, everything: Any
) -> None:
    net = mlp(6)
    expected = step(net)
    settings = {**everything, **settings_of(target, tmp_path), "plan": plan}

    def equal() -> bool:
        return same_bits(step(net), expected)

    with ssdtrain.offload(net, **settings) as session:
        for _ in range(num_steps):
            assert equal()
            session.hints.step_end()

        def child() -> int:
            return OK if all(equal() for _ in range(4)) else WRONG

        assert in_child(child) == OK
        for _ in range(4):
            assert equal()
        assert session.last_step is not None


def test_what_was_moved_before_the_fork_is_an_error_in_the_child(
    everything: Any,
) -> None:
    net = mlp(6)
    expected = step(net)
    with ssdtrain.offload(net, **everything) as session:
        net.zero_grad()
        x = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).requires_grad_()
        loss = net(x).square().sum()
        session.cache.offloader.wait_io()

        def child() -> int:
            try:
                loss.backward()
            except RuntimeError as error:
                return RAISED if "process" in str(error) else WRONG
            return WRONG

        assert in_child(child) == RAISED
        loss.backward()
        found = [p.grad for p in net.parameters()]
        assert same_bits(found, expected)


def fork_by_c() -> int:
    """As a library written in C forks: no hook of `os.fork` runs."""
    before = sys.getswitchinterval()
    # CPython itself hangs in such a child if a thread has just asked for its turn.
    sys.setswitchinterval(LIMIT_S)
    time.sleep(4 * before)
    try:
        return int(ctypes.PyDLL(None).fork())
    finally:
        sys.setswitchinterval(before)


LOCKS: dict[str, Callable[[ssdtrain.Session], Any]] = {
    "cache": lambda s: s.cache.lock,
    "counters": lambda s: s.cache.ledger.counters._lock,
    "pool": lambda s: s.cache.offloader.pool._changed,
    "offloader": lambda s: s.cache.offloader._lock,
    "storage": lambda s: s.cache.offloader.storage.inner._lock,  # type: ignore
    "verify": lambda s: s.cache.verifier._mode._lock.here(),  # type: ignore
    "weights": lambda s: s.cache.recipes._weights._lock.here(),  # type: ignore
}


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[nn.Sequential, ssdtrain.Session]]:
    """A session on the SSD with recipes and self-checks, some steps old."""
    tmp_path.chmod(0o700)
    net = mlp(6)
    settings: Any = {
        "max_overhead": 0.01,
        "target": "ssd",
        "directory": str(tmp_path),
        "min_bytes": 0,
    }
    settings |= {"plan": "auto", "max_overhead": 1.0, "verify": "checksum"}
    with ssdtrain.offload(net, **settings) as session:
        for _ in range(4):
            step(net)
            session.hints.step_end()
        assert session.plan is not None
        yield net, session


@pytest.mark.parametrize("fork", [os.fork, fork_by_c])
@pytest.mark.parametrize("lock", LOCKS)
def test_a_child_waits_for_no_lock_of_a_thread(
    lock: str, fork: Callable[[], int], training: tuple[nn.Sequential, ssdtrain.Session]
) -> None:
    net, session = training
    expected = step(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    x = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).requires_grad_()
    loss = net(x).square().sum()  # its graph is the parent's, and the child has it too

    def child() -> int:
        with contextlib.suppress(ForkedError):
            loss.backward()
        for _ in range(2):
            if not same_bits(step(net), expected):
                return WRONG
            optimizer.step()
        session.hints.wait_io()
        session.hints.step_end()
        if len(session.steps) < 3:
            return WRONG
        session.close()
        return OK if same_bits(step(net), expected) else WRONG

    with held_by_a_thread(LOCKS[lock](session)):
        assert in_child(child, fork) == OK
    net.zero_grad()
    loss.backward()
    found = [p.grad for p in net.parameters()]
    assert same_bits(found, expected)
    assert same_bits(step(net), expected)


class Forks(nn.Module):
    """Forks in its forward, once, while a thread holds a lock."""

    def __init__(self, lock: Any, fork: Callable[[], int]) -> None:
        super().__init__()
        self.lock, self.fork = lock, fork
        self.child = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.child < 0:
            with held_by_a_thread(self.lock):
                self.child = self.fork()
                if self.child == 0:
                    end_soon()
        return x * 1


@pytest.mark.parametrize(
    ("lock", "fork"), [("cache", os.fork), ("cache", fork_by_c), ("counters", os.fork)]
)
@pytest.mark.parametrize("plan", ["keep-all", "offload-all", "auto"])
def test_a_fork_inside_a_forward(
    lock: str, plan: str, fork: Callable[[], int], everything: Any
) -> None:
    net = mlp(6)
    expected = step(net)
    settings = {**everything, "plan": plan, "recompute": "auto", "max_overhead": 1.0}
    with ssdtrain.offload(net, **settings) as session:
        for _ in range(4):
            step(net)
            session.hints.step_end()
        forks = Forks(LOCKS[lock](session), fork)
        net.insert(6, forks)
        code = OK
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                equal = same_bits(step(net), expected)
            code = OK if equal else WRONG
        except ForkedError:
            code = RAISED  # of what was moved before the fork
        finally:
            if forks.child == 0:
                os._exit(code)
        child = os.waitstatus_to_exitcode(os.waitpid(forks.child, 0)[1])
        assert child == OK if plan == "keep-all" else child in (OK, RAISED)
        assert code == OK
        assert same_bits(step(net), expected)
