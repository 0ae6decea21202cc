"""The release window: tensors on their way out, dropped in compute order.

See [Note: stream-ordered release] in transfer/device.py. The window must hold at least
two of the largest tensors, or compute waits for every single copy.

[Note: pending release]
Backward may be faster than the copies: a record is forwarded, or dies, while its copy
is on its way. Its memory is then held for the copy alone. It is let go of as soon as
the host sees the copy done, and at the end of a backward in stream order: the next step
starts with nothing of the one before.
(tests/ssdtrain/cache/test_window.py)
"""

import math
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from ssdtrain.cache.state import RecordState, SavedBytes
from ssdtrain.counters import Fallback
from ssdtrain.transfer.copies import PinnedCopy, discard
from ssdtrain.transfer.device import CpuEvent, Device
from ssdtrain.transfer.offloader import Offloader
from ssdtrain.transfer.transfers import Transfer

POLL_S = 0.00005
# Below this, waiting for single copies costs more than the memory is worth.
WINDOW_FLOOR_BYTES = 8 * 1024 * 1024
# Measured on an H200 (recipes/bench/offload/placement.py): one largest tensor ahead
# stalls backward by 14 %, two cost 15 % more peak and gain nothing over one and a half.
PREFETCH_LARGEST = 1.5


@dataclass(frozen=True, kw_only=True)
class CacheLimits:
    """Plain numbers from the configuration. None: multiples of the largest tensor."""

    min_bytes: int
    window_bytes: int | None
    prefetch_bytes: int | None

    @property
    def least_bytes(self) -> int:
        """What is smaller is kept; so is what is empty."""
        return max(1, self.min_bytes)

    def window_of(self, largest_bytes: int) -> int:
        """The release window of a lane whose largest tensor has this many bytes."""
        if self.window_bytes is not None:
            return self.window_bytes
        return max(WINDOW_FLOOR_BYTES, 2 * largest_bytes)

    def prefetch_of(self, largest_bytes: int) -> int:
        """Bytes to load ahead of backward in such a lane."""
        if self.prefetch_bytes is not None:
            return self.prefetch_bytes
        return int(PREFETCH_LARGEST * largest_bytes)


@dataclass(eq=False, slots=True)
class Leaver:
    """One tensor on its way out. Owns the memory until compute has passed the copy,
    even if the record dies before."""

    record: "weakref.ref[SavedBytes]"
    data: Tensor
    transfer: Transfer | PinnedCopy
    order: object
    due: int | None
    """Mark at which the plan releases it; None: when the window is full."""
    num_bytes: int
    """Of `data`."""


