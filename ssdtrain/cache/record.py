"""Records, handles and lanes: the book-keeping of what autograd saved.

Lifetime is ownership: autograd owns handles, a handle owns its record, and what the
record holds elsewhere (a transfer, a load, booked bytes) stands in its `Holding`. When
autograd drops the last handle, the holding comes into the queue of `Retired`, and the
cache gives it back at its next call.

[Note: destructors]
No Python code runs when a record dies, and no lock is taken: a weak reference appends
itself to a queue, in C. The interpreter discards exceptions that leave a `__del__`, so
a signal's KeyboardInterrupt that arrives there would be lost; and the garbage collector
may run destructors anywhere, also while the cache's lock is held.
(tests/ssdtrain/cache/test_life.py)
"""

import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ssdtrain.cache.bysize import SizedPlan
from ssdtrain.cache.identity import (
    Key,
    Probe,
    Stamp,
    View,
    check_version,
    is_plain,
)
from ssdtrain.cache.ledger import Ledger
from ssdtrain.cache.state import Booked, RecordState, SavedBytes
from ssdtrain.errors import RegionError
from ssdtrain.gathered import is_gathered
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, batches
from ssdtrain.plan.scaled import BytesByGrowth
from ssdtrain.rebuild.compiled import Compiled
from ssdtrain.rebuild.expression import Epsilon, Expression, Layout
from ssdtrain.transfer.transfers import Load, Transfer


class _Death(weakref.ref[Any]):
    """A weak reference that knows what its object leaves behind."""

    __slots__ = ("holding",)
    holding: "Holding"


class Retired:
    """Holdings of dead objects, oldest first. See [Note: destructors]."""

    def __init__(self) -> None:
        self.queue: deque[_Death] = deque()
        """The object that died first is the first one."""
        self._alive: dict[int, _Death] = {}
        """A weak reference calls back only while it is alive itself."""
        self._append = self.queue.append

    def watch(self, owner: object, holding: "Holding") -> None:
        """Queue the holding when `owner` dies."""
        death = _Death(owner, self._append)
        death.holding = holding
        self._alive[id(death)] = death

    @property
    def num_alive(self) -> int:
        """Objects that live, or are still in the queue."""
        return len(self._alive)

    def forget_oldest(self) -> None:
        """All that it held has been given back."""
        self._alive.pop(id(self.queue[0]), None)
        self.queue.popleft()


class Saves(NamedTuple):
    """How often an item of the general path was saved in its lane."""

    num: int
    last: int
    """Newest item of the lane at the last of them."""


@dataclass
class LaneProfile:
    """What was learned of a lane the last time it ran to its end."""

    total_bytes: int = 0
    backward_follows: bool = False
    order: list[int] = field(default_factory=list)
    """Ordinals in the order of first use in backward."""
    largest_bytes: int = 0
    saves: dict[int, Saves] = field(default_factory=dict)
    """Of each item: [Note: the last save] in departures.py."""


NO_GROWTH = BytesByGrowth()


class LanePlan:
    """What the orders of a kind of lane say of all its lanes; made once a plan."""

    def __init__(
        self, orders: Sequence[Order] | None, by_growth: BytesByGrowth = NO_GROWTH
    ) -> None:
        self.orders = orders
        self.by_growth = by_growth
        """Of the lane's bytes, by how they grow."""
        self.chosen = frozenset(
            order.region for order in orders or () if order.placement is Placement.RERUN
        )
        self.num_regions = 1 + max((order.region for order in orders or ()), default=-1)
        """Calls that are known to save something."""
        self.storing = frozenset(
            order.region
            for order in orders or ()
            if order.region in self.chosen and order.placement is not Placement.RERUN
        )
        self.loads: dict[int, list[tuple[int, ...]]] = {}
        self.reading: list[int] = []
        loads: dict[int, list[int]] = {}
        for item, order in enumerate(orders or ()):
            if order.release_after > 0:
                loads.setdefault(order.load_at, []).append(item)
        for at in sorted(loads, reverse=True):
            self.reading.extend(loads[at])
            self.loads[at] = batches(
                reversed(loads[at]), lambda item: (orders or ())[item].load_batch
            )


NO_PLAN = LanePlan(None)
"""Of a lane without orders."""


