"""The stripe: shares follow speed, failures move records, nothing is lost."""

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain import rates
from ssdtrain.counters import Fallback
from ssdtrain.errors import StorageFullError
from ssdtrain.storage import Storage, open_storage
from ssdtrain.storage.stripe import StripeStorage
from tests.ssdtrain.faulty import Fault, FaultKind, FaultyStorage, Operation
from tests.ssdtrain.memory_storage import MemoryStorage
from tests.ssdtrain.virtual_time import VirtualTime

PAGE = 4096
MIB = 1024 * 1024
Aligned = Callable[..., torch.Tensor]
WRITE_DIES = Fault(operation=Operation.WRITE, kind=FaultKind.IO_ERROR, at=3, count=9999)


def memory(capacity_bytes: int | None = None) -> MemoryStorage:
    return MemoryStorage(extent_bytes=MIB, capacity_bytes=capacity_bytes)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(0.2, 5.0), min_size=2, max_size=4),
    st.lists(st.integers(1, 16), min_size=60, max_size=120),
)
def test_shares_follow_the_speeds(speeds: list[float], pages: list[int]) -> None:
    stripe = StripeStorage([memory() for _ in speeds])
    for member, speed in zip(stripe.members, speeds, strict=True):
        member.writes.gb_per_s = member.reads.gb_per_s = speed
    for size in pages:
        stripe.allocate(size * PAGE)
    both = zip(stripe.members, speeds, strict=True)
    done_at = [member.used_bytes / speed for member, speed in both]
    # All would be done together, to within one record of the slowest.
    assert max(done_at) - min(done_at) <= 16 * PAGE / min(speeds)
    stripe.close()


