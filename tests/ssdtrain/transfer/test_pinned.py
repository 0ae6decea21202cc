"""Pinned memory that is made before it is needed."""

import errno
import gc
import os
import random
import threading

import pytest
import torch
from torch import Tensor

from ssdtrain.transfer import pinned
from ssdtrain.transfer.device import CpuDevice
from ssdtrain.transfer.pinned import COARSE_BYTES, GRAIN_BYTES, PIN_SHARE, PinnedPool
from tests.ranks import LONGEST_S
from tests.ssdtrain.eventually import until


class Device(CpuDevice):
    """Tells by which threads memory was pinned; refuses from some number on."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.threads: list[str] = []
        self.num_unpinned = 0
        self._most = most

    def pin(self, buffer: Tensor) -> bool:
        self.threads.append(threading.current_thread().name)
        return len(self.threads) <= self._most

    def unpin(self, address: int) -> None:
        self.num_unpinned += 1


def prepared(pool: PinnedPool, sizes: list[int], soon: list[int] | None = None) -> None:
    pool.prepare(sizes, soon or [])
    until(lambda: pool.is_prepared)


def test_what_is_prepared_is_taken_without_pinning() -> None:
    device = Device()
    pool = PinnedPool(device, 64 * COARSE_BYTES)
    sizes = [GRAIN_BYTES, 3 * COARSE_BYTES, 3 * COARSE_BYTES]
    prepared(pool, sizes)
    assert device.threads == ["ssdtrain-pin"] * 3
    taken = [pool.take(size) for size in sizes]
    assert all(taken) and len(device.threads) == 3
    assert pool.used_bytes == pool.total_bytes == sum(sizes)


def test_only_what_is_missing_is_made() -> None:
    """Beside what is free, and what the plan before will give back."""
    device = Device()
    pool = PinnedPool(device, 64 * COARSE_BYTES)
    free, used = pool.take(4 * COARSE_BYTES), pool.take(2 * COARSE_BYTES)
    assert free is not None and used is not None
    pool.give(free)
    sizes = [4 * COARSE_BYTES, 2 * COARSE_BYTES, 5 * COARSE_BYTES]
    prepared(pool, sizes, [used.capacity_bytes])
    assert device.threads.count("ssdtrain-pin") == 1
    prepared(pool, sizes, [used.capacity_bytes])
    assert device.threads.count("ssdtrain-pin") == 1


def test_what_is_prepared_leaves_training_its_time() -> None:
    """No kernel is launched while memory is pinned: the thread rests behind each
    buffer, three times as long as it took."""
    device, now, rests = Device(), [0.0], list[float]()

    def pin(buffer: Tensor) -> bool:
        now[0] += buffer.numel() / COARSE_BYTES
        return True

    device.pin = pin  # type: ignore[method-assign]
    pool = PinnedPool(
        device, 64 * COARSE_BYTES, clock=lambda: now[0], rest=rests.append
    )
    prepared(pool, [8 * COARSE_BYTES, 2 * COARSE_BYTES])
    assert rests == [6.0, 24.0]
    assert now[0] / (now[0] + sum(rests)) == PIN_SHARE


def test_what_another_plan_needed_is_not_made_any_more() -> None:
    """A better plan is found while memory for the first one is made."""
    device, rests, goes_on = Device(), threading.Event(), threading.Event()

    def rest(seconds: float) -> None:
        rests.set()
        assert goes_on.wait(LONGEST_S)

    pool = PinnedPool(device, 64 * COARSE_BYTES, rest=rest)
    pool.prepare([3 * COARSE_BYTES] * 9)
    assert rests.wait(LONGEST_S)
    pool.prepare([3 * COARSE_BYTES, 5 * COARSE_BYTES])
    goes_on.set()
    prepared(pool, [3 * COARSE_BYTES, 5 * COARSE_BYTES])
    assert pool.total_bytes == 8 * COARSE_BYTES


def test_a_pool_that_is_closed_rests_no_longer() -> None:
    device, now = Device(), [0.0]

    def pin(buffer: Tensor) -> bool:
        now[0] += 1e6
        return True

    device.pin = pin  # type: ignore[method-assign]
    pool = PinnedPool(device, 64 * COARSE_BYTES, clock=lambda: now[0])
    pool.prepare([COARSE_BYTES] * 8)
    pool.close()
    assert pool.total_bytes == 0


def test_it_stays_within_the_cap() -> None:
    device = Device()
    pool = PinnedPool(device, 8 * COARSE_BYTES)
    prepared(pool, [3 * COARSE_BYTES] * 5)
    assert pool.total_bytes == 6 * COARSE_BYTES


def test_the_system_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PinnedPool(Device(most=1), 8 * COARSE_BYTES)
    prepared(pool, [COARSE_BYTES] * 3)
    assert pool.total_bytes == COARSE_BYTES and pool.pin_failures == 1

    def full(num_bytes: int, ended: object) -> Tensor:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pinned, "page_aligned", full)
    prepared(pool, [COARSE_BYTES] * 3)
    assert pool.total_bytes == COARSE_BYTES and pool.pin_failures == 2


@pytest.mark.parametrize("times", [1, 3])
def test_a_pool_that_is_closed_keeps_nothing(times: int) -> None:
    device = Device()
    pool = PinnedPool(device, 64 * COARSE_BYTES)
    for _ in range(times):
        pool.prepare([COARSE_BYTES] * 8)
    pool.close()
    assert pool.is_prepared and pool.total_bytes == 0
    assert device.num_unpinned == len(device.threads)


def test_pages_of_a_pool_that_nobody_closed_are_unlocked() -> None:
    """Others are given their addresses next, and may lock them."""
    device = Device()
    pool = PinnedPool(device, 64 * COARSE_BYTES)
    taken, free = pool.take(COARSE_BYTES), pool.take(COARSE_BYTES)
    assert taken is not None and free is not None
    pool.give(free)
    part = taken.memory[:GRAIN_BYTES].view(torch.int16)
    del pool, free, taken
    gc.collect()
    assert device.num_unpinned == 1  # a tensor is on the other one's
    del part
    assert device.num_unpinned == 2


def test_a_forked_child_unlocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    pool = PinnedPool(device, 64 * COARSE_BYTES)
    taken = pool.take(COARSE_BYTES)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del pool, taken
    gc.collect()
    assert device.num_unpinned == 0


def test_lengths_that_change_pin_little_after_the_first_steps() -> None:
    """Each step asks for what its length takes, all at once; the longest comes again
    and again. What is made stays within what the longest one needs, twice."""
    device, draw = Device(most=10**6), random.Random(0)
    pool = PinnedPool(device, 2000 * COARSE_BYTES)
    widths = [2, 2, 2, 6, 6, 16, 4, 1]
    pins = []
    for _ in range(60):
        tokens = draw.randint(256, 1024)
        taken = [pool.take(width * tokens * 1000) for width in widths * 3]
        assert all(taken)
        for buffer in taken:
            pool.give(buffer)  # type: ignore[arg-type]
        pins.append(len(device.threads))
    longest_bytes = 3 * sum(widths) * 1024 * 1000
    # Without larger buffers: 240, and 6.6 times the longest step's bytes.
    assert pins[1] < 40 and pins[-1] < 60
    assert pool.total_bytes < 3 * longest_bytes and device.num_unpinned == 0
    assert pool.used_bytes == 0


def test_a_larger_buffer_serves_only_where_there_is_enough() -> None:
    device = Device()
    pool = PinnedPool(device, 64 * COARSE_BYTES)
    large = pool.take(4 * COARSE_BYTES)
    assert large is not None
    pool.give(large)
    small = pool.take(2 * COARSE_BYTES)  # of 4 that were asked for there are 4
    assert small is not None and small.capacity_bytes == 2 * COARSE_BYTES
    other = pool.take(COARSE_BYTES)  # and now 6: 1 more than enough
    assert other is large and len(device.threads) == 2
    pool.give(other)
    tiny = pool.take(COARSE_BYTES // 2)
    assert tiny is not large  # eight times as large
    assert pool.used_bytes == (2 * COARSE_BYTES) + COARSE_BYTES // 2


def test_what_was_prepared_for_the_largest_batch_serves_all_smaller_ones() -> None:
    device, draw = Device(), random.Random(0)
    pool = PinnedPool(device, 128 * COARSE_BYTES)
    widths = [1, 1, 2, 2, 4, 4, 8]
    prepared(pool, [4 * COARSE_BYTES * width for width in widths])
    for length in (1, 2, 3, 4, 1, 4):
        draw.shuffle(widths)
        taken = [pool.take(length * COARSE_BYTES * width) for width in widths]
        for buffer in taken:
            assert buffer is not None
            pool.give(buffer)
    assert len(device.threads) == len(widths)
    # What is asked for beyond that is made.
    more = [pool.take(COARSE_BYTES * 15) for _ in range(7)]
    assert all(more) and len(device.threads) > len(widths)
