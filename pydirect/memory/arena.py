"""Arenas: mappings that a pool cuts into pieces."""

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from enum import Enum

from pydirect.memory import managed, runtime
from pydirect.memory.limits import read_limits
from pydirect.memory.raw import release_in_owner, tensor_over

HUGE_PAGE_BYTES = 2 << 20


class Backing(Enum):
    """Where a pool's memory comes from (plain memory for both without a GPU)."""

    REGISTERED = "registered"
    """Mapped by us and pinned with cudaHostRegister: for copies, and for processes."""

    MANAGED = "managed"
    """Managed by the driver, kept on the host: for reading in place.
    See [Note: Large pages] in managed."""


class Arena:
    """One mapping and its unused pieces.

    Tensors hold the arena through their finalizers, so it may outlive its pool; the
    memory is given back to the kernel when neither needs it.
    """

    def __init__(
        self, address: int, num_bytes: int, release: Callable[[], None]
    ) -> None:
        """``release`` unpins and unmaps; it must not hold the arena."""
        self.address = address
        self.num_bytes = num_bytes
        self.numa_nodes: tuple[int, ...] = ()
        self.needs_wait = runtime.cuda_works()
        self.free = [(0, num_bytes)]
        """Unused pieces, (offset, bytes), by offset."""
        self.release = weakref.finalize(self, release_in_owner, os.getpid(), release)
        self.release.atexit = False

    def take(self, num_bytes: int) -> int | None:
        """The offset of the smallest free piece that fits, or None."""
        fitting = [piece for piece in self.free if piece[1] >= num_bytes]
        if not fitting:
            return None
        offset, size = min(fitting, key=lambda piece: piece[1])
        self.free.remove((offset, size))
        if size > num_bytes:
            self.free.append((offset + num_bytes, size - num_bytes))
            self.free.sort()
        return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Return a piece and merge it with its neighbours."""
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self.free, (offset, num_bytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self.free = merged

    @property
    def unused(self) -> bool:
        return self.free == [(0, self.num_bytes)]


def registered_arena(num_bytes: int, numa_nodes: tuple[int, ...]) -> Arena:
    """Anonymous memory on huge pages where the kernel has them, placed, then pinned.

    Raises:
        HostMemoryError: a limit forbids it, or pinning or placing failed.
    """
    read_limits().check(num_bytes)
    # One huge page more than needed, so that the arena can start on one.
    mapping = mmap.mmap(
        -1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    start = _address_of(mapping)
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    runtime.prefer_huge_pages(address, num_bytes)
    if numa_nodes:
        runtime.bind_memory(address, num_bytes, numa_nodes)
    pinned = runtime.cuda_works()
    if pinned:
        runtime.register_memory(address, num_bytes, read_only=False)
    release = functools.partial(_unmap, mapping, address if pinned else None)
    arena = Arena(address, num_bytes, release)
    arena.numa_nodes = numa_nodes
    return arena


def managed_arena(num_bytes: int) -> Arena:
    """Managed memory that is there: every page written once, by all threads.

    Raises:
        HostMemoryError: a limit forbids it.
    """
    read_limits().check(num_bytes)
    address = managed.map_managed(num_bytes)
    arena = Arena(address, num_bytes, functools.partial(managed.unmap_managed, address))
    tensor_over(address, num_bytes, _nothing).zero_()
    return arena


def _nothing() -> None:
    """The arena, not this view of it, owns the memory."""


def _unmap(mapping: mmap.mmap, pinned_address: int | None) -> None:
    if pinned_address is not None:
        runtime.unregister(pinned_address)
    mapping.close()


def _address_of(mapping: mmap.mmap) -> int:
    # The view, and with it the exported buffer, dies here: the mapping can be closed.
    return ctypes.addressof(ctypes.c_uint8.from_buffer(mapping))
