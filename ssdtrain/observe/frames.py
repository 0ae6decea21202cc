"""Which saved tensors somebody besides autograd and the cache still holds.

[Note: frames]
A release frees memory only if nobody else holds the storage. The locals of a forward
do, until it returns: its residual, its queries and keys; the caller holds its input.
A copy to the host is often faster than that. So the observed step counts the owners of
every saved storage at each mark: what owners there are besides the records, whose
number is known, are the model's. The profile tells for how many marks
(`Item.frame_marks`), and a plan's peak is predicted with it. What an operator makes for
its own backward (a mask) has no producer, and goes before the next operator runs unless
a record keeps it.
(tests/ssdtrain/observe/test_frames.py, test_peak.py)
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssdtrain.cache.identity import stamp_of
from ssdtrain.cache.record import LaneCursor
from ssdtrain.cache.state import RecordState

Place = tuple[int, int]
"""Lane and item."""
RESIDENT = (RecordState.KEPT, RecordState.LEAVING)
"""Where a record's bytes are still the ones that the operator made."""


@dataclass
class _Item:
    cursor: LaneCursor
    number: int
    num_bytes: int
    row: int
    """At which it was packed."""
    has_producer: bool
    counted: bool = False
    """At the last row, because no record held it."""

    @property
    def is_ours(self) -> bool:
        """Whether the item's record is one of the storage's owners."""
        record = self.cursor.record(self.number)
        return (
            record is not None and record.data is not None and record.state in RESIDENT
        )


@dataclass
class _Storage:
    alive: StorageWeakRef
    items: list[_Item] = field(default_factory=list)
    """All of them: each may own the storage."""
    waiting: list[_Item] = field(default_factory=list)
    """Those that others may still hold."""


class Frames:
    """Watches the storages of one step's saved tensors."""

    def __init__(self, device: torch.device) -> None:
        self._storages: dict[int, _Storage] = {}
        """By address."""
        self._waiting: dict[int, _Storage] = {}
        """Those in which an item waits."""
        self._marks: dict[Place, int] = {}
        self._by_torch = _owners_by_torch(device)

    def enter(
        self, cursor: LaneCursor, number: int, tensor: Tensor, num_bytes: int, row: int
    ) -> None:
        """Start to watch the storage of a tensor that is saved first at this mark."""
        storage = tensor.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is None or found.alive.expired():
            found = self._storages[storage._cdata] = _Storage(StorageWeakRef(storage))
        produced = tensor.grad_fn is not None
        item = _Item(cursor, number, num_bytes, row, produced)
        found.items.append(item)
        found.waiting.append(item)
        self._waiting[storage._cdata] = found

    def look(self, row: int) -> int:
        """Stop watching the storages that only records still own.

        Args:
            row: number of the mark.

        Returns:
            Bytes that `count` gave at the last mark and that were freed before its
            operator ran.
        """
        num_gone = 0
        for address, storage in list(self._waiting.items()):
            if self._has_others(address, storage):
                continue
            del self._waiting[address]
            for item in storage.waiting:
                if item.has_producer or row - item.row > 1:
                    self._close(item, row)
                elif item.counted:
                    num_gone += item.num_bytes
            storage.waiting.clear()
        return num_gone

    def use(self, cursor: LaneCursor, number: int, row: int) -> None:
        """Stop watching an item that backward uses: only its record holds it now."""
        for storage in self._waiting.values():
            for item in storage.waiting:
                if item.cursor is cursor and item.number == number:
                    storage.waiting.remove(item)
                    self._close(item, row)
                    return

    def marks(self, cursor_number: int, number: int) -> int:
        """Return for how many marks the model held an item besides its record."""
        return self._marks.get((cursor_number, number), 0)

    def count(self) -> int:
        """Return the bytes of saved tensors that the model alone holds."""
        num_bytes = 0
        for storage in self._waiting.values():
            for item in storage.waiting:
                item.counted = not item.is_ours
                num_bytes += item.num_bytes if item.counted else 0
        return num_bytes

    def _close(self, item: _Item, row: int) -> None:
        self._marks[item.cursor.number, item.number] = row - item.row

    def _has_others(self, address: int, storage: _Storage) -> bool:
        if storage.alive.expired():
            return False
        owners = torch._C._storage_Use_Count(address)
        ours = sum(item.is_ours for item in storage.items)
        return bool(owners > ours + self._by_torch)


def _owners_by_torch(device: torch.device) -> int:
    """Return the use count that torch adds to a stamped storage of one tensor."""
    tensor = torch.empty(1, dtype=torch.float32, device=device)
    stamp_of(tensor)
    address = tensor.untyped_storage()._cdata
    return int(torch._C._storage_Use_Count(address)) - 1
