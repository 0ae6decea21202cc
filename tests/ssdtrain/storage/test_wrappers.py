"""The throttle keeps its rate; the faulty storage fails as told, and only then."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ssdtrain.errors import StorageFullError
from tests.ssdtrain.faulty import (
    Fault,
    FaultKind,
    FaultyStorage,
    Operation,
    WorkerDeath,
)
from tests.ssdtrain.memory_storage import MemoryStorage
from tests.ssdtrain.throttle import Link, ThrottledStorage
from tests.ssdtrain.virtual_time import VirtualTime

MIB = 1024 * 1024
PAGE = 4096
Aligned = Callable[..., torch.Tensor]


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("size", [64 * 1024, 2 * MIB])
def test_rate(aligned: Aligned, num_threads: int, size: int) -> None:
    rate, time = 0.2, VirtualTime()
    store = time.throttled(MemoryStorage(), write_gb_per_s=rate, read_gb_per_s=2 * rate)
    total = 48 * MIB
    slot, buffer = store.allocate(size), aligned(size)
    for call, expected in ((store.write, rate), (store.read, 2 * rate)):
        begin = time.monotonic()
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in range(total // size):
                pool.submit(call, slot, buffer)
        seconds = time.monotonic() - begin
        # A link that was idle may start `Link.SLACK_S` early.
        assert total / expected / 1e9 - Link.SLACK_S <= seconds
        assert seconds == pytest.approx(total / expected / 1e9, abs=Link.SLACK_S)


@pytest.mark.parametrize("late_s", [0.0, 0.001, 0.003])
def test_a_thread_that_wakes_late_loses_no_rate(late_s: float) -> None:
    now = 100.0
    link = Link(0.1, clock=lambda: now)
    for _ in range(1000):
        now = link.book(1_000_000) + late_s  # 10 ms of device time each
    assert now - 100.0 == pytest.approx(10.0, rel=0.001)


def test_threads_queue_and_idle_time_is_not_saved_up() -> None:
    now = 100.0
    link = Link(0.1, latency_ms=5, clock=lambda: now)
    ends = [link.book(1_000_000) for _ in range(4)]
    assert ends == pytest.approx([100.015, 100.025, 100.035, 100.045])
    now = 200.0
    assert link.book(1_000_000) == pytest.approx(200.015, abs=0.0041)
    assert Link(None, latency_ms=5, clock=lambda: now).book(10**9) == now + 0.005


def test_directions_are_independent_and_latency_adds(aligned: Aligned) -> None:
    time = VirtualTime()
    store = time.throttled(MemoryStorage(), write_gb_per_s=0.01, latency_ms=30)
    slot, buffer = store.allocate(PAGE), aligned(PAGE)
    store.write(slot, buffer)
    begin = time.monotonic()
    store.read(slot, buffer)
    assert time.monotonic() - begin == pytest.approx(0.030)


def test_impossible_rates() -> None:
    with pytest.raises(ValueError, match="above 0, got 0"):
        ThrottledStorage(MemoryStorage(), write_gb_per_s=0)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        ThrottledStorage(MemoryStorage(), latency_ms=-1)


def scripted(operation: Operation, kind: FaultKind, at: int = 1) -> FaultyStorage:
    fault = Fault(operation=operation, kind=kind, at=at, seconds=0.05)
    return FaultyStorage(MemoryStorage(), [fault])


@pytest.mark.parametrize(
    ("operation", "kind", "error"),
    [
        (Operation.ALLOCATE, FaultKind.NO_SPACE, StorageFullError),
        (Operation.WRITE, FaultKind.NO_SPACE, StorageFullError),
        (Operation.WRITE, FaultKind.IO_ERROR, OSError),
        (Operation.WRITE, FaultKind.SHORT, OSError),
        (Operation.WRITE, FaultKind.WORKER_DEATH, WorkerDeath),
        (Operation.READ, FaultKind.IO_ERROR, OSError),
        (Operation.READ, FaultKind.SHORT, OSError),
        (Operation.READ, FaultKind.WORKER_DEATH, WorkerDeath),
    ],
)
def test_only_the_scripted_call_raises(
    aligned: Aligned,
    operation: Operation,
    kind: FaultKind,
    error: type[BaseException],
) -> None:
    store = scripted(operation, kind)
    buffer = aligned(2 * PAGE)
    slot = store.allocate(2 * PAGE)
    calls: dict[Operation, Callable[[], object]] = {
        Operation.ALLOCATE: lambda: store.allocate(PAGE),
        Operation.WRITE: lambda: store.write(slot, buffer),
        Operation.READ: lambda: store.read(slot, buffer),
    }
    if operation is not Operation.ALLOCATE:
        calls[operation]()
    with pytest.raises(error, match=f"injected.*({kind.value}|short)"):
        calls[operation]()
    calls[operation]()
    assert store.hits[kind] == 1
    assert sum(store.hits.values()) == 1


def test_torn_write_and_bit_flip_are_silent(aligned: Aligned) -> None:
    for operation, kind in [
        (Operation.WRITE, FaultKind.TORN),
        (Operation.WRITE, FaultKind.BIT_FLIP),
        (Operation.READ, FaultKind.BIT_FLIP),
    ]:
        store = scripted(operation, kind, at=0)
        sent = aligned(4 * PAGE, seed=1)
        before = sent.clone()
        back, slot = aligned(4 * PAGE), store.allocate(4 * PAGE)
        store.write(slot, sent)
        store.read(slot, back)
        assert torch.equal(sent, before), "the caller's bytes were touched"
        wrong = (back != sent).nonzero()
        if kind is FaultKind.TORN:
            assert torch.equal(back[: 2 * PAGE], sent[: 2 * PAGE])
            assert not torch.equal(back, sent)
        else:
            assert wrong.numel() == 1
            flipped = int(back[wrong[0]]) ^ int(sent[wrong[0]])
            assert flipped.bit_count() == 1


def test_stall(aligned: Aligned) -> None:
    slept: list[float] = []
    fault = Fault(operation=Operation.READ, kind=FaultKind.STALL, at=1, seconds=0.25)
    store = FaultyStorage(MemoryStorage(), [fault], sleep=slept.append)
    slot, buffer = store.allocate(PAGE), aligned(PAGE)
    store.read(slot, buffer)
    assert slept == []
    store.read(slot, buffer)
    assert slept == [0.25]
