"""The pinned pool and the offloader below any cache."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.counters import Counters, Trace
from ssdtrain.transfer.device import CpuDevice, CpuEvent
from ssdtrain.transfer.offloader import Drain, Meters, Offloader
from ssdtrain.transfer.pinned import GRAIN_BYTES, Buffer, PinnedPool, buffer_bytes
from ssdtrain.transfer.transfers import TransferState
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.memory_storage import MemoryStorage

KIB = 1024


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300 * KIB)), max_size=60))
def test_pool_never_exceeds_its_cap(requests: list[tuple[bool, int]]) -> None:
    cap = 1024 * KIB
    pool = PinnedPool(CpuDevice(), cap)
    taken = []
    for give_first, num_bytes in requests:
        if give_first and taken:
            pool.give(taken.pop(0))
        buffer = pool.take(num_bytes)
        assert pool.total_bytes <= cap
        if buffer is None:
            assert pool.used_bytes + buffer_bytes(num_bytes) > cap
        else:
            assert buffer.capacity_bytes >= num_bytes
            assert buffer.memory.data_ptr() % GRAIN_BYTES == 0
            taken.append(buffer)
        assert pool.used_bytes == sum(b.capacity_bytes for b in taken)
        assert len({b.memory.data_ptr() for b in taken}) == len(taken)


@given(st.integers(1, 1 << 34))
def test_buffer_sizes_waste_little(num_bytes: int) -> None:
    size = buffer_bytes(num_bytes)
    assert size >= num_bytes
    assert size % GRAIN_BYTES == 0
    assert size - num_bytes < max(GRAIN_BYTES, 0.0625 * num_bytes + 1)


def test_second_step_allocates_nothing() -> None:
    pool = PinnedPool(CpuDevice(), 1 << 30)
    sizes = [10_000, 70_000, 70_000, 1_000_000]
    for _ in range(3):
        taken = [pool.take(size) for size in sizes]
        total = pool.total_bytes
        for buffer in taken:
            assert buffer is not None
            pool.give(buffer)
    assert pool.total_bytes == total == sum(map(buffer_bytes, sizes))


def test_buffer_is_settled_before_the_host_writes_into_it() -> None:
    pool = PinnedPool(CpuDevice(), 1 << 20)
    buffer = pool.take(100)
    assert buffer is not None
    event = CpuEvent()
    buffer.busy.append(event)
    pool.give(buffer)
    again = pool.take(100)
    assert again is buffer
    assert again.busy == [event], "a copy may still be running"


def open_offloader(drain: Drain, cap_bytes: int) -> Offloader:
    device = CpuDevice()
    pool = PinnedPool(device, cap_bytes, cap_bytes // 4)
    meters = Meters(counters=Counters(), trace=Trace(True))
    return Offloader(device, pool, MemoryStorage(), drain, 2, meters)


@pytest.mark.parametrize("drain", list(Drain))
def test_bytes_come_back(drain: Drain) -> None:
    offloader = open_offloader(drain, 256 * KIB)
    torch.manual_seed(0)
    sources = [
        torch.randint(0, 256, (20_000 + n,), dtype=torch.uint8) for n in range(8)
    ]
    transfers = [
        offloader.store(s, f"record {n}", lambda: True) for n, s in enumerate(sources)
    ]
    offloader.wait_io()
    for source, transfer in zip(reversed(sources), reversed(transfers), strict=True):
        assert transfer is not None
        target = torch.zeros_like(source)
        offloader.load(transfer, target).wait(offloader.device)
        assert same_bits(target, source)
        offloader.discard(transfer)
    assert offloader.pool.used_bytes == 0
    offloader.close()


def test_a_write_that_ends_while_the_pool_is_asked_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool was full when it was asked, and the write that filled it has ended
    before anybody looked whether one is under way."""
    offloader = open_offloader(Drain.WHEN_FULL, 256 * KIB)
    take, answers = offloader.pool.take, iter([False])

    def late(num_bytes: int, **settings: bool) -> Buffer | None:
        return take(num_bytes, **settings) if next(answers, True) else None

    monkeypatch.setattr(offloader.pool, "take", late)
    source = torch.arange(20 * KIB, dtype=torch.uint8)
    transfer = offloader.store(source, "record", lambda: True)
    assert transfer is not None
    target = torch.zeros_like(source)
    offloader.load(transfer, target).wait(offloader.device)
    assert same_bits(target, source)
    offloader.discard(transfer)
    offloader.close()


def test_tiered_drains_the_oldest_first() -> None:
    offloader = open_offloader(Drain.WHEN_FULL, 256 * KIB)
    transfers = []
    for n in range(12):
        source = torch.full((20 * KIB,), n, dtype=torch.uint8)
        transfers.append(offloader.store(source, f"record {n}", lambda: True))
    offloader.wait_io()
    states = [transfer.state for transfer in transfers if transfer is not None]
    assert len(states) == 12
    stored = states.count(TransferState.STORED)
    assert 0 < stored < 12
    # Backward wants the youngest first: those stay in host memory.
    assert states[:stored] == [TransferState.STORED] * stored
    offloader.close()


def test_recall_reads_ahead_and_gives_way() -> None:
    offloader = open_offloader(Drain.AT_ONCE, 256 * KIB)
    sources = [torch.full((60 * KIB,), n, dtype=torch.uint8) for n in range(4)]
    transfers = [offloader.store(s, "record", lambda: True) for s in sources]
    offloader.wait_io()
    recalled = [
        offloader.recall(transfer) for transfer in transfers if transfer is not None
    ]
    assert recalled[:3] == [True] * 3
    # A load that must happen takes a recalled buffer if nothing else is free.
    for source, transfer in zip(sources, transfers, strict=True):
        assert transfer is not None
        target = torch.zeros_like(source)
        offloader.load(transfer, target).wait(offloader.device)
        assert same_bits(target, source)
    offloader.close()


def test_trace_has_writes_and_reads(tmp_path: Path) -> None:
    offloader = open_offloader(Drain.AT_ONCE, 256 * KIB)
    transfer = offloader.store(torch.ones(5000, dtype=torch.uint8), "x", lambda: True)
    offloader.wait_io()
    assert transfer is not None
    offloader.load(transfer, torch.zeros(5000, dtype=torch.uint8)).wait(
        offloader.device
    )
    rows = {span.row for span in offloader._meters.trace.spans()}
    assert {"write", "read"} <= rows
    offloader.close()
