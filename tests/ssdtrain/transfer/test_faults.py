"""[Note: nothing is lost]: faults of the storage under a real training step.

Either training goes on bitwise equal, with the fault counted, or it stops with an
error that names what was lost. Never zeros, never a leak.
"""

import gc
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.counters import Fallback
from ssdtrain.errors import ActivationLostError
from ssdtrain.observe import planner, trials
from ssdtrain.observe.memorygoal import MemoryGoal
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.eventually import session_threads, until
from tests.ssdtrain.faulty import Fault, FaultKind, Operation
from tests.ssdtrain.mlp import WIDTH, gradients_of, mlp
from tests.ssdtrain.virtual_time import VirtualTime

ALWAYS = 10**9
NUM_LAYERS = 8


def settle(session: ssdtrain.Session) -> None:
    """Let the writers finish, so that what is read back comes from the storage."""
    session.cache.offloader.wait_io()


WRITE_FAULTS = [
    (FaultKind.NO_SPACE, Operation.ALLOCATE, Fallback.KEPT_STORAGE_FULL),
    (FaultKind.NO_SPACE, Operation.WRITE, Fallback.KEPT_STORAGE_FULL),
    (FaultKind.IO_ERROR, Operation.WRITE, Fallback.KEPT_WRITE_FAILED),
    (FaultKind.SHORT, Operation.WRITE, Fallback.KEPT_WRITE_FAILED),
    (FaultKind.WORKER_DEATH, Operation.WRITE, Fallback.KEPT_WRITE_FAILED),
]


@pytest.mark.parametrize(("kind", "operation", "fallback"), WRITE_FAULTS)
@pytest.mark.parametrize("count", [1, ALWAYS])
def test_failed_writes_lose_nothing(
    faulty: Any, kind: FaultKind, operation: Operation, fallback: Fallback, count: int
) -> None:
    net, before = mlp(NUM_LAYERS), session_threads()
    expected = gradients_of(net)
    fault = Fault(operation=operation, kind=kind, at=1, count=count)
    with faulty(net, fault, host_bytes=64 << 20) as session:
        for _ in range(3):
            found = gradients_of(net)
            assert same_bits(found, expected)
            settle(session)
        total = sum(step.fallbacks.get(fallback.value, 0) for step in session.steps)
        assert total >= 1
        offloader = session.cache.offloader
        assert session.cache.is_idle
        assert offloader.pool.used_bytes == 0
        offloader.wait_io()
        assert offloader.storage.stats().used_bytes == 0
    assert session_threads() <= before


def test_full_disk_and_full_staging_keep_tensors_on_the_device(faulty: Any) -> None:
    """Once staging is full of bytes that no disk takes, the rest is kept."""
    net = mlp(NUM_LAYERS)
    expected = gradients_of(net)
    full = Fault(
        operation=Operation.ALLOCATE, kind=FaultKind.NO_SPACE, at=0, count=ALWAYS
    )
    with faulty(net, full, host_bytes=64 << 10) as session:
        for _ in range(3):
            found = gradients_of(net)
            assert same_bits(found, expected)
        report = session.last_step
        assert report is not None
        assert report.bytes_kept > 0
        assert report.bytes_written == 0
        assert report.fallbacks[Fallback.KEPT_HOST_FULL.value] > 0


