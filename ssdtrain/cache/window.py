"""The release window: tensors on their way out, dropped in compute order.

See [Note: stream-ordered release] in transfer/device.py. The window must hold at least
two of the largest tensors, or compute waits for every single copy.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ssdtrain.cache.ledger import Ledger
from ssdtrain.cache.record import Record, RecordState
from ssdtrain.transfer.device import Device
from ssdtrain.transfer.parcel import Parcel

POLL_S = 0.00005
# Below this, waiting for single copies costs more than the memory is worth.
WINDOW_FLOOR_BYTES = 8 * 1024 * 1024
# Measured on an H200 (recipes/bench/placement.py): one largest tensor ahead stalls
# backward by 14 %, two cost 15 % more peak and gain nothing over one and a half.
PREFETCH_LARGEST = 1.5


@dataclass(frozen=True, kw_only=True)
class CacheLimits:
    """Plain numbers from the configuration. None: multiples of the largest tensor."""

    min_bytes: int
    window_bytes: int | None
    prefetch_bytes: int | None

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


@dataclass(eq=False)
class Leaver:
    """One tensor on its way out. Owns the memory until compute has passed the copy,
    even if the record dies before."""

    record: "weakref.ref[Record]"
    data: Tensor
    parcel: Parcel
    order: object
    due: int | None
    """Mark at which the plan releases it; None: when the window is full."""

    @property
    def num_bytes(self) -> int:
        """Bytes that wait to be released."""
        return self.data.numel()


class ReleaseWindow:
    """A queue of leavers, bounded in bytes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._leavers: deque[Leaver] = deque()
        self.num_bytes = 0

    def add(
        self, record: Record, data: Tensor, parcel: Parcel, due: int | None = None
    ) -> None:
        """Enter a record whose copy has been started."""
        order = self._device.order()
        self._leavers.append(Leaver(weakref.ref(record), data, parcel, order, due))
        self.num_bytes += data.numel()

    def oldest_has_left(self) -> bool:
        """Whether releasing the oldest would cost no wait at all."""
        return not self._leavers or self._leavers[0].parcel.copied.query()

    def release_oldest(self) -> int:
        """Order compute behind the oldest copy and drop the memory.

        Returns:
            Bytes of saved tensors that are no longer alive because of it.
        """
        leaver = self._leavers.popleft()
        self.num_bytes -= leaver.num_bytes
        self._device.wait(leaver.parcel.copied, leaver.order)
        record = leaver.record()
        if record is None or record.state is not RecordState.LEAVING:
            return 0
        record.state = RecordState.AWAY
        record.data = None
        return record.num_bytes

    def release_due(self, mark: int) -> int:
        """Release what the plan wants released by now; bytes freed."""
        count = 0
        for at, leaver in enumerate(self._leavers):
            if leaver.due is not None and leaver.due > mark:
                break
            # Copies end in order: what stands before a due one has left as well.
            count = count if leaver.due is None else at + 1
        return sum(self.release_oldest() for _ in range(count))

    def release_down_to(self, limit_bytes: int) -> int:
        """Release the oldest until at most `limit_bytes` are left; bytes freed."""
        freed = 0
        while self._leavers and self.num_bytes > limit_bytes:
            freed += self.release_oldest()
        return freed


class Pace:
    """Whether the host may wait without compute running dry."""

    def __init__(self, device: Device, window: ReleaseWindow, ledger: Ledger) -> None:
        self._device = device
        self._window = window
        self._ledger = ledger
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
                self._ledger.live(-self._window.release_oldest())
            elif self.compute_is_busy():
                time.sleep(POLL_S)
            else:
                return False
        return True
