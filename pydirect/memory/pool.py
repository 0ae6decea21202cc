"""A pool of pinned host memory that rounds to pages, not to powers of two.

PyTorch's pinned allocator rounds every block up to a power of two: a table of 33 GiB
takes 64 GiB. This pool takes page-aligned arenas from the kernel, pins each once, and
hands out best-fitting pieces whose neighbours merge again when they come back.

[Note: Release in two steps] Pieces come back from finalizers, which run in any thread
at any allocation, also inside the pool's own lock. So a finalizer only appends to a
deque, and the next allocation takes the pieces in. By then GPU work may still read
them (a copy with non_blocking=True whose source has died), so the pool waits for the
devices before it hands a returned piece out again.
"""

import functools
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pydirect.memory import runtime
from pydirect.memory.limits import read_limits
from pydirect.memory.region import shaped, tensor_over

_HUGE_PAGE_BYTES = 2 << 20
_PIECE_BYTES = 4096
_ARENA_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Bytes of a pool."""

    reserved_bytes: int
    """Taken from the kernel (and pinned, where there is a GPU)."""

    in_use_bytes: int
    """Handed out and not come back yet."""

    num_arenas: int
    num_waits: int
    """How often an allocation waited for the devices to reuse a piece."""


@dataclass(eq=False)
class _Arena:
    """One mapping: ``free`` lists its unused pieces as (offset, bytes), by offset.

    Tensors hold the arena through their finalizers, so it may outlive its pool; the
    memory is unpinned and unmapped when neither needs it.
    """

    mapping: mmap.mmap
    address: int
    num_bytes: int
    numa_nodes: tuple[int, ...]
    pinned: bool
    free: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.release = weakref.finalize(
            self, _unmap, self.mapping, self.address if self.pinned else None
        )
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


class HostPool:
    """Pinned host memory in pieces. Thread-safe. Plain memory without a GPU."""

    def __init__(self, arena_bytes: int = _ARENA_BYTES) -> None:
        """``arena_bytes``: least size of what is taken from the kernel at once."""
        self._arena_bytes = arena_bytes
        self._arenas: list[_Arena] = []
        self._returned: deque[tuple[_Arena, int, int]] = deque()
        self._lock = threading.Lock()
        self._num_waits = 0

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        numa_nodes: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """An uninitialised host tensor that GPUs can read in place.

        Args:
            shape: any shape; empty tensors take no memory.
            dtype: any dtype with a fixed item size.
            numa_nodes: empty for the kernel's choice (first touch), one node, or
                several to interleave over.

        Raises:
            HostMemoryError: a limit of the machine forbids it, or pinning failed.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        piece_bytes = _round_up(num_bytes, _PIECE_BYTES)
        with self._lock:
            arena, offset = self._take(piece_bytes, numa_nodes)
        returned = self._returned
        flat = tensor_over(
            arena.address + offset,
            piece_bytes,
            functools.partial(returned.append, (arena, offset, piece_bytes)),
        )
        return shaped(flat, shape, dtype)

    def trim(self) -> int:
        """Give unused arenas back to the kernel; returns the bytes given back."""
        with self._lock:
            self._take_in_returned()
            unused = [arena for arena in self._arenas if arena.unused]
            self._arenas = [arena for arena in self._arenas if not arena.unused]
            for arena in unused:
                arena.release()
        return sum(arena.num_bytes for arena in unused)

    def stats(self) -> PoolStats:
        """Bytes now; pieces whose tensors died count as come back."""
        with self._lock:
            reserved = sum(arena.num_bytes for arena in self._arenas)
            free = sum(size for arena in self._arenas for _, size in arena.free)
            returned = sum(size for _, _, size in list(self._returned))
            return PoolStats(
                reserved_bytes=reserved,
                in_use_bytes=reserved - free - returned,
                num_arenas=len(self._arenas),
                num_waits=self._num_waits,
            )

    def _take(self, num_bytes: int, nodes: tuple[int, ...]) -> tuple[_Arena, int]:
        found = self._find(num_bytes, nodes)
        if found is None and self._returned:
            self._take_in_returned()
            found = self._find(num_bytes, nodes)
        if found is None:
            arena = self._new_arena(num_bytes, nodes)
            self._arenas.append(arena)
            found = self._find(num_bytes, nodes)
        if found is None:
            raise RuntimeError(f"a new arena does not hold {num_bytes} bytes")
        return found

    def _find(
        self, num_bytes: int, nodes: tuple[int, ...]
    ) -> tuple[_Arena, int] | None:
        for arena in self._arenas:
            if arena.numa_nodes == nodes:
                offset = arena.take(num_bytes)
                if offset is not None:
                    return arena, offset
        return None

    def _take_in_returned(self) -> None:
        """See [Note: Release in two steps]."""
        if not self._returned:
            return
        pieces = [self._returned.popleft() for _ in range(len(self._returned))]
        if any(arena.pinned for arena, _, _ in pieces):
            runtime.synchronize_all()
            self._num_waits += 1
        for arena, offset, num_bytes in pieces:
            arena.give_back(offset, num_bytes)

    def _new_arena(self, num_bytes: int, nodes: tuple[int, ...]) -> _Arena:
        size = _round_up(max(num_bytes, self._arena_bytes), _HUGE_PAGE_BYTES)
        if size > num_bytes >= self._arena_bytes:
            size = _round_up(num_bytes, _PIECE_BYTES)
        read_limits().check(size)
        # One huge page more than needed, so that the arena can start on one.
        mapping = mmap.mmap(
            -1, size + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        address = _round_up(_address_of(mapping), _HUGE_PAGE_BYTES)
        runtime.prefer_huge_pages(address, size)
        if nodes:
            runtime.bind_memory(address, size, nodes)
        pinned = runtime.cuda_works()
        if pinned:
            runtime.register(address, size, read_only=False)
        return _Arena(
            mapping=mapping,
            address=address,
            num_bytes=size,
            numa_nodes=nodes,
            pinned=pinned,
            free=[(0, size)],
        )


@functools.cache
def default_pool() -> HostPool:
    """The pool of this process."""
    return HostPool()


def _unmap(mapping: mmap.mmap, pinned_address: int | None) -> None:
    if pinned_address is not None:
        runtime.unregister(pinned_address)
    mapping.close()


def _address_of(mapping: mmap.mmap) -> int:
    # The tensor, and with it the exported buffer, dies here: the mapping can be
    # closed later.
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
