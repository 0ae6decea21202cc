"""Slots in main memory: a storage without a disk, for tests and as a host tier."""

import errno
import mmap
import threading
from collections.abc import Callable

import torch

from ssdtrain.errors import StorageFullError
from ssdtrain.forks import Owner
from ssdtrain.storage.base import Slot, StorageStats
from ssdtrain.storage.blockio import check_buffer
from ssdtrain.storage.slots import ALIGNMENT_BYTES, SlotTable, round_up

EXTENT_BYTES = 64 * 1024 * 1024


class MemoryStorage:
    """A `Storage` over extents of main memory that are kept and reused.

    Args:
        extent_bytes: least size of an extent; a larger slot gets its own.
        capacity_bytes: cap over all extents; None: what the machine gives.
        fill: told every new extent (1-D uint8); for tests that poison memory.
    """

    def __init__(
        self,
        *,
        extent_bytes: int = EXTENT_BYTES,
        capacity_bytes: int | None = None,
        fill: Callable[[torch.Tensor], object] = lambda _: None,
    ) -> None:
        self._extent_bytes = round_up(extent_bytes, ALIGNMENT_BYTES)
        self._capacity_bytes = capacity_bytes
        self._fill = fill
        self._lock = threading.Lock()
        self._table = SlotTable()
        self._extents: list[torch.Tensor] = []
        self._written_bytes = 0
        self._read_bytes = 0
        self._closed = False
        self._owner = Owner()

    @property
    def alignment_bytes(self) -> int:
        """4096, as the storages that tests put it in the place of."""
        return ALIGNMENT_BYTES

    def describe(self) -> str:
        """`memory`."""
        return "memory"

    def allocate(self, num_bytes: int) -> Slot:
        """Reserve a slot, in the first extent that has room.

        Raises:
            StorageFullError: the cap is reached.
        """
        self._owner.check("a storage")
        capacity = self._table.capacity_for(num_bytes)
        with self._lock:
            self._check_open()
            for file in range(len(self._extents)):
                slot = self._table.take(file, capacity)
                if slot is not None:
                    return slot
            slot = self._table.take(self._add_extent(capacity), capacity)
        if slot is None:
            raise RuntimeError(f"a new extent does not hold {capacity} bytes")
        return slot

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Copy the whole buffer in; see `Storage.write`."""
        self._owner.check("a storage")
        self._view(slot, buffer).copy_(buffer)
        with self._lock:
            self._written_bytes += buffer.numel()

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Copy the whole buffer out; see `Storage.read`."""
        self._owner.check("a storage")
        buffer.copy_(self._view(slot, buffer))
        with self._lock:
            self._read_bytes += buffer.numel()

    def free(self, slot: Slot) -> None:
        """Give the slot back; after `close` there is nothing left to give back to."""
        if self._owner.is_elsewhere:
            return
        with self._lock:
            if not self._closed:
                self._table.give(slot)

    def stats(self) -> StorageStats:
        """Return the bytes held and moved so far."""
        self._owner.check("a storage")
        with self._lock:
            return self._table.stats(
                written_bytes=self._written_bytes, read_bytes=self._read_bytes
            )

    def close(self) -> None:
        """Drop the extents; a forked child drops its own view of them."""
        if self._owner.is_elsewhere:
            self._extents.clear()
            return
        with self._lock:
            self._closed = True
            self._extents.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "storage is closed: memory")

    def _view(self, slot: Slot, buffer: torch.Tensor) -> torch.Tensor:
        check_buffer(slot, buffer, ALIGNMENT_BYTES)
        with self._lock:
            self._check_open()
            return self._extents[slot.file][slot.offset :][: buffer.numel()]

    def _add_extent(self, capacity: int) -> int:
        size = max(self._extent_bytes, capacity)
        if self._capacity_bytes is not None:
            size = min(size, self._capacity_bytes - self._table.allocated_bytes)
            size -= size % ALIGNMENT_BYTES
        if size < capacity:
            raise StorageFullError(
                errno.ENOMEM,
                f"no room for {capacity} bytes in memory: {self._table.used_bytes} "
                f"used, cap {self._capacity_bytes}",
            )
        extent = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self._fill(extent)
        self._extents.append(extent)
        return self._table.add_file(size)
