"""A storage that hands everything to another: the ground for wrappers."""

import torch

from ssdtrain.storage.base import Slot, Storage, StorageStats


class ForwardingStorage:
    """Every call goes to `inner`; a wrapper overrides what it changes.

    Closing it closes `inner`.
    """

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    @property
    def inner(self) -> Storage:
        """The wrapped storage."""
        return self._inner

    @property
    def alignment_bytes(self) -> int:
        """As the wrapped storage."""
        return self._inner.alignment_bytes

    def describe(self) -> str:
        """As the wrapped storage."""
        return self._inner.describe()

    def allocate(self, num_bytes: int) -> Slot:
        """See `Storage.allocate`."""
        return self._inner.allocate(num_bytes)

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """See `Storage.write`."""
        self._inner.write(slot, buffer)

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """See `Storage.read`."""
        self._inner.read(slot, buffer)

    def free(self, slot: Slot) -> None:
        """See `Storage.free`."""
        self._inner.free(slot)

    def stats(self) -> StorageStats:
        """As the wrapped storage."""
        return self._inner.stats()

    def close(self) -> None:
        """Close the wrapped storage."""
        self._inner.close()