class ReleaseWindow:
    """A queue of leavers, bounded in bytes."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._device = offloader.device
        self._leavers: OrderedDict[int, Leaver] = OrderedDict()
        """By the transfer's id (a leaver holds it), in the order of their copies."""
        self.lingering: dict[int, None] = {}
        """Transfers whose records are dead or forwarded: see [Note: pending release];
        in the order of backward."""
        self.next_due: float = math.inf
        """Mark at which a plan releases the first of those that it does."""
        self.num_bytes = 0

    def add(
        self,
        record: SavedBytes,
        data: Tensor,
        transfer: Transfer | PinnedCopy,
        due: int | None = None,
        order: object = None,
    ) -> None:
        """Enter a record whose copy has been started.

        Args:
            order: `Device.order` when it was; None: it is asked.
        """
        if order is None:
            order = self._device.order()
        num_bytes = data.nbytes
        leaver = Leaver(weakref.ref(record), data, transfer, order, due, num_bytes)
        self._leavers[id(transfer)] = leaver
        if due is not None and self.next_due == math.inf:
            self.next_due = due
        self.num_bytes += num_bytes

    def oldest_has_left(self) -> bool:
        """Whether releasing the oldest would cost no wait at all."""
        oldest = next(iter(self._leavers.values()), None)
        return oldest is None or oldest.transfer.copied.query()

    def release_oldest(self) -> None:
        """Order compute after the oldest copy and drop the memory."""
        self._release(next(iter(self._leavers)))

    def _release(self, number: int, *, is_behind: bool = False) -> None:
        """is_behind: whether compute waits for the copy already."""
        leaver = self._leavers.pop(number)
        self.lingering.pop(number, None)
        if leaver.due is not None:
            self.next_due = self._first_due()
        self.num_bytes -= leaver.num_bytes
        record = leaver.record()
        try:
            if not is_behind:
                self._device.wait(leaver.transfer.copied, leaver.order, outwards=True)
        except Exception as error:
            self._keep(leaver, record, error)
            # The event holds the error, and a buffer the event: not this frame as well.
            error.__traceback__ = None
            return
        if record is not None and _leaves_with(record, leaver):
            record.release()

    def _first_due(self) -> float:
        for leaver in self._leavers.values():
            if leaver.due is not None:
                return leaver.due
        return math.inf

    def _keep(
        self, leaver: Leaver, record: SavedBytes | None, error: Exception
    ) -> None:
        """A copy out that failed: its bytes are still here, so here they stay."""
        self._offloader.fall_back(Fallback.KEPT_WRITE_FAILED, f": {error}")
        if record is not None and _leaves_with(record, leaver):
            record.stay()
            discard(self._offloader, leaver.transfer)

    def release_due(self, mark: int) -> int:
        """Release what the plan wants released by now; how many."""
        if mark < self.next_due:
            return 0
        count = 0
        for at, leaver in enumerate(self._leavers.values()):
            if leaver.due is not None and leaver.due > mark:
                break
            # Copies end in order: what stands before a due one has left as well.
            count = count if leaver.due is None else at + 1
        if count == 1:
            self.release_oldest()
            return 1
        # The last copy first: whoever waits for it has waited for those before it.
        waited: list[object] = []
        for number in reversed(list(islice(self._leavers, count))):
            leaver = self._leavers[number]
            one_order = self._device.ends_in_order(leaver.transfer.copied)
            is_behind = one_order and leaver.order in waited
            self._release(number, is_behind=is_behind)
            if one_order and not is_behind:
                waited.append(leaver.order)
        return count

    def release_down_to(self, limit_bytes: int) -> None:
        """Release the oldest until at most `limit_bytes` are left."""
        while self._leavers and self.num_bytes > limit_bytes:
            self.release_oldest()

    # -- lingering ----------------------------------------------------------------

    @property
    def lingering_bytes(self) -> int:
        """Memory of dead records that still waits for copies."""
        lingering = (self._leavers[number] for number in self.lingering)
        return sum(each.num_bytes for each in lingering if each.record() is None)

    def linger(self, transfer: Transfer | PinnedCopy) -> None:
        """The record of this transfer was forwarded, or is dead."""
        if id(transfer) in self._leavers:
            self.lingering[id(transfer)] = None

    def let_go(self) -> None:
        """Drop what is pending release and has left. Costs no wait."""
        if not self.lingering:
            return
        # Backward comes to the last copy first: the last to linger has left first.
        for number in reversed(list(self.lingering)):
            if not self._leavers[number].transfer.copied.query():
                return
            self._release(number)

    def let_go_in_order(self) -> None:
        """Drop all that is pending release, after its copies; backward has ended.

        Not after what a thread copies: the host would wait for it.
        """
        for number in reversed(list(self.lingering)):
            copied = self._leavers[number].transfer.copied
            if copied.query() or not isinstance(copied, CpuEvent):
                self._release(number)


def _leaves_with(record: SavedBytes, leaver: Leaver) -> bool:
    """Whether the record is on its way out by this copy, and not by a later one."""
    leaving = record.state is RecordState.LEAVING
    return leaving and record.holding.transfer is leaver.transfer


class Pace:
    """Whether the host may wait without compute running dry."""

    def __init__(self, device: Device, window: ReleaseWindow) -> None:
        self._device = device
        self._window = window
        self._packs: deque[Callable[[], bool]] = deque(maxlen=3)

    def compute_is_busy(self) -> bool:
        """Whether compute still has two packs' worth of work ahead of it.

        While it has, the host may wait at no cost; afterwards it must not.
        """
        return len(self._packs) == self._packs.maxlen and not self._packs[0]()

    def make_room(self, limit_bytes: int) -> bool:
        """Release what has left already; True if the window is then small enough."""
        self._packs.append(self._device.now().query)
        while self._window.num_bytes > max(limit_bytes, 0):
            if self._window.oldest_has_left():
                self._window.release_oldest()
            elif self.compute_is_busy():
                time.sleep(POLL_S)
            else:
                return False
        return True