def text_of_lost_step(net: nn.Module, session: ssdtrain.Session) -> str:
    """In a frame of its own: the error's traceback holds the graph."""
    loss = net(torch.randn(32, WIDTH, requires_grad=True)).sum()
    settle(session)
    with pytest.raises(ActivationLostError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.parametrize(
    "kind", [FaultKind.IO_ERROR, FaultKind.SHORT, FaultKind.WORKER_DEATH]
)
def test_failed_read_stops_with_what_was_lost(faulty: Any, kind: FaultKind) -> None:
    net = mlp(NUM_LAYERS)
    expected = gradients_of(net)
    fault = Fault(operation=Operation.READ, kind=kind, at=0)
    with faulty(net, fault) as session:
        text = text_of_lost_step(net, session)
        for part in ("bytes", "Slot(", "Backward0", "last checkpoint"):
            assert part in text
        gc.collect()
        # The session is usable again.
        found = gradients_of(net)
        assert same_bits(found, expected)
        assert session.cache.is_idle
        pool = session.cache.offloader.pool
        # A worker may be giving the last buffer back.
        until(lambda: pool.used_bytes == 0)


def test_stalled_disk_stalls_but_loses_nothing(
    faulty: Any, virtual_time: VirtualTime
) -> None:
    net = mlp(NUM_LAYERS)
    expected = gradients_of(net)
    stalls = [
        Fault(operation=operation, kind=FaultKind.STALL, at=1, seconds=30.0)
        for operation in (Operation.WRITE, Operation.READ)
    ]
    with faulty(net, *stalls) as session:
        found = gradients_of(net)
        settle(session)
        assert virtual_time.monotonic() >= 30.0
        assert same_bits(found, expected)
        assert session.last_step is not None


def share_kept(session: ssdtrain.Session) -> float:
    """Of the plan's bytes. Steps of a plan that keeps all have no hooks and count
    nothing."""
    assert session.plan is not None
    sums = session.plan.bytes_by_placement()
    return sums.get("keep", 0) / sum(sums.values())


def test_auto_keeps_what_a_slow_disk_cannot_take(faulty: Any) -> None:
    """In real time: sleeps of the disk, a hundred times as long as the step. What is
    judged is where the bytes are, not how long a step took."""
    net = mlp(NUM_LAYERS)
    expected = gradients_of(net)
    slow = Fault(
        operation=Operation.WRITE, kind=FaultKind.STALL, at=0, count=ALWAYS, seconds=0.3
    )
    record = 32 * WIDTH * 4
    with faulty(net, slow, plan="auto", host_bytes=4 * record) as session:
        for _ in range(4):  # warm-up, observed, planned
            settle(session)
            found = gradients_of(net)
            assert same_bits(found, expected)
            session.hints.step_end()
        # 16 records through four threads of this disk would take 1.2 seconds.
        assert share_kept(session) > 0.5


@pytest.mark.parametrize("at", [80, 480], ids=["tried", "followed"])
def test_auto_gives_up_a_disk_that_becomes_slow(
    faulty: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """While its plan is tried, or long after: where everything fits, it is kept."""
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda *given: True)
    monkeypatch.setattr(planner, "FIRST_LOOK", 20)
    # A tiny model's copies take longer than its compute.
    monkeypatch.setattr(trials, "ERROR", 20.0)
    net = mlp(NUM_LAYERS)
    expected = gradients_of(net)
    slow = Fault(
        operation=Operation.WRITE,
        kind=FaultKind.STALL,
        at=at,
        count=ALWAYS,
        seconds=0.1,
    )
    record = 32 * WIDTH * 4
    settings = {"plan": "auto", "max_overhead": 0.3, "host_bytes": 4 * record}
    moved = []
    with faulty(net, slow, **settings) as session:
        for _ in range(100):
            assert same_bits(gradients_of(net), expected)
            moved.append(session.last_step.bytes_offloaded)
            if session.plan is not None and session.plan.keeps_all:
                break
        assert any(moved) and session.plan.keeps_all
        gradients_of(net)
        assert not session.last_step.bytes_offloaded


def test_unpinnable_memory_is_counted(everything: Any) -> None:
    net = mlp(NUM_LAYERS)
    expected = gradients_of(net)
    with ssdtrain.offload(net, **everything) as session:
        session.cache.device.pin = lambda buffer: False
        found = gradients_of(net)
        assert same_bits(found, expected)
        report = session.last_step
        assert report is not None
        assert report.bytes_offloaded == 0
        assert report.fallbacks[Fallback.KEPT_PIN_FAILED.value] > 0