class LaneCursor:
    """A lane's way through its plan: see [Note: marks] in plan/profile.py."""

    def __init__(
        self, number: int, plan: LanePlan, most_ratio: float = math.inf
    ) -> None:
        self.number = number
        """Of the lane in its step."""
        self.is_past = False
        """Whether that step is over: no observer hears of the lane any more."""
        self.most_ratio = most_ratio
        """A lane that is larger than the plan's by more than this leaves it."""
        self.most_first = plan.by_growth.even_ratio(most_ratio)
        """The same one whose first item is."""
        self.orders = plan.orders
        """None: not planned."""
        self.num_items = 0
        self.floating: list[int] = []
        """Inputs of regions that did not come in their place, and may come later."""
        self.num_uses = 0
        self._chosen, self._num_known = plan.chosen, plan.num_regions
        self.runs_all = False
        """Whether all region calls that come do: it has left its plan."""
        self.is_free = plan is NO_PLAN
        """Whether there is no plan for it from its first tensor on."""
        self.first_bytes = 0
        """Of its first item, if there is none."""
        self.planned_bytes = self.own_bytes = 0
        """Of the items so far: by the plan, and as they are."""
        self.even_ratio = 1.0
        """Size over the plan's of its first item that has another one: others may grow
        with the square of it."""
        self.storing = plan.storing
        """Of these: region calls some of whose tensors are stored all the same."""
        self.records: dict[int, weakref.ref[Any]] = {}
        """A `Record`, or a `Moved` of a table, by item."""
        self.loads = plan.loads
        """Batches of items to load, by the number of the use."""
        self.reading = plan.reading.copy()
        """Items to read from the SSD ahead of their load, last first."""

    def pass_by(self) -> None:
        """The lane's step is over."""
        self.is_past = True

    def runs_again(self, number: int) -> bool:
        """Whether a region call does, also if the lane leaves its plan. Calls that the
        plan does not know do where others do: a lane of more layers needs room."""
        is_beyond = bool(self._chosen) and number >= self._num_known
        return self.runs_all or is_beyond or number in self._chosen

    @property
    def ratio(self) -> float:
        """Its size over the plan's, by the items so far."""
        return self.own_bytes / self.planned_bytes if self.planned_bytes else 1.0

    def found(self, planned_bytes: int, num_bytes: int) -> None:
        """An item that the plan knows has come."""
        self.planned_bytes += planned_bytes
        self.own_bytes += num_bytes
        if self.even_ratio == 1.0 and planned_bytes:
            self.even_ratio = num_bytes / planned_bytes

    def leaves(self, *, runs_all: bool) -> None:
        """It follows its plan no more, or never does."""
        self.orders, self.runs_all = None, runs_all

    def record(self, item: int) -> Any:
        """The record of an item, while it lives."""
        found = self.records.get(item)
        return None if found is None else found()


