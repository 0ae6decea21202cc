"""When the bytes of a record leave: at the last save that shares them.

[Note: the last save]
Tensors on the same bytes at one version are one record, and a library may write to the
bytes between two saves, past the version counter: it fills a buffer column by column,
or rotates a part of a joint projection in place. Backward must then see what the later
one saw. So the copy that counts is the last one. It costs no memory to wait for it:
until then the tensor that will be saved keeps the bytes on the device. How often an
item is saved is known from its table, or from the last lane of the kind; where that was
wrong, the bytes are copied again.
(tests/ssdtrain/cache/test_last_save.py)
"""

import weakref
from typing import NamedTuple

from torch import Tensor

from ssdtrain.cache.cursor import Cursor, Entry
from ssdtrain.cache.executor import Executor
from ssdtrain.cache.record import Lane, Record, Saves
from ssdtrain.cache.state import RecordState
from ssdtrain.counters import Count, Counters


class Waiting(NamedTuple):
    """A record that is expected to be saved again."""

    record: "weakref.ref[Record]"
    entry: Entry
    bytes_before: int
    """Of its lane."""
    expected: Saves


class Departures:
    """Sends the records of the general path; the cache's lock is held."""

    def __init__(self, moves: Executor, cursor: Cursor, counters: Counters) -> None:
        self._moves = moves
        self._cursor = cursor
        self._counters = counters

    def opened(self, record: Record, entry: Entry, bytes_before: int) -> bool:
        """Send a new record, unless it is expected to be saved again.

        Args:
            record: whose bytes are on the device.
            entry: its place in the lane.
            bytes_before: of the lane.

        Returns:
            Whether it leaves now.
        """
        lane, item = record.lane, entry.number
        for waiting in list(lane.waiting.values()):
            if waiting.expected.last < item:
                self._send(waiting)
        lane.saves[item] = Saves(1, item)
        expected = lane.profile.saves.get(item)
        if expected is None or expected.num < 2 or entry.held:
            return self._moves.place(record, entry, bytes_before)
        own = weakref.ref(record)
        lane.waiting[item] = Waiting(own, entry, bytes_before, expected)
        return False

    def saved_again(self, record: Record, data: Tensor, lane: Lane) -> None:
        """Another tensor on the bytes of a record is saved.

        Args:
            record: of these bytes; no region makes it again.
            data: the bytes as they are now.
            lane: in which it is saved.
        """
        item, waiting = record.item, record.lane.waiting.get(record.item)
        if record.lane is lane:
            num = lane.saves.get(item, Saves(1, item)).num + 1
            last = max(item, self._cursor.of(lane).num_items - 1)
            lane.saves[item] = Saves(num, last)
            if waiting is not None and num >= waiting.expected.num:
                self._send(waiting)
                return
        if record.state in (RecordState.LEAVING, RecordState.AWAY):
            self._moves.take_back(record, data)
            self._counters.shift(Count.OFFLOADED, Count.KEPT, record.num_bytes)
            orders = self._cursor.of(record.lane).orders
            order = None if orders is None else orders[item]
            due = None
            if order is not None and order.release_after > 0:
                due = self._cursor.mark + order.release_after
            entry = Entry(item, order, due, record.name, False)
            before = record.lane.total_bytes - record.num_bytes
            self._place(record, entry, before)

    def lane_ends(self, lane: Lane) -> None:
        """Its forward has ended: what waits in vain leaves."""
        for waiting in list(lane.waiting.values()):
            self._send(waiting)
        lane.waiting.clear()

    def _send(self, waiting: Waiting) -> None:
        record, entry = waiting.record(), waiting.entry
        if record is None:
            return
        record.lane.waiting.pop(entry.number, None)
        # The program may have freed the storage since.
        lost = record.data is None or not record.data.untyped_storage().nbytes()
        if record.state is RecordState.KEPT and not (lost or record.lane.in_backward):
            self._place(record, entry, waiting.bytes_before)

    def _place(self, record: Record, entry: Entry, bytes_before: int) -> None:
        if self._moves.place(record, entry, bytes_before):
            self._counters.shift(Count.KEPT, Count.OFFLOADED, record.num_bytes)
