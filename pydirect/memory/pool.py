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
import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pydirect.memory import runtime
from pydirect.memory.arena import (
    HUGE_PAGE_BYTES,
    Arena,
    Backing,
    managed_arena,
    registered_arena,
)
from pydirect.memory.limits import ManagedMemoryError
from pydirect.memory.managed import require_managed
from pydirect.memory.raw import shaped, tensor_over

logger = logging.getLogger(__name__)

# Below this the small pages of pinned memory fit the GPU's translation caches.
_TABLE_BYTES = 64 << 20

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


class HostPool:
    """Pinned host memory in pieces. Thread-safe. Plain memory without a GPU."""

    def __init__(
        self,
        arena_bytes: int = _ARENA_BYTES,
        *,
        backing: Backing = Backing.REGISTERED,
    ) -> None:
        """``arena_bytes``: least size of what is taken from the kernel at once."""
        self._backing = backing
        self._arena_bytes = arena_bytes
        self._arenas: list[Arena] = []
        self._returned: deque[tuple[Arena, int, int]] = deque()
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
                several to interleave over; for registered memory.

        Raises:
            HostMemoryError: a limit of the machine forbids it, or pinning failed.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
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
            return self._drop_unused()

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

    def _take(self, num_bytes: int, nodes: tuple[int, ...]) -> tuple[Arena, int]:
        found = self._find(num_bytes, nodes)
        if found is None and self._returned:
            self._take_in_returned()
            found = self._find(num_bytes, nodes)
        if found is None:
            self._drop_unused()
            arena = self._new_arena(num_bytes, nodes)
            self._arenas.append(arena)
            found = self._find(num_bytes, nodes)
        if found is None:
            raise RuntimeError(f"a new arena does not hold {num_bytes} bytes")
        return found

    def _drop_unused(self) -> int:
        unused = [arena for arena in self._arenas if arena.unused]
        self._arenas = [arena for arena in self._arenas if not arena.unused]
        for arena in unused:
            arena.release()
        return sum(arena.num_bytes for arena in unused)

    def _find(self, num_bytes: int, nodes: tuple[int, ...]) -> tuple[Arena, int] | None:
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
        if any(arena.needs_wait for arena, _, _ in pieces):
            runtime.synchronize_all()
            self._num_waits += 1
        for arena, offset, num_bytes in pieces:
            arena.give_back(offset, num_bytes)

    def _new_arena(self, num_bytes: int, nodes: tuple[int, ...]) -> Arena:
        size = _round_up(max(num_bytes, self._arena_bytes), HUGE_PAGE_BYTES)
        if self._backing is Backing.MANAGED and runtime.cuda_works():
            reserved = sum(arena.num_bytes for arena in self._arenas)
            require_managed(size, reserved)
            return managed_arena(size)
        if size > num_bytes >= self._arena_bytes:
            size = num_bytes
        return registered_arena(size, nodes)


@functools.cache
def default_pool(backing: Backing = Backing.REGISTERED) -> HostPool:
    """The pool of this process for one backing."""
    return HostPool(backing=backing)


def empty_pinned(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    numa_nodes: tuple[int, ...] = (),
) -> torch.Tensor:
    """An uninitialised host tensor for copies to and from GPUs; see `HostPool`."""
    return default_pool().empty(shape, dtype, numa_nodes=numa_nodes)


def empty_table(
    shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """An uninitialised host tensor for GPUs to read in place, at random.

    From `Backing.MANAGED`, which GPUs map in large pages, when the tensor is large
    enough for that to matter and the GPUs have as much free (`managed_capacity_bytes`);
    pinned memory (`empty_pinned`) otherwise. `reach` says which it is. Managed memory
    is not for processes forked later; use `empty_pinned` for those.

    Raises:
        HostMemoryError: a limit of the machine forbids it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _TABLE_BYTES:
        try:
            return default_pool(Backing.MANAGED).empty(shape, dtype)
        except ManagedMemoryError as error:
            logger.info("a table of %d bytes is pinned instead: %s", num_bytes, error)
    return empty_pinned(shape, dtype)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