class Lane:
    """The ordered records of one micro-batch of one model chunk."""

    def __init__(self, name: str, profile: LaneProfile, kind: str = "") -> None:
        self.name = name
        self.kind = kind
        """Lanes of one kind are expected to save the same tensors; "": unknown."""
        self.profile = profile
        self.records: list[weakref.ref[Record]] = []
        self.total_bytes = 0
        self.largest_bytes = 0
        self.num_regions = 0
        """Calls of regions so far."""
        self.inputs: set[tuple[Stamp, int]] = set()
        """Arguments of theirs that stay and have no record: storage and version."""
        self.num_recipes = 0
        """Recipes so far: their places in a step."""
        self.has_moved = False
        """Whether a record of it was ever on its way out."""
        self.kept_last_bytes = 0
        self.num_live = 0
        self.open = True
        self.backward_follows = False
        self.in_backward = False
        self.is_captured = False
        """Whether its forward is a CUDA graph's."""
        self.uses: list[int] = []
        self.num_elements = 0
        """Of the tensors among its forward's arguments; 0: unknown."""
        self.sized: SizedPlan | None = None
        """The plan that it follows, once its forward has begun."""
        self.cursor: LaneCursor | None = None
        """Its items and orders, from its first saved tensor on."""
        self.run: Any = None
        """While its forward follows a table: see [Note: compiled plan]."""
        self.binding: Any = None
        """While the general path serves it and a table is made of it."""
        self.saves: dict[int, Saves] = {}
        self.waiting: dict[int, Any] = {}
        """Records that have not left, because they will be saved again, by item."""
        self.learns = True
        """Whether the next lane of its kind may learn from its records."""
        self._order: list[int] = []
        self._position: dict[int, int] = {}

    @property
    def expected_largest_bytes(self) -> int:
        """The largest record so far, or of the last lane of this kind."""
        return max(self.largest_bytes, self.profile.largest_bytes)

    def join(self, record: "Record") -> None:
        """Append a new record."""
        self.records.append(weakref.ref(record))
        self.total_bytes += record.num_bytes
        self.largest_bytes = max(self.largest_bytes, record.num_bytes)
        self.num_live += 1

    def start_backward(self, follows: bool) -> None:
        """Fix the order in which backward is expected to use the records."""
        self.in_backward = True
        self.backward_follows = follows
        count = len(self.records)
        learned = self.profile.order
        # A learned order of other ordinals (another graph) is worse than reversal.
        if sorted(learned) != list(range(count)):
            learned = list(range(count - 1, -1, -1))
        self._order = learned
        self._position = {ordinal: at for at, ordinal in enumerate(learned)}

    def upcoming(self, ordinal: int | None = None) -> Iterator["Record"]:
        """Live records expected after `ordinal`, soonest first.

        None: before backward has used any.
        """
        start = 0
        if ordinal is not None:
            start = self._position.get(ordinal, len(self._position)) + 1
        for place in range(start, len(self._order)):
            record = self.records[self._order[place]]()
            if record is not None:
                yield record

    def give_up(self) -> None:
        """Its step is over, though not all of its records are dead."""
        if self.cursor is not None:
            self.cursor.pass_by()
        self.learn()

    def learn(self) -> None:
        """Keep what this run taught for the next lane of the same kind."""
        if not self.learns:
            return
        self.profile.total_bytes = self.total_bytes
        self.profile.largest_bytes = self.largest_bytes
        self.profile.backward_follows = self.backward_follows
        self.profile.saves = self.saves
        unused = sorted(set(range(len(self.records))) - set(self.uses), reverse=True)
        self.profile.order = [*self.uses, *unused]


class Holding(Booked):
    """What a record, or a whole lane, must give back when it is dead."""

    __slots__ = ("lane",)

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.known = self.transfer = self.load = None
        self.live_bytes = self.held_bytes = 0


class Record(SavedBytes):
    """The bytes of one base tensor at one version; those that a region makes again have
    states of their own."""

    __slots__ = ("item", "key", "ordinal", "region", "retired")
    holding: Holding
    lane: Lane

    def __init__(
        self, key: Key, lane: Lane, name: str, retired: Retired, ledger: Ledger
    ) -> None:
        self.key = key
        self.lane = lane
        self.name = name
        self.ledger = ledger
        self.num_bytes = key.end_byte - key.start_byte
        self.ordinal = len(lane.records)
        self.item = -1
        """Number of the saved tensor in its lane, rebuilt ones included."""
        self.state = RecordState.KEPT
        self.data: Tensor | None = None
        self.num_handles = 0
        self.num_uses = 0
        self.region = None
        self.retired = retired
        self.holding = Holding(lane)
        retired.watch(self, self.holding)
        lane.join(self)

    @property
    def transfer(self) -> Transfer | None:
        """Its bytes on the target's side, from `leave` on."""
        return cast("Transfer | None", self.holding.transfer)

    @property
    def load(self) -> Load | None:
        """The copy back that was asked for, until it has been waited for."""
        return self.holding.load  # type: ignore[return-value]

    def _alive(self, data: Tensor | None) -> None:
        """Take or drop the bytes on the device."""
        self.data = data
        num_bytes = 0 if data is None else self.num_bytes
        change = num_bytes - self.holding.live_bytes
        self.holding.live_bytes = num_bytes
        if change:
            self.ledger.live(change)

    def open(self, data: Tensor) -> None:
        """> KEPT: autograd has saved these bytes."""
        self._alive(data)

    def hold(self) -> None:
        """Its bytes are pinned by an autograd leaf: moving them would free nothing."""
        self.holding.held_bytes = self.num_bytes
        self.ledger.hold(self.num_bytes)

    def take_back(self, data: Tensor) -> Any:
        """LEAVING or AWAY > KEPT: these are the bytes now, and are to leave again.

        Returns:
            The transfer that is no longer needed.
        """
        if self.state is RecordState.AWAY:
            self._alive(data)
        return self.stay()

    def drop(self) -> None:
        """KEPT > DROPPED: its region's forward has ended and can run again."""
        self.state = RecordState.DROPPED
        self._alive(None)

    def made_again(self, data: Tensor) -> None:
        """DROPPED > BACK: its region's forward ran again.

        Raises:
            RegionError: these are other bytes than were saved.
        """
        if data.numel() != self.num_bytes:
            raise RegionError(
                f"{self.name}: its region's forward saved {self.num_bytes} bytes, and "
                f"{data.numel()} when it ran again. Set regions to leave it out, or "
                "recompute='off'."
            )
        self.state = RecordState.BACK
        self._alive(data)

    def drop_again(self) -> None:
        """BACK > DROPPED: the backward for which it was made has ended."""
        if self.state is RecordState.BACK and self.region is not None:
            self.num_uses = 0
            self.state = RecordState.DROPPED
            self._alive(None)

    def pin(self) -> None:
        """BACK > KEPT: it cannot be made again from now on."""
        self.region = None
        if self.state is RecordState.BACK:
            self.state = RecordState.KEPT


