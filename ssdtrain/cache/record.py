"""Records, handles and lanes: the book-keeping of what autograd saved.

Lifetime is ownership: autograd owns handles, a handle owns its record, a record owns
its parcel. When autograd drops the last handle, the record's finalizer puts what it
held on `retired`, and the cache gives it back at its next call. The finalizer itself
takes no lock, because the garbage collector may run it anywhere.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor, nn

from ssdtrain.cache.identity import (
    Key,
    Probe,
    View,
    check_late_writer,
    check_version,
    is_plain,
)
from ssdtrain.plan.plan import Order
from ssdtrain.plan.policies import LaneOutlook
from ssdtrain.remat.expression import Epsilon, Expression, Layout
from ssdtrain.transfer.parcel import Load, Parcel


class RecordState(Enum):
    """Where a record's bytes are, as backward sees it."""

    KEPT = auto()
    """On the device for the record's whole life. Final."""
    LEAVING = auto()
    """On the device, and a copy is on its way out. > AWAY, or KEPT when forwarded."""
    AWAY = auto()
    """Only in the parcel. > RETURNING."""
    RETURNING = auto()
    """A load into fresh device memory was started. > BACK."""
    BACK = auto()
    """On the device again. > AWAY when every handle has had its use."""


class Retired(NamedTuple):
    """What a dead record leaves behind."""

    parcel: Parcel | None
    load: Load | None
    live_bytes: int
    lane: "Lane"
    held_bytes: int = 0


@dataclass
class LaneProfile:
    """What was learned of a lane the last time it ran to its end."""

    total_bytes: int = 0
    backward_follows: bool = False
    order: list[int] = field(default_factory=list)
    """Ordinals in the order of first use in backward."""
    largest_bytes: int = 0

    @property
    def outlook(self) -> LaneOutlook:
        """What a policy may know of it."""
        return LaneOutlook(
            total_bytes=self.total_bytes, backward_follows=self.backward_follows
        )


class LaneCourse:
    """A lane's way through its plan: see [Note: marks] in plan/profile.py."""

    def __init__(self, number: int, orders: Sequence[Order] | None) -> None:
        self.number = number
        """Of the lane in its step."""
        self.orders = orders
        """None: not planned."""
        self.num_items = 0
        self.num_uses = 0
        self.records: dict[int, weakref.ref[Record]] = {}
        self.loads: dict[int, list[int]] = {}
        """Items to load, by the number of the use."""
        self.reading: list[int] = []
        """Items to read from the SSD ahead of their load, last first."""
        for item, order in enumerate(orders or ()):
            if order.release_after > 0:
                self.loads.setdefault(order.load_at, []).append(item)
        for at in sorted(self.loads, reverse=True):
            self.reading.extend(self.loads[at])
            self.loads[at].reverse()

    def record(self, item: int) -> "Record | None":
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
        self.num_recipes = 0
        """Admitted recipes so far: the places of [Note: recipe budget]."""
        self.has_moved = False
        """Whether a record of it was ever on its way out."""
        self.kept_last_bytes = 0
        self.num_live = 0
        self.open = True
        self.backward_follows = False
        self.in_backward = False
        self.uses: list[int] = []
        self.course: LaneCourse | None = None
        """Its items and orders, from its first saved tensor on."""
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

    def learn(self) -> None:
        """Keep what this run taught for the next lane of the same kind."""
        self.profile.total_bytes = self.total_bytes
        self.profile.largest_bytes = self.largest_bytes
        self.profile.backward_follows = self.backward_follows
        unused = sorted(set(range(len(self.records))) - set(self.uses), reverse=True)
        self.profile.order = [*self.uses, *unused]


class Record:
    """The bytes of one base tensor at one version."""

    __slots__ = (
        "__weakref__",
        "data",
        "held_bytes",
        "item",
        "key",
        "lane",
        "load",
        "name",
        "num_bytes",
        "num_handles",
        "num_uses",
        "ordinal",
        "parcel",
        "retired",
        "state",
    )

    def __init__(
        self, key: Key, lane: Lane, name: str, retired: deque[Retired]
    ) -> None:
        self.key = key
        self.lane = lane
        self.name = name
        self.num_bytes = key.end_byte - key.start_byte
        self.ordinal = len(lane.records)
        self.item = -1
        """Number of the saved tensor in its lane, rebuilt ones included."""
        self.state = RecordState.KEPT
        self.data: Tensor | None = None
        self.parcel: Parcel | None = None
        self.load: Load | None = None
        self.held_bytes = 0
        """Its bytes, if it is a kept leaf: `is_held` in identity.py."""
        self.num_handles = 0
        self.num_uses = 0
        self.retired = retired
        lane.join(self)

    def leave(self, parcel: Parcel) -> None:
        """Its bytes are on their way out."""
        self.parcel = parcel
        self.state = RecordState.LEAVING
        self.lane.has_moved = True

    def __del__(self) -> None:
        live = 0 if self.data is None else self.num_bytes
        held = self.held_bytes
        self.retired.append(Retired(self.parcel, self.load, live, self.lane, held))


