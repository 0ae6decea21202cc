"""How fast a storage is: measured once at the start, then from its own transfers."""

import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch

from ssdtrain.storage.base import Slot, Storage

WINDOW_BYTES = 256 * 1024 * 1024
"""A new reading is taken from at least this many bytes."""
FLOOR = 0.05
"""No speed falls below this share of its first reading in one step: a member that
gets too little to be measured would never come back."""


class _Direction:
    """Rate of one direction while at least one transfer of it is under way."""

    def __init__(self, gb_per_s: float) -> None:
        self.gb_per_s = gb_per_s
        self._lock = threading.Lock()
        self._active = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0

    @contextmanager
    def transfer(self, num_bytes: int) -> Iterator[None]:
        with self._lock:
            if self._active == 0:
                self._since_s = time.monotonic()
            self._active += 1
        moved = 0
        try:
            yield
            moved = num_bytes
        finally:
            with self._lock:
                self._active -= 1
                self._bytes += moved
                now = time.monotonic()
                self._busy_s += now - self._since_s
                self._since_s = now
                self._take_reading()

    def _take_reading(self) -> None:
        if self._bytes < WINDOW_BYTES or self._busy_s <= 0:
            return
        reading = self._bytes / self._busy_s / 1e9
        self.gb_per_s = max((self.gb_per_s + reading) / 2, FLOOR * self.gb_per_s)
        self._bytes, self._busy_s = 0, 0.0


class Speedometer:
    """Both directions of one storage.

    Args:
        round_trip_gb_per_s: the first reading.
    """

    def __init__(self, round_trip_gb_per_s: float) -> None:
        self._write = _Direction(2 * round_trip_gb_per_s)
        self._read = _Direction(2 * round_trip_gb_per_s)

    @property
    def round_trip_gb_per_s(self) -> float:
        """Bytes over the time to write and read them once."""
        return 1 / (1 / self._write.gb_per_s + 1 / self._read.gb_per_s)

    def writing(self, num_bytes: int) -> AbstractContextManager[None]:
        """Around a write of so many bytes; a failed one counts time and no bytes."""
        return self._write.transfer(num_bytes)

    def reading(self, num_bytes: int) -> AbstractContextManager[None]:
        """Around a read, likewise."""
        return self._read.transfer(num_bytes)


def measure(
    storage: Storage, *, record_bytes: int = 16 * 1024 * 1024, depth: int = 4
) -> float:
    """Round-trip GB/s of a storage: `depth` threads write and read a record each.

    Raises:
        OSError: the storage fails, or is full.
    """
    slots: list[Slot] = []
    try:
        while len(slots) < depth:
            slots.append(storage.allocate(record_bytes))
        size = slots[0].capacity_bytes
        buffers = [_random_bytes(size, seed) for seed in range(depth)]
        with ThreadPoolExecutor(depth) as pool:
            # The first write of fresh extents is slower than all that follow.
            list(pool.map(storage.write, slots, buffers))
            begin = time.monotonic()
            list(pool.map(storage.write, slots, buffers))
            list(pool.map(storage.read, slots, buffers))
            seconds = time.monotonic() - begin
    finally:
        for slot in slots:
            storage.free(slot)
    return depth * size / seconds / 1e9


def _random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    """Page-aligned; random, because some disks skip or compress zeros."""
    buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    buffer.view(torch.int64).random_(generator=generator)
    return buffer