class Rebuilt:
    """A base tensor at one version that a recipe makes again when backward asks.

    It owns its inputs' handles, and so their records: an input may be kept, away, on
    its way, or rebuilt itself.
    """

    __slots__ = (
        "__weakref__",
        "compiled",
        "data",
        "expression",
        "holders",
        "holding",
        "item",
        "lane",
        "layout",
        "num_bytes",
        "num_handles",
        "num_saves",
        "num_uses",
        "numerics",
        "place",
        "region",
        "retired",
    )

    def __init__(
        self,
        expression: Expression,
        holders: tuple[Any, ...],
        layout: Layout,
        num_bytes: int,
        lane: Lane,
        retired: Retired,
    ) -> None:
        self.expression = expression
        self.holders = holders
        """Handles of its inputs, in the order of `expression.inputs`."""
        self.compiled: Compiled | None = None
        """What a row of a table may ask instead of searching."""
        self.numerics: Any = None
        """Settings under which it is made; None: none that matter to its kernels."""
        self.region: Any = None
        """The `RegionCall` in whose forward it was saved."""
        self.layout = layout
        self.lane = lane
        self.retired = retired
        self.num_bytes = num_bytes
        self.data: Tensor | None = None
        """The rebuilt bytes, from the first use to the last."""
        self.item = -1
        self.num_handles = 0
        self.num_saves = 0
        """How often autograd saved it."""
        self.num_uses = 0
        self.place = lane.name, lane.num_recipes
        self.holding = Holding(lane)
        retired.watch(self, self.holding)
        lane.num_live += 1

    @property
    def name(self) -> str:
        """As `name_of` in met.py calls saved tensors."""
        shape = "x".join(map(str, self.layout.shape))
        return f"{self.expression.recipe} [{shape}]"


class Kept(NamedTuple):
    """A saved tensor that is not tracked: small, or not plain bytes."""

    tensor: Tensor
    """Detached: an output's own graph node must not own itself."""
    version: int

    def rebuild(self) -> Tensor:
        """The tensor.

        Raises:
            InPlaceError: it was changed after it was saved.
        """
        check_version(self.tensor, self.version, "a small tensor")
        return self.tensor


class Part(NamedTuple):
    """Where a view lies in its parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the parameter's first element."""

    @classmethod
    def between(cls, tensor: Tensor, parameter: nn.Parameter) -> "Part | None":
        """Where the view lies; None if it is none of plain elements."""
        reinterpreted = tensor.dtype != parameter.dtype or tensor.is_conj()
        if reinterpreted or not is_plain(tensor) or not is_plain(parameter):
            return None
        offset = int(tensor.storage_offset() - parameter.storage_offset())
        return cls(tensor.shape, tensor.stride(), offset)

    def is_of(self, tensor: Tensor, parameter: nn.Parameter) -> bool:
        """Whether a view of `parameter` lies here."""
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.dtype is parameter.dtype
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.storage_offset() - parameter.storage_offset() == self.offset
            and not tensor.is_conj()
        )

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The view of the parameter's present data."""
        start = parameter.storage_offset() + self.offset
        return parameter.detach().as_strided(self.shape, self.stride, start)


