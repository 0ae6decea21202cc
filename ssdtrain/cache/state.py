"""Where saved bytes are: the states, what leads from one to the next, what is booked.
(tests/ssdtrain/cache/test_booked.py)
"""

import weakref
from enum import Enum, auto
from typing import Any, Protocol

from torch import Tensor

from ssdtrain.cache.identity import Key
from ssdtrain.cache.ledger import Ledger
from ssdtrain.transfer.copies import Arrival
from ssdtrain.transfer.device import Device
from ssdtrain.transfer.transfers import Load


class Moving(Protocol):
    """A `Lane`, as far as its records change it."""

    has_moved: bool


class RecordState(Enum):
    """Where a record's bytes are, as backward sees it."""

    KEPT = auto()
    """On the device: the first state, and mostly the last. > LEAVING when a copy out
    starts, DROPPED when its region can run again."""
    LEAVING = auto()
    """On the device, and a copy is on its way out. > AWAY; KEPT when backward came
    first, the copy failed, or the bytes are saved again."""
    AWAY = auto()
    """Only in the transfer. > RETURNING when a load starts."""
    RETURNING = auto()
    """A load into fresh device memory was started. > BACK."""
    BACK = auto()
    """On the device again. > AWAY or DROPPED when every handle has had its use."""
    DROPPED = auto()
    """Nowhere: the forward of its region makes it again. > BACK."""


STAYED = (RecordState.KEPT, RecordState.LEAVING)
"""The bytes are on the device, where they have always been."""


class Known:
    """Living records by key. A `WeakValueDictionary` would run Python when one dies;
    see [Note: destructors] in record.py."""

    def __init__(self) -> None:
        self._owners: dict[Key, weakref.ref[Any]] = {}

    def get(self, key: Key) -> Any:
        """The record of this key, while it lives."""
        found = self._owners.get(key)
        return None if found is None else found()

    def add(self, key: Key, owner: Any) -> None:
        """Find it by this key until it is collected."""
        self._owners[key] = weakref.ref(owner)
        owner.holding.known = (self, key)

    def forget(self, key: Key) -> None:
        """The record of this key is dead, unless another one has taken its place."""
        if self.get(key) is None:
            self._owners.pop(key, None)

    def values(self) -> list[Any]:
        """All that live."""
        found = [owner() for owner in self._owners.values()]
        return [owner for owner in found if owner is not None]

    def __len__(self) -> int:
        return len(self.values())


class Booked:
    """What is held elsewhere for saved bytes, and is given back when they are dead."""

    __slots__ = ("held_bytes", "known", "live_bytes", "load", "transfer")
    held_bytes: int
    """Of `live_bytes`: pinned by an autograd leaf (`is_held` in identity.py)."""
    known: tuple[Known, Key] | None
    """Where it is found by its key."""
    live_bytes: int
    """Bytes on the device that the ledger counts for it."""
    load: Load | Arrival | None
    """A copy in that nobody has waited for."""
    transfer: Any
    """Its bytes off the device: a `Transfer`, a `PinnedCopy` of a table's row, or a
    `GraphTransfer`."""


class SavedBytes:
    """Bytes that autograd saved. A change of state is a method of this class, or of
    `Record` for those of regions; it also books the bytes."""

    __slots__ = (
        "__weakref__",
        "data",
        "holding",
        "lane",
        "ledger",
        "name",
        "num_bytes",
        "num_handles",
        "num_uses",
        "state",
    )
    data: Tensor | None
    """The bytes, while they are on the device."""
    holding: Booked
    lane: Moving
    ledger: Ledger
    name: str
    num_bytes: int
    num_handles: int
    num_uses: int
    """Handles whose use has been, since it was put back."""
    state: RecordState
    region: Any = None
    """The `RegionCall` that makes it again; None: it is stored."""

    def leave(self, transfer: Any) -> None:
        """KEPT > LEAVING: the copy out has been started."""
        self.holding.transfer = transfer
        self.state = RecordState.LEAVING
        self.lane.has_moved = True

    def stay(self) -> Any:
        """LEAVING > KEPT: backward was faster, or the copy failed.

        Returns:
            The transfer or copy that is no longer needed.
        """
        holding = self.holding
        transfer, holding.transfer = holding.transfer, None
        self.state = RecordState.KEPT
        return transfer

    def release(self) -> None:
        """LEAVING > AWAY: compute is ordered after the copy out."""
        self.state = RecordState.AWAY
        self.data = None
        self.holding.live_bytes = 0
        self.ledger.live(-self.num_bytes)

    def start_load(self, data: Tensor, load: Load | Arrival) -> None:
        """AWAY > RETURNING: `data` is being filled."""
        self.holding.load = load
        self.state = RecordState.RETURNING
        self.data = data
        self.holding.live_bytes = self.num_bytes
        self.ledger.live(self.num_bytes)

    def arrive(self, device: Device) -> None:
        """RETURNING > BACK, in compute order after the load.

        Raises:
            ActivationLostError: the read failed; the bytes are AWAY again.
        """
        # The record lets go first: a failure holds the frames of the whole backward.
        holding = self.holding
        load, holding.load = holding.load, None
        self.state = RecordState.BACK
        try:
            if load is not None:
                load.wait(device)
        except BaseException:
            self.release()
            raise

    def drop_copy(self) -> None:
        """BACK > AWAY or DROPPED: every handle had its use. The transfer still has the
        bytes, or the region its inputs, because backward may come again (retain_graph;
        DeepSpeed does so for stages with several outputs). Autograd holds the copy till
        its operator ends."""
        self.num_uses = 0
        if self.state is not RecordState.BACK:
            return
        if self.holding.transfer is not None:
            self.state = RecordState.AWAY
        elif self.region is not None:
            self.state = RecordState.DROPPED
        else:
            return
        self.data = None
        self.holding.live_bytes = 0
        self.ledger.hand_over(self.num_bytes)