def test_speeds_are_learned_from_transfers(
    aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member is 4 times slower, nobody says so: the shares find out."""
    monkeypatch.setattr(rates, "WINDOW_BYTES", 2 * MIB)
    time = VirtualTime()
    members = [
        time.throttled(memory(), write_gb_per_s=rate, read_gb_per_s=100.0)
        for rate in (0.4, 0.1)
    ]
    monkeypatch.setattr(rates, "time", time)
    stripe = StripeStorage(members)
    buffer = aligned(256 * 1024)

    def step() -> list[int]:
        slots = [stripe.allocate(buffer.numel()) for _ in range(40)]
        for slot in slots:
            stripe.write(slot, buffer)
        for slot in slots:
            stripe.read(slot, buffer)
            stripe.free(slot)
        return [slot.file for slot in slots]

    for _ in range(5):
        shares = step()
    fast, slow = shares.count(0), shares.count(1)
    assert fast > 2 * slow > 0
    assert stripe.stats().used_bytes == 0


def test_a_member_that_fails_leaves_without_loss(aligned: Aligned) -> None:
    told: list[Fallback] = []
    bad = FaultyStorage(memory(), [WRITE_DIES])
    stripe = StripeStorage([memory(), bad, memory()], on_fallback=told.append)
    slots = [stripe.allocate(PAGE) for _ in range(30)]
    sent = [aligned(PAGE, seed=i) for i in range(30)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(stripe.write, slots, sent))
    assert told == [Fallback.STRIPE_MEMBER_LOST]
    for slot, expected in zip(slots, sent, strict=True):
        back = aligned(PAGE)
        stripe.read(slot, back)
        assert torch.equal(back, expected)
    # Nothing new goes there, and the reason is told.
    assert {stripe.allocate(PAGE).file for _ in range(6)} == {0, 2}
    lost = [member.why_lost for member in stripe.members]
    assert lost[0] == lost[2] == "" and "I/O error" in lost[1]
    stripe.close()


def test_every_place_is_given_back(aligned: Aligned) -> None:
    bad = FaultyStorage(memory(), [WRITE_DIES])
    members = [memory(), bad]
    stripe = StripeStorage(members)
    held = []
    for _ in range(4):
        slots = [stripe.allocate(3 * PAGE) for _ in range(20)]
        for slot in slots:
            stripe.write(slot, aligned(3 * PAGE))
        for slot in slots:
            stripe.free(slot)
        assert stripe.stats().used_bytes == 0
        assert [member.used_bytes for member in stripe.members] == [0, 0]
        held.append(stripe.stats().allocated_bytes)
    assert held[1] == held[2] == held[3]


def test_a_full_member_stays_in(aligned: Aligned) -> None:
    """Full at allocation or at the write (a sparse file): the others take it."""
    full = Fault(operation=Operation.WRITE, kind=FaultKind.NO_SPACE, at=0)
    stripe = StripeStorage([FaultyStorage(memory(2 * PAGE), [full]), memory()])
    slots = [stripe.allocate(PAGE) for _ in range(8)]
    assert [s.file for s in slots].count(0) == 2
    sent = [aligned(PAGE, seed=i) for i in range(8)]
    for slot, buffer in zip(slots, sent, strict=True):
        stripe.write(slot, buffer)
    for slot, buffer in zip(slots, sent, strict=True):
        back = aligned(PAGE)
        stripe.read(slot, back)
        assert torch.equal(back, buffer)
        stripe.free(slot)
    assert [member.why_lost for member in stripe.members] == ["", ""]
    assert stripe.allocate(PAGE).file == 0


def test_when_all_fail_the_caller_keeps_its_bytes(aligned: Aligned) -> None:
    dead = Fault(operation=Operation.WRITE, kind=FaultKind.IO_ERROR, at=0, count=99)
    stripe = StripeStorage([FaultyStorage(memory(), [dead]) for _ in range(2)])
    slot, buffer = stripe.allocate(PAGE), aligned(PAGE, seed=1)
    before = buffer.clone()
    with pytest.raises(OSError, match="injected I/O error") as raised:
        stripe.write(slot, buffer)
    assert not isinstance(raised.value, StorageFullError)
    assert torch.equal(buffer, before)
    stripe.free(slot)
    with pytest.raises(StorageFullError, match="no member has room"):
        stripe.allocate(PAGE)


def test_no_room_anywhere() -> None:
    stripe = StripeStorage([memory(PAGE), memory(PAGE)])
    slots = [stripe.allocate(PAGE), stripe.allocate(PAGE)]
    with pytest.raises(StorageFullError):
        stripe.allocate(PAGE)
    stripe.free(slots[0])
    assert stripe.allocate(PAGE) == slots[0]


def test_a_failed_read_is_not_hidden(aligned: Aligned) -> None:
    broken = Fault(operation=Operation.READ, kind=FaultKind.IO_ERROR, at=0)
    stripe = StripeStorage([FaultyStorage(memory(), [broken]), memory()])
    slot = stripe.allocate(PAGE)
    stripe.write(slot, aligned(PAGE))
    with pytest.raises(OSError, match="injected I/O error at read"):
        stripe.read(slot, aligned(PAGE))


def test_impossible_members() -> None:
    with pytest.raises(ValueError, match="no member"):
        StripeStorage([])


def test_a_second_file_system(tmp_path: Path, aligned: Aligned) -> None:
    """A stripe over this disk and another mount: accepted, the odd one is named."""
    other = Path("/dev/shm")
    if not os.access(other, os.W_OK) or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second writable file system")
    place = other / f"ssdtrain-test-{os.getpid()}"
    first = tmp_path / "first"
    for path in (place, first):
        path.mkdir(mode=0o700)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            store: Storage = open_storage([first, place])
        assert any("is on tmpfs" in str(w.message) for w in told)
        assert isinstance(store, StripeStorage)
        slots = [store.allocate(MIB) for _ in range(6)]
        assert {s.file for s in slots} == {0, 1}
        for seed, slot in enumerate(slots):
            store.write(slot, aligned(MIB, seed=seed))
        for seed, slot in enumerate(slots):
            back = aligned(MIB)
            store.read(slot, back)
            assert torch.equal(back, aligned(MIB, seed=seed))
        store.close()
    finally:
        place.rmdir()