def alias_of(tensor: Tensor, parameter: nn.Parameter) -> Tensor | None:
    """What is held of a view: the view, unless that would pin what is gathered."""
    return None if is_gathered(parameter) else tensor.detach()


class ParameterView(NamedTuple):
    """A saved parameter, or a view of one.

    [Note: parameters]
    Autograd keeps a saved parameter as the object, which shows the data that it has in
    backward, and a saved view as an alias of the data that it was made of. They differ
    when a program sets `parameter.data` in between, so both are held as autograd holds
    them. But an alias would pin what ZeRO-3 gathers, and swaps for nothing after
    forward: a view of a parameter with its mark is built again on whatever data the
    parameter has then. (FSDP frees the memory under the aliases, and fills it again.)
    (tests/ssdtrain/cache/test_parameters.py)
    """

    parameter: nn.Parameter
    version: int
    shape: tuple[int, ...] | None
    """None: the parameter itself."""
    stride: tuple[int, ...]
    offset: int
    """Elements from the parameter's first element."""
    alias: Tensor | None = None
    """The view itself; None: the parameter, or what is built again."""

    @classmethod
    def of(cls, tensor: Tensor, parameter: nn.Parameter) -> "ParameterView | None":
        """A view that finds `tensor` again; None if it is none of plain elements."""
        version = tensor._version
        if tensor is parameter:
            return cls(parameter, version, None, (), 0)
        part = Part.between(tensor, parameter)
        if part is None:
            return None
        return cls(parameter, version, *part, alias_of(tensor, parameter))

    def rebuild(self) -> Tensor:
        """The parameter, or the view.

        Raises:
            InPlaceError: the parameter was changed after it was saved.
        """
        check_version(self.parameter, self.version, "a parameter")
        if self.alias is not None:
            return self.alias
        if self.shape is None:
            return self.parameter
        return Part(self.shape, self.stride, self.offset).of(self.parameter)


class RecordView(NamedTuple):
    """A tensor inside a record."""

    record: Record
    view: View
    probe: Probe

    def check(self) -> None:
        """Whether backward may have it.

        Raises:
            InPlaceError: it was changed after it was saved.
        """
        self.probe.check(self.record)


class RebuiltView(NamedTuple):
    """A tensor inside a rebuilt one."""

    rebuilt: Rebuilt
    view: View
    probe: Probe


class Wrapped(NamedTuple):
    """A tensor around a plain one. See [Note: wrappers] in wrapped.py."""

    inner: Any
    """The plain one's handle."""


class Flattened(NamedTuple):
    """A tensor around several others. See [Note: flattened] in wrapped.py."""

    inners: tuple[Any, ...]
    """Their handles."""


Source = Kept | ParameterView | RecordView | RebuiltView

NO_ITEM = -1


class Handle:
    """What autograd keeps instead of the tensor. Its life is the graph node's."""

    __slots__ = ("__weakref__", "epsilon", "number", "seal", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.number = -1
        """Of the call of `pack` in its lane, where that is known."""
        self.epsilon: Epsilon | None = None
        """Of the normalization that saved it; None: none was running."""
        self.seal: Any = None
        """What `verify` saw at pack; None: not to be checked."""


def handle_of(record: Record, view: View, probe: Probe) -> Handle:
    """One more handle of a record, for a tensor inside it."""
    record.num_handles += 1
    return Handle(RecordView(record, view, probe))


def part_of(handle: Any) -> Any:
    """The handle, or that of the part that it wraps."""
    source = getattr(handle, "source", None)
    return source.inner if isinstance(source, Wrapped) else handle


def item_of(handle: Any, lane: Lane) -> int:
    """The number of the saved tensor in the lane; `NO_ITEM`: it is none of its items,
    as one that another lane has saved before."""
    source = getattr(handle, "source", None)
    if isinstance(source, Wrapped):
        return item_of(source.inner, lane)
    owner: Record | Rebuilt
    if isinstance(source, RecordView):
        owner = source.record
    elif isinstance(source, RebuiltView):
        owner = source.rebuilt
    else:
        return NO_ITEM
    return owner.item if owner.lane is lane else NO_ITEM
