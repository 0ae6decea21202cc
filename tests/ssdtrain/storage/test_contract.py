"""What every storage promises, on every kind of storage."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtrain.errors import ForkedError, StorageFullError
from ssdtrain.storage import Storage
from tests.ranks import SOON_S
from tests.ssdtrain.forking import OK, WRONG, held_by_a_thread, in_child

MIB = 1024 * 1024
PAGE = 4096
Aligned = Callable[..., torch.Tensor]


@pytest.mark.parametrize("num_bytes", [PAGE, 5 * PAGE, 3 * MIB + PAGE, 9 * MIB])
def test_bytes_come_back(storage: Storage, aligned: Aligned, num_bytes: int) -> None:
    sent = aligned(num_bytes, seed=num_bytes)
    slot = storage.allocate(num_bytes)
    storage.write(slot, sent)
    back = aligned(num_bytes)
    storage.read(slot, back)
    assert torch.equal(back, sent)
    assert storage.stats().used_bytes == num_bytes


def test_slots_do_not_overlap(storage: Storage, aligned: Aligned) -> None:
    sizes = [1, PAGE, PAGE + 1, 100_000, 2 * MIB, 7]
    slots = [storage.allocate(size) for size in sizes]
    sent = [aligned(slot.capacity_bytes, seed=i) for i, slot in enumerate(slots)]
    for slot, buffer in zip(slots, sent, strict=True):
        storage.write(slot, buffer)
    for slot, buffer, size in zip(slots, sent, sizes, strict=True):
        assert slot.offset % PAGE == slot.capacity_bytes % PAGE == 0
        assert size <= slot.capacity_bytes < size + PAGE
        back = aligned(slot.capacity_bytes)
        storage.read(slot, back)
        assert torch.equal(back, buffer)


def test_a_repeated_step_grows_nothing(storage: Storage) -> None:
    sizes = [PAGE * (1 + i % 17) for i in range(60)]
    held = []
    for _ in range(4):
        slots = [storage.allocate(size) for size in sizes]
        for slot in reversed(slots):
            storage.free(slot)
        held.append(storage.stats().allocated_bytes)
    assert len(set(held)) == 1
    assert storage.stats().used_bytes == 0


def test_many_threads_share_it(storage: Storage, aligned: Aligned) -> None:
    def worker(seed: int) -> bool:
        good = True
        for turn in range(6):
            size = PAGE * (1 + (seed * 7 + turn) % 40)
            sent, back = aligned(size, seed=seed * 100 + turn), aligned(size)
            slot = storage.allocate(size)
            storage.write(slot, sent)
            storage.read(slot, back)
            storage.free(slot)
            good &= torch.equal(sent, back)
        return good

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(worker, range(8)))
    assert storage.stats().used_bytes == 0


def test_bad_buffers_are_refused(storage: Storage, aligned: Aligned) -> None:
    slot = storage.allocate(2 * PAGE)
    room = aligned(4 * PAGE)
    for bad, why in [
        (room[1 : PAGE + 1], "multiples of 4096"),
        (room[: PAGE - 512], "multiples of 4096"),
        (room[: 3 * PAGE], "does not fit"),
        (room[:0], "does not fit"),
        (room.view(torch.int8)[:PAGE], "uint8"),
        (room[: 2 * PAGE].view(2, PAGE), "1-D"),
        (room[::2], "contiguous"),
        (torch.empty(PAGE, dtype=torch.uint8, device="meta"), "CPU"),
    ]:
        for call in (storage.write, storage.read):
            with pytest.raises(ValueError, match=why):
                call(slot, bad)
    with pytest.raises(ValueError, match="at least 1 byte"):
        storage.allocate(0)
    storage.read(slot, room[:PAGE])
    assert not room[:PAGE].any()


def test_a_slot_is_freed_once(storage: Storage) -> None:
    slot = storage.allocate(PAGE)
    storage.free(slot)
    with pytest.raises(ValueError, match="not taken"):
        storage.free(slot)
    again = storage.allocate(PAGE)
    with pytest.raises(ValueError, match="not taken"):
        storage.free(again._replace(capacity_bytes=2 * PAGE))
    storage.free(again)


def test_after_close(storage: Storage, aligned: Aligned) -> None:
    slot = storage.allocate(PAGE)
    storage.close()
    storage.close()
    storage.free(slot)  # a handle may outlive the session
    for call in (storage.write, storage.read):
        with pytest.raises(OSError, match="closed"):
            call(slot, aligned(PAGE))
    with pytest.raises(OSError, match="closed"):
        storage.allocate(PAGE)


def test_a_transfer_that_close_meets_reaches_no_other_file(
    storage: Storage, aligned: Aligned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that is closed too early is soon the number of another file."""
    real, begun, go_on = os.pwritev, threading.Event(), threading.Event()

    def held(*args: Any) -> int:
        begun.set()
        go_on.wait(SOON_S)
        return real(*args)

    def write() -> None:
        storage.write(slot, aligned(PAGE, seed=1))
        begun.set()  # without a descriptor: it has not been held

    slot = storage.allocate(PAGE)
    monkeypatch.setattr(os, "pwritev", held)
    writer = threading.Thread(target=write)
    writer.start()
    begun.wait(SOON_S)
    storage.close()
    with (tmp_path / "other").open("w+b") as other:
        go_on.set()
        writer.join()
        assert other.read() == b""


def test_the_cap_holds(opened: Callable[..., Storage]) -> None:
    store = opened(capacity_bytes=3 * MIB + PAGE)
    slots = [store.allocate(MIB) for _ in range(3)]
    slots.append(store.allocate(PAGE))
    with pytest.raises(StorageFullError, match="no room"):
        store.allocate(PAGE)
    store.free(slots[1])
    assert store.allocate(MIB - PAGE).capacity_bytes == MIB - PAGE
    assert store.stats().allocated_bytes <= 3 * MIB + PAGE


LOCK = type(threading.Lock())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_slots_stay_the_parents(storage: Storage, aligned: Aligned) -> None:
    """After a fork, while a thread of the parent holds the storage's locks."""
    sent, other, back = aligned(PAGE, seed=1), aligned(PAGE, seed=2), aligned(PAGE)
    slot = storage.allocate(PAGE)
    storage.write(slot, sent)

    def child() -> int:
        for call in (
            lambda: storage.allocate(PAGE),
            lambda: storage.write(slot, other),
            lambda: storage.read(slot, back),
            storage.stats,
        ):
            with contextlib.suppress(ForkedError):
                call()
                return WRONG
        storage.free(slot)
        storage.close()
        return OK

    locks = [each for each in vars(storage).values() if isinstance(each, LOCK)]
    assert locks, "put here whatever else a thread may hold"
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(held_by_a_thread(lock))
        assert in_child(child) == OK
    storage.read(slot, back)
    assert torch.equal(sent, back)
    assert storage.stats().used_bytes == PAGE
