"""What a region's forward saves, one by one: in an observed call, and in one that is
not known yet to run again.

Each saved tensor has a place: the n-th one that is no parameter. What a plan may choose
has a record there, as outside of a region, and all else a `PlaceHandle`. See [Note:
regions] in regioncall.py.

[Note: narrow copies in regions]
Where recipes are looked for in a region (to learn what a plan may choose), one may
store a copy of its own: a widened tensor in its smaller dtype. Autograd does not save
it, so it has no place. Stored until backward, it is as much again as the region's
inputs for each norm that computes in float32: 40 hidden states of a T5 of 16 layers,
0.7 GB, which checkpointing at 4.8 GB does not have. So it goes with the region's other
tensors, and is copied again from the tensor at the place that it was made for, once the
re-run's graph is gone.
(tests/ssdtrain/regions/test_narrow_copies.py)
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssdtrain.cache.attention import StoredAttention
from ssdtrain.cache.context import CacheContext
from ssdtrain.cache.cursor import OUTSIDE_PLAN, Entry
from ssdtrain.cache.identity import (
    Stamp,
    check_late_writer,
    check_version,
    identify,
    is_plain,
    raw_bytes,
    stamp_of,
)
from ssdtrain.cache.inputs import Inputs
from ssdtrain.cache.record import (
    Handle,
    RebuiltView,
    Record,
    RecordView,
    part_of,
)
from ssdtrain.cache.savedindex import FromRegion, SavingCall, look_of, made_elsewhere
from ssdtrain.cache.state import Known, RecordState
from ssdtrain.cache.wrapped import as_made, bytes_of, counter_of
from ssdtrain.plan.placement import Placement
from ssdtrain.rebuild.modes import without_modes
from ssdtrain.rebuild.recipes import narrow

TINY_BYTES = 4096
"""What is smaller inside a region stays: its handle would take as much."""
Owner = weakref.ref[Any] | None


class Place(tuple[torch.Size, torch.dtype, tuple[int, ...] | None, Owner]):
    """One tensor that autograd saved in a region call: shape, dtype and strides, which
    that of a re-run must have as well, and who waits for it (a `Record` or a
    `PlaceHandle`; None: it was stored, or is a recipe's). A tuple: made without a call
    of Python."""

    __slots__ = ()


def place_of(tensor: Tensor, owner: Owner) -> Place:
    """The place of a tensor, which may be sparse, nested or a subclass."""
    return Place((*look_of(tensor), owner))


class PlaceHandle(Handle):
    """A saved tensor of a region call that is no record: too small, or a row of a
    table."""

    __slots__ = (
        "call",
        "counter",
        "num_bytes",
        "tensor",
        "version",
        "written_late",
    )

    def __init__(self, call: SavingCall, tensor: Tensor, num_bytes: int) -> None:
        self.call = call
        # Shares the version counter: see [Note: in-place changes].
        self.tensor: Tensor | None = tensor.detach()
        """While the forward runs, and from a re-run to the use."""
        self.version = tensor._version
        self.counter: Tensor | None = None
        """Of a wrapper, and from the end of the forward on; it holds no memory."""
        self.written_late = tensor.grad_fn is None
        """Whether its operator may have filled it after autograd saved it."""
        self.num_bytes = num_bytes
        """Bytes that the ledger counts for it while its tensor is here."""
        self.number = -1
        self.epsilon = None
        self.seal = None

    @property
    def source(self) -> FromRegion:  # type: ignore[override]
        """No recipe reads it."""
        return FromRegion(self.call)

    @property
    def name(self) -> str:
        """For errors."""
        return f"a tensor saved in {self.call.region.path}"

    def stayed(self) -> Tensor:
        """The tensor, in a forked child.

        Raises:
            ForkedError: its region would have to run again.
        """
        if self.tensor is None:
            raise made_elsewhere(self.name)
        return self.tensor

    def get(self) -> Tensor:
        """The tensor, made again if it must be.

        Raises:
            InPlaceError: it was changed after it was saved.
            RegionError: the re-run did not make it.
        """
        call, counter = self.call, self.counter
        if counter is None and not call.drops:
            counter = self.tensor
        if counter is not None and counter._version != self.version:
            check_version(counter, self.version, self.name)
        if self.written_late and call.drops:
            check_late_writer(self)
        tensor = self.tensor
        if tensor is None:
            tensor = call.made_for(self)
        if call.drops:
            self.tensor = None
            if self.num_bytes:
                call.handed_over(self.num_bytes)
        return tensor

    def drop(self, nothing: Tensor) -> None:
        """Its region's forward has ended: keep no more than a probe of its version.

        Args:
            nothing: an empty tensor on the device.
        """
        tensor, self.tensor = self.tensor, None
        if self.counter is None and tensor is not None:
            tensor.data = nothing
            self.counter = tensor


class SavedPlaces:
    """The places of one call.

    Args:
        call: which its handles hold, and which holds this.
    """

    def __init__(
        self,
        call: SavingCall,
        cache: CacheContext,
        inputs: Inputs,
        attention: StoredAttention,
    ) -> None:
        self.records = Known()
        """Those that the call's re-run makes again."""
        self.held_bytes = 0
        """Booked for handles that are no records."""
        self._call = weakref.ref(call)
        self._cache = cache
        self._inputs = inputs
        self._attention = attention
        self._places: list[Place] = []
        self._copies: dict[int, torch.dtype] = {}
        """Dtypes of narrow copies, by the place of what they are copies of."""
        self._copied: tuple[weakref.ref[Record], torch.dtype] | None = None
        """The copy that was made for the next place."""
        self._small_bytes: int | None = None
        """How many more bytes of small tensors stay in an observed call; None: nobody
        has asked."""
        self._beside_bytes = 0
        """Of those beyond that."""
        self._booked: set[tuple[Stamp, int]] | None = None
        """Storages whose bytes are booked, by version; None before the first one."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def call(self) -> SavingCall:
        """Whose they are; it holds this."""
        call = self._call()
        if call is None:
            raise RuntimeError("the region's call of these saved tensors is gone")
        return call

    def stored(self, tensor: Tensor, handle: Handle) -> Handle:
        """The next place; its tensor went the general way."""
        source = part_of(handle).source
        owner = None
        if isinstance(source, RecordView) and source.record.region is self.call:
            owner = weakref.ref(source.record)
        elif isinstance(source, RebuiltView) and self._copied is not None:
            owner, self._copies[len(self._places)] = self._copied
        self._copied = None
        self._attention.packed(len(self._places), tensor, handle)
        self._inputs.note_lengths(tensor)
        self._places.append(place_of(tensor, owner))
        return handle

    def makes(self, entry: Entry) -> bool:
        """Whether its re-run makes a new saved tensor again."""
        if entry.held:
            return False
        if entry.order is None:
            return True
        # What a recipe stores under a plan goes where its own order says.
        is_recipes = self._cache.cursor.serving != OUTSIDE_PLAN
        return entry.order.placement is Placement.RERUN and not is_recipes

    def add(self, record: Record, dtype: torch.dtype) -> None:
        """Make a record again, which `makes` has said.

        Args:
            dtype: of its tensor.
        """
        record.region = self.call
        self.records.add(record.key, record)
        # A recipe's: see [Note: narrow copies in regions].
        if self._cache.cursor.serving != OUTSIDE_PLAN:
            self._copied = weakref.ref(record), dtype

    def hold(self, tensor: Tensor) -> Handle:
        """The next place, for plain bytes or a wrapper of such; nobody but its handle
        knows of it."""
        part = bytes_of(tensor)
        return self._handle(tensor, self._new_bytes(part) if is_plain(part) else 0)

    def _handle(self, tensor: Tensor, num_bytes: int) -> Handle:
        handle = PlaceHandle(self.call, tensor, num_bytes)
        if not is_plain(tensor):
            handle.counter = counter_of(tensor)
            self._inputs.note_lengths(tensor)
        self._places.append(place_of(tensor, weakref.ref(handle)))
        return handle

    def hold_small(self, tensor: Tensor, keep: Callable[[Tensor], Handle]) -> Handle:
        """The next place, for plain bytes below `min_bytes`: no plan counts them.

        Args:
            keep: makes a handle under which the tensor stays. Statistics of an
                attention do, where the plan stores its output; in the observed step
                others do, since a norm's recipe reads its own, as far as they are no
                more than the call's arguments: a scan saves a state for each token.
        """
        number, call = len(self._places), self.call
        cursor = self._cache.cursor
        storing = cursor.of(call.lane).storing
        if call.number in storing and self._attention.expects(number):
            return self.stored(tensor, keep(tensor))
        if not cursor.observer.listens:
            return self.hold(tensor)
        if self._small_bytes is None:
            given = sum(each.nbytes for each in self._inputs.tensors)
            self._small_bytes = max(self._cache.limits.least_bytes, given)
        self._small_bytes -= tensor.nbytes
        if self._small_bytes >= 0:
            self._attention.small(number)
            self._places.append(place_of(tensor, None))
            return keep(tensor)
        self._beside_bytes += tensor.nbytes
        return self._handle(tensor, 0)

    def _new_bytes(self, tensor: Tensor) -> int:
        """Book what it adds to the tensors that are alive."""
        booked = self._booked
        if booked is None:
            booked = self._booked = self._inputs.booked
        key = stamp_of(tensor), tensor._version
        if key in booked:
            return 0
        booked.add(key)
        num_bytes = (tensor if tensor._base is None else tensor._base).nbytes
        self.held_bytes += num_bytes
        self.call.holding.live_bytes += num_bytes
        self._cache.ledger.live(num_bytes)
        return num_bytes

    def settle(self, nothing: Tensor) -> int:
        """The forward has ended: let go of the bytes, if the call can run again.

        Args:
            nothing: an empty tensor on the device.

        Returns:
            The bytes of records that are dropped.
        """
        dropped_bytes, drops = 0, self.call.drops
        for record in self.records.values():
            if drops:
                dropped_bytes += record.num_bytes
                record.drop()
            else:
                record.region = None
                self._cache.place_again(record)
        stays = drops and self._count_small()
        for handle in self._handles() if drops else ():
            if handle.num_bytes or not stays:
                handle.drop(nothing)
        self._booked = None
        return dropped_bytes

    def _count_small(self) -> bool:
        """Whether what is no tensor of a plan's stays: in an observed call without any
        that is, which no plan can choose. Else it goes, and counts where the region
        does not run again."""
        cursor, call = self._cache.cursor, self.call
        if not cursor.observer.listens or not self._beside_bytes:
            return False
        if not len(self.records):
            return True
        cursor.observer.small(
            cursor.of(call.lane).number, call.number, self._beside_bytes
        )
        return False

    def _handles(self) -> list[PlaceHandle]:
        """Those that autograd still has."""
        owners = [None if owned is None else owned() for *_, owned in self._places]
        return [each for each in owners if type(each) is PlaceHandle]

    def take(
        self,
        found: list[Tensor],
        placed: Callable[[int, Tensor], None] | None,
        number: int,
        tensor: Tensor,
    ) -> None:
        """Keep of a tensor of the re-run until all are there: no part of the graph.

        Args:
            found: to be added to.
            placed: hears of it as well.

        Raises:
            RegionError: it is another one than the forward saved.
        """
        if placed is not None:
            placed(number, tensor)
        place = self._places[number]
        shape, dtype, stride, owned = place
        made = look_of(tensor)
        if made != (shape, dtype, stride):
            raise self.call.other(number, place[:3], made)
        owner = None if owned is None else owned()
        if owner is None:
            found.append(self._cache.nothing)
        elif type(owner) is PlaceHandle:
            found.append(tensor.detach())
        elif number in self._copies:
            part = as_made(bytes_of(tensor), tensor)
            found.append((part if part._base is None else part._base).detach())
        else:
            part = bytes_of(tensor)
            key, _ = identify(part)
            found.append(raw_bytes(part, key))

    def hand_out(self, found: list[Tensor]) -> int:
        """Give their owners what was made again; return the bytes of handles."""
        made_bytes = 0
        for number, (_, _, _, owned) in enumerate(self._places):
            tensor, found[number] = found[number], self._cache.nothing
            owner = None if owned is None else owned()
            if type(owner) is PlaceHandle:
                if owner.tensor is None:
                    owner.tensor = tensor
                    made_bytes += owner.num_bytes
            elif owner is not None and owner.state is RecordState.DROPPED:
                if number in self._copies:
                    with without_modes():
                        tensor = narrow(tensor, self._copies[number])
                    tensor = raw_bytes(tensor, identify(tensor)[0])
                owner.made_again(tensor)
        return made_bytes

    def forget(self) -> None:
        """Let go of what was made again and not used."""
        for record in self.records.values():
            record.drop_again()
        for handle in self._handles():
            if handle.tensor is not None:
                handle.tensor = None
                self.call.handed_over(handle.num_bytes)
