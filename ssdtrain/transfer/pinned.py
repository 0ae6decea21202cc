"""The staging pool: page-aligned, pinned host buffers under a hard cap."""

import contextlib
import ctypes
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ssdtrain.forks import Owner
from ssdtrain.storage.slots import round_up
from ssdtrain.transfer.device import Device, Event

GRAIN_BYTES = 4096  # O_DIRECT: lengths and addresses in whole blocks
COARSE_BYTES = 1024 * 1024
HUGE_BYTES = 2 * 1024 * 1024
# A free buffer serves a request only if at most this share of it stays unused.
MAX_WASTE = 0.125
# Where batches change their length every step asks for other sizes, and pinning costs
# more than the copies. So once there is so many times what was ever asked for at once,
# a request takes a free buffer of up to so many times its size. What was prepared, for
# the largest batches, is enough for all that ask for no more.
ENOUGH = 1.5
LOOSE = 4
PIN_SHARE = 0.25
"""Part of the time in which the thread that prepares buffers pins: nobody launches a
kernel meanwhile, because the driver holds its lock."""


@dataclass(eq=False)
class Buffer:
    """One piece of pinned memory, owned by whoever took it."""

    memory: torch.Tensor
    """uint8, 1-D, the whole capacity."""
    busy: list[Event] = field(default_factory=list)
    """Copies that must finish before the bytes may be overwritten."""
    pooled: bool = True
    """False: made for one load because the pool was exhausted."""
    life: "_Life | None" = None
    """Tells the pool when nobody holds it any more."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.memory.numel()

    def settle(self) -> None:
        """Block until nothing uses the bytes (before the host writes into them)."""
        for event in self.busy:
            event.synchronize()
        self.busy.clear()


class _Life(weakref.ref[Buffer]):
    """What remains of a buffer that died without being handed back."""

    __slots__ = ("asked_bytes", "memory")
    asked_bytes: int
    """Of the request that it serves; 0: none."""
    memory: torch.Tensor


def buffer_bytes(num_bytes: int) -> int:
    """The buffer size for a request: waste under 6 %, and few distinct sizes."""
    grain = GRAIN_BYTES if num_bytes < 16 * COARSE_BYTES else COARSE_BYTES
    return max(grain, round_up(num_bytes, grain))


class PinnedPool:
    """Buffers are made on demand up to `cap_bytes` and then only reused.

    After the first step every size the step needs exists, so later steps allocate
    nothing (Wu 5.3.1: the pool is sized by profiling the first step). Part of the
    cap (`reserve_bytes`) is for loads alone, so that full staging cannot block them.

    An interrupt may end whoever took a buffer before he could note it. So a buffer that
    nobody holds comes back by itself, through a queue as in [Note: destructors], and
    the sums are counted anew before a request is refused.

    [Note: the end of a lock]
    Pages are unlocked when the last tensor on them dies, and not by the pool: a session
    that was dropped without `close` would give back pages that CUDA takes for locked.
    Whoever is given the same addresses next, a `DataLoader` that pins its batches, gets
    "resource already mapped".
    """

    def __init__(
        self,
        device: Device,
        cap_bytes: int,
        reserve_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        rest: Callable[[float], object] | None = None,
    ) -> None:
        """clock, rest: how the thread that prepares buffers paces itself; by default it
        rests until the pool is closed."""
        self.cap_bytes = cap_bytes
        self.reserve_bytes = reserve_bytes
        self.pin_failures = 0
        self._device = device
        self._free: list[tuple[int, int, Buffer]] = []  # (capacity, serial, buffer)
        self._serial = 0
        self._total_bytes = 0
        self._used_bytes = 0
        self._asked_bytes = self._most_asked_bytes = 0
        self._lives: dict[int, _Life] = {}
        self._lost: deque[_Life] = deque()
        # Taken by itself: a condition is left through a function of Python, before
        # whose first line an interrupt would keep the lock for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._making_bytes = 0
        """Of buffers that a thread is making: in `_total_bytes` already."""
        self._prepared_bytes = 0
        """What was wanted at one time when buffers were prepared last."""
        self._maker: threading.Thread | None = None
        self._num_prepared = 0
        """How often `prepare` was asked; a thread that serves an earlier one ends."""
        self._closing = threading.Event()
        self._clock, self._rest = clock, rest or self._closing.wait

    @property
    def used_bytes(self) -> int:
        """Bytes of buffers that are taken."""
        with self._lock:
            self._count()
            return self._used_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers, free ones too; never above the cap."""
        return self._total_bytes

    def take(self, num_bytes: int, for_load: bool = False) -> Buffer | None:
        """A buffer of at least `num_bytes`, or None when the cap is reached.

        The caller orders its copy after `buffer.busy`.
        """
        size = buffer_bytes(num_bytes)
        limit = self.cap_bytes if for_load else self.cap_bytes - self.reserve_bytes
        with self._lock:
            if self._lost or self._used_bytes + size > limit:
                self._count()
                if self._used_bytes + size > limit:
                    return None
            self._most_asked_bytes = max(
                self._most_asked_bytes, self._asked_bytes + size
            )
            buffer = self._reuse(size, limit) or self._make(size)
            if buffer is not None:
                self._used_bytes += buffer.capacity_bytes
                self._asked(buffer, size)
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Hand a buffer back; copies in `buffer.busy` may still be running."""
        with self._lock:
            buffer.busy[:] = [event for event in buffer.busy if not event.query()]
            self._used_bytes -= buffer.capacity_bytes
            self._asked(buffer, 0)
            self._shelve(buffer)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until a buffer comes back, or until the time is over."""
        with self._lock:
            self._changed.wait(timeout_s)

    def prepare(self, sizes: Iterable[int], soon: Iterable[int] = ()) -> None:
        """Make buffers for these tensors, as far as there are none, on a thread that
        pins for `PIN_SHARE` of its time: pinning takes a second for ten GB, in which
        training would stand still. `is_prepared` when it is over.

        Args:
            sizes: bytes of tensors that will be here at one time.
            soon: bytes of taken buffers that will be free by then.
        """
        wanted, there = sorted(map(buffer_bytes, sizes)), list(soon)
        self._num_prepared += 1  # what was wanted before is not any more
        self._prepared_bytes = sum(wanted)
        if wanted:
            self._maker = threading.Thread(
                target=self._make_all,
                args=(wanted, there, self._maker, self._num_prepared),
                name="ssdtrain-pin",
                daemon=True,
            )
            self._maker.start()

    @property
    def is_prepared(self) -> bool:
        """Whether no thread makes buffers."""
        return self._maker is None or not self._maker.is_alive()

    def _missing(self, wanted: list[int], there: list[int]) -> list[int]:
        """Sizes for which no buffer is free, of these that are wanted."""
        with self._lock:
            free = sorted([*(capacity for capacity, *_ in self._free), *there])
        missing = []
        for size in wanted:
            at = bisect_left(free, size)
            if at < len(free) and free[at] - size <= MAX_WASTE * free[at]:
                del free[at]
            else:
                missing.append(size)
        return missing

    def _make_all(
        self,
        wanted: list[int],
        there: list[int],
        before: threading.Thread | None,
        number: int,
    ) -> None:
        if before is not None:
            before.join()
        for size in self._missing(wanted, there):
            with self._lock:
                over = self._closing.is_set() or number != self._num_prepared
                if over or self._total_bytes + size > self.cap_bytes:
                    return
                self._total_bytes += size
                self._making_bytes += size
            start = self._clock()
            memory = self._pinned(size)
            spent_s = self._clock() - start
            with self._lock:
                self._making_bytes -= size
                if memory is None:
                    self._total_bytes -= size
                    self.pin_failures += 1
                    return
                self._shelve(self._alive(Buffer(memory)))
                self._changed.notify_all()
            self._rest(spent_s * (1 / PIN_SHARE - 1))

    def _pinned(self, size: int) -> torch.Tensor | None:
        try:
            return self._locked(size)
        except OSError:  # there is no more
            return None

    def _locked(self, size: int) -> torch.Tensor | None:
        """Pinned memory; None where the device refuses."""
        device, owner, locked = self._device, Owner(), list[int]()

        def unlock() -> None:
            if locked and not owner.is_elsewhere:  # a forked child holds no lock
                device.unpin(*locked)

        memory = page_aligned(size, unlock)
        if not device.pin(memory):
            return None
        locked.append(memory.data_ptr())
        return memory

    def close(self) -> None:
        """Give all free memory back (every buffer should be free by now)."""
        self._closing.set()
        if self._maker is not None:
            self._maker.join()
        with self._lock:
            while self._free:
                self._drop(self._free.pop()[2])

    def _count(self) -> None:
        """Take lost buffers back, and count what there is."""
        if self._lost:
            self._device.quiesce()  # whatever was done with them
        while self._lost:
            life = self._lost.popleft()
            if self._lives.pop(id(life), None) is not None:
                self._shelve(self._alive(Buffer(life.memory)))
        made_bytes = sum(life.memory.numel() for life in self._lives.values())
        self._total_bytes = made_bytes + self._making_bytes
        self._used_bytes = made_bytes - sum(free[0] for free in self._free)
        self._asked_bytes = sum(life.asked_bytes for life in self._lives.values())

    def _shelve(self, buffer: Buffer) -> None:
        self._serial += 1
        insort(self._free, (buffer.capacity_bytes, self._serial, buffer))

    def _alive(self, buffer: Buffer) -> Buffer:
        life = _Life(buffer, self._lost.append)
        life.memory, life.asked_bytes, buffer.life = buffer.memory, 0, life
        self._lives[id(life)] = life
        return buffer

    def _bury(self, buffer: Buffer) -> None:
        self._lives.pop(id(buffer.life), None)
        buffer.life = None

    def _reuse(self, size: int, limit: int) -> Buffer | None:
        at = bisect_left(self._free, (size, -1))
        if at == len(self._free):
            return None
        capacity, _, buffer = self._free[at]
        wastes = capacity - size > MAX_WASTE * capacity
        if wastes and not self._may_waste(size, capacity, limit):
            return None
        del self._free[at]
        return buffer

    def _may_waste(self, size: int, capacity: int, limit: int) -> bool:
        """Whether there is memory enough for what is asked for, so that much of a
        buffer may stay unused. Half of the limit stays for what is asked for next."""
        is_prepared = self._asked_bytes + size <= self._prepared_bytes
        is_enough = self._total_bytes + size > ENOUGH * self._most_asked_bytes
        if not (is_prepared or is_enough):
            return False
        most_bytes, times = limit // 2, LOOSE
        if is_prepared:  # what is as large as this one may be taken by smaller ones
            most_bytes, times = limit, LOOSE * LOOSE
        return capacity <= times * size and self._used_bytes + capacity <= most_bytes

    def _asked(self, buffer: Buffer, size: int) -> None:
        """Note what a buffer is for."""
        life = buffer.life
        if life is not None:
            self._asked_bytes += size - life.asked_bytes
            life.asked_bytes = size

    def _make(self, size: int) -> Buffer | None:
        # Free buffers of other sizes give way before the cap refuses a request.
        while self._total_bytes + size > self.cap_bytes and self._free:
            self._drop(self._free.pop()[2])
        if self._total_bytes + size > self.cap_bytes:
            return None
        memory = self._locked(size)
        if memory is None:
            self.pin_failures += 1
            return None
        self._total_bytes += size
        return self._alive(Buffer(memory))

    def _drop(self, buffer: Buffer) -> None:
        buffer.settle()
        self._bury(buffer)
        self._total_bytes -= buffer.capacity_bytes


def page_aligned(
    num_bytes: int, ended: Callable[[], object] | None = None
) -> torch.Tensor:
    """Uninitialised host bytes of their own pages (1-D uint8, a multiple of 4 KiB).

    Their own mapping: torch's CPU memory is aligned to 64 bytes only, and its pinned
    allocator rounds up to powers of two and never gives back. Large ones ask for pages
    of 2 MiB: pinning takes time by the page.

    Args:
        num_bytes: of the tensor.
        ended: called when the last tensor on them is gone, before they are; not at the
            interpreter's end.
    """
    import mmap

    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_BYTES:
        # Refused by kernels that are built without them: then pinning is slower.
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    view = (ctypes.c_uint8 * num_bytes).from_buffer(region)
    if ended is not None:
        weakref.finalize(view, ended).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)
