"""The `Storage` protocol: where activation bytes rest."""

import errno
from typing import NamedTuple, Protocol

import torch

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""No space, or no quota, is left."""


class Slot(NamedTuple):
    """A place in a storage that holds one record until it is freed."""

    file: int
    """Number of the member of a stripe; 0 in a storage of one file."""
    offset: int
    """Bytes from the start of that file, a multiple of `alignment_bytes`."""
    capacity_bytes: int
    """Room, a multiple of `alignment_bytes`."""


class StorageStats(NamedTuple):
    """What a storage holds, in bytes."""

    used_bytes: int
    """In slots that are not freed."""
    allocated_bytes: int
    """Room taken from the device (file sizes); does not grow from step to step."""


class Storage(Protocol):
    """Blocking, thread-safe access to slots.

    `write` and `read` take a contiguous uint8 CPU tensor (1-D) whose address and
    length are multiples of `alignment_bytes`, at most `capacity_bytes` long. They
    move all of it or raise: a short transfer is an error, never a partial success.

    In a forked child ([Note: after a fork] in forks.py), before any lock: `free` does
    nothing, `close` gives up the child's own descriptors, and every other method that
    reaches slots raises `ForkedError`.
    """

    @property
    def alignment_bytes(self) -> int:
        """What buffer addresses, lengths and slot offsets are multiples of."""

    def describe(self) -> str:
        """Return one line for reports and errors: kind and place."""

    def allocate(self, num_bytes: int) -> Slot:
        """Reserve a slot of at least `num_bytes`.

        Raises:
            StorageFullError: no room (full disk, or the cap is reached).
        """

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write the whole buffer to the start of the slot.

        Raises:
            StorageFullError: the device is full; nothing the caller owns is lost.
            OSError: any other failed or short write.
        """

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Fill the whole buffer from the start of the slot.

        Raises:
            OSError: a failed or short read (file and offset in the text).
        """

    def free(self, slot: Slot) -> None:
        """Give the slot back for reuse. Called once per slot, from any thread."""

    def stats(self) -> StorageStats:
        """Return the bytes held."""

    def close(self) -> None:
        """Release files and memory. Idempotent."""


class ForwardingStorage:
    """The ground for wrappers: every call goes to `inner`, which is closed with it."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        """The wrapped storage."""

    @property
    def alignment_bytes(self) -> int:
        """As the wrapped storage."""
        return self.inner.alignment_bytes

    def describe(self) -> str:
        """As the wrapped storage."""
        return self.inner.describe()

    def allocate(self, num_bytes: int) -> Slot:
        """See `Storage.allocate`."""
        return self.inner.allocate(num_bytes)

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """See `Storage.write`."""
        self.inner.write(slot, buffer)

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """See `Storage.read`."""
        self.inner.read(slot, buffer)

    def free(self, slot: Slot) -> None:
        """See `Storage.free`."""
        self.inner.free(slot)

    def stats(self) -> StorageStats:
        """As the wrapped storage."""
        return self.inner.stats()

    def close(self) -> None:
        """Close the wrapped storage."""
        self.inner.close()