class Rebuilt:
    """A base tensor at one version that a recipe makes again when backward asks.

    It owns its inputs' handles, and so their records: an input may be kept, away, on
    its way, or rebuilt itself.
    """

    __slots__ = (
        "__weakref__",
        "data",
        "expression",
        "item",
        "lane",
        "layout",
        "num_bytes",
        "num_handles",
        "num_uses",
        "place",
        "retired",
    )

    def __init__(
        self,
        expression: Expression,
        layout: Layout,
        lane: Lane,
        retired: deque[Retired],
    ) -> None:
        self.expression = expression
        self.layout = layout
        self.lane = lane
        self.retired = retired
        self.num_bytes = layout.num_bytes
        self.data: Tensor | None = None
        """The rebuilt bytes, from the first use to the last."""
        self.item = -1
        self.num_handles = 0
        self.num_uses = 0
        self.place = lane.name, lane.num_recipes
        lane.num_live += 1

    @property
    def name(self) -> str:
        """As `name_of` in course.py calls saved tensors."""
        shape = "x".join(map(str, self.layout.shape))
        return f"{self.expression.recipe} [{shape}]"

    def __del__(self) -> None:
        live = 0 if self.data is None else self.num_bytes
        self.retired.append(Retired(None, None, live, self.lane))


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


class ParameterView(NamedTuple):
    """A saved parameter, or a view of one.

    [Note: parameters]
    The parameter *object* is held, never an alias of its data: ZeRO-3 and FSDP swap
    the data between forward and backward, and an alias would pin the gathered
    weights. A view is built again on whatever data the parameter has then.
    (tests/ssdtrain/cache/test_parameters.py)
    """

    parameter: nn.Parameter
    version: int
    shape: tuple[int, ...] | None
    """None: the parameter itself."""
    stride: tuple[int, ...]
    offset: int
    """Elements from the parameter's first element."""

    @classmethod
    def of(cls, tensor: Tensor, parameter: nn.Parameter) -> "ParameterView | None":
        """A view that finds `tensor` again; None if it is none of plain elements."""
        version = tensor._version
        if tensor is parameter:
            return cls(parameter, version, None, (), 0)
        reinterpreted = tensor.dtype != parameter.dtype or tensor.is_conj()
        if reinterpreted or not is_plain(tensor) or not is_plain(parameter):
            return None
        offset = int(tensor.storage_offset() - parameter.storage_offset())
        return cls(parameter, version, tensor.shape, tensor.stride(), offset)

    def rebuild(self) -> Tensor:
        """The parameter, or the view of its present data.

        Raises:
            InPlaceError: the parameter was changed after it was saved.
        """
        check_version(self.parameter, self.version, "a parameter")
        if self.shape is None:
            return self.parameter
        start = self.parameter.storage_offset() + self.offset
        return self.parameter.detach().as_strided(self.shape, self.stride, start)


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
        if self.record.state not in (RecordState.KEPT, RecordState.LEAVING):
            check_late_writer(self.record.name)


class RebuiltView(NamedTuple):
    """A tensor inside a rebuilt one."""

    rebuilt: Rebuilt
    view: View
    probe: Probe


Source = Kept | ParameterView | RecordView | RebuiltView


class Handle:
    """What autograd keeps instead of the tensor. Its life is the graph node's."""

    __slots__ = ("__weakref__", "epsilon", "seal", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.epsilon: Epsilon | None = None
        """Of the normalization that saved it; None: none was running."""
        self.seal: Any = None
        """What `verify` saw at pack; None: not to be checked."""


def handle_of(record: Record, view: View, probe: Probe) -> Handle:
    """One more handle of a record, for a tensor inside it."""
    record.num_handles += 1
    return Handle(RecordView(record, view, probe))
