"""The compiled plan: what happens to the n-th tensor that a lane's forward saves.

[Note: compiled plan]
Under a plan the first lane of each kind is served by the general path of the cache,
which identifies every saved tensor and searches for recipes. A `Binding` watches it and
leaves a `Table`: one row for each call of `pack`, in order. Later lanes of the kind
look their rows up. A row checks that the tensor may be treated as the row says, and
acts. What it checks is what safety needs, at every step: that a kept tensor is no
parameter (`[Note: parameters]`), its version, and for moved bytes their identity
(`[Note: identity]`). A tensor of another size, or one too many, ends the table for its
lane: the rest goes the general way, and the lane is counted as a plan mismatch.
Most of what is kept is *quiet*: nothing is sent, released or loaded when it is packed
or used. Such rows do not even count. What they would have counted, marks and bytes,
stands at the next row of the lane that does (`Behind`), so releases and loads come
exactly where the plan wants them.
Rows act on one tensor only, so a program that saves other tensors in other places gets
more traffic or more memory, never other gradients.
(tests/ssdtrain/cache/test_table.py)
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import length_hint
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ssdtrain.cache.identity import (
    View,
    check_version,
    extent_bytes,
    identify,
    parameter_of,
    stamp_of,
)
from ssdtrain.cache.moved import Moved, MovedHandle
from ssdtrain.cache.planned import PLANNED
from ssdtrain.cache.record import (
    Handle,
    Holding,
    Kept,
    Lane,
    LaneCourse,
    ParameterView,
    Part,
    RebuiltView,
    RecordState,
    RecordView,
    Wrapped,
    handle_of,
)
from ssdtrain.cache.regions import FromRegion, PlaceHandle
from ssdtrain.cache.sizes import Look
from ssdtrain.cache.traced import untraced
from ssdtrain.cache.wrapped import WrappedHandle, unwrapped
from ssdtrain.counters import Count
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.remat.compiled import Compiled
from ssdtrain.transfer.pinned import PinnedPool
from ssdtrain.transfer.places import Place, Trip, fits, give_back, refitted

Pack = Callable[[Tensor], Handle]
Unpack = Callable[[Handle], Tensor]
Hooks = tuple[Pack, Unpack]


# -- handles --------------------------------------------------------------------------


class KeptHandle(tuple[Tensor, int]):
    """A tensor that stays, and its version. A tuple: made without a call of Python."""

    __slots__ = ()

    @property
    def source(self) -> Kept:
        """As the general path would hold it."""
        return Kept(*self)

    def get(self) -> Tensor:
        """The tensor; `InPlaceError` if it was changed after it was saved."""
        tensor, version = self
        if tensor._version != version:
            check_version(tensor, version, "a kept tensor")
        return tensor


class ParameterHandle(tuple[nn.Parameter, int]):
    """A saved parameter and its version. See [Note: parameters] in record.py."""

    __slots__ = ()

    @property
    def source(self) -> ParameterView:
        """As the general path would hold it."""
        parameter, version = self
        return ParameterView(parameter, version, None, (), 0)

    def get(self) -> Tensor:
        """The parameter; `InPlaceError` if it was changed after it was saved."""
        parameter, version = self
        if parameter._version != version:
            check_version(parameter, version, "a parameter")
        return parameter


class ParameterViewHandle(tuple[nn.Parameter, int, Part]):
    """A saved view of a parameter: whose, of which version, and how it is found."""

    __slots__ = ()

    @property
    def source(self) -> ParameterView:
        """As the general path would hold it."""
        parameter, version, part = self
        return ParameterView(parameter, version, *part)

    def get(self) -> Tensor:
        """The view; `InPlaceError` if the parameter was changed after it was saved."""
        parameter, version, part = self
        if parameter._version != version:
            check_version(parameter, version, "a parameter")
        return part.of(parameter)


class KeptItemHandle(Handle):
    """A tensor that stays, and at whose use the plan has something to do."""

    __slots__ = ("is_closed", "row", "run", "tensor", "version")

    def __init__(
        self, tensor: Tensor, version: int, row: "KeptItemRow", run: "Run"
    ) -> None:
        self.tensor = tensor
        self.version = version
        self.row = row
        self.run = run
        self.is_closed = False
        """Whether its bytes have been booked as gone."""

    @property  # what is an attribute of others would be a second copy here
    def source(self) -> Kept:  # type: ignore[override]
        """As the general path would hold it."""
        return Kept(self.tensor, self.version)

    def get(self) -> Tensor:
        """The tensor; `InPlaceError` if it was changed after it was saved."""
        if self.tensor._version != self.version:
            check_version(self.tensor, self.version, self.row.name)
        self.run.use(self)
        return self.tensor


# -- rows -----------------------------------------------------------------------------


class Behind(NamedTuple):
    """What quiet rows, packed or used since the last one that counts, have not."""

    marks: int = 0
    num_bytes: int = 0
    uses: int = 0


NOTHING = Behind()


class Row(Protocol):
    """One call of `pack`."""

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """The handle for autograd."""


class GeneralRow:
    """Served by the general path: recipes, and tensors that are not plain."""

    __slots__ = ("behind", "item", "number", "used_behind")

    def __init__(self, item: int = -1, number: int = -1) -> None:
        self.item = item
        self.number = number
        self.behind = self.used_behind = NOTHING

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """As the general path does."""
        return run.pack_generally(tensor, self)


class RebuiltRow:
    """An item that the plan rebuilds, by a recipe that was found and admitted before.

    What safety needs is asked again: [Note: compiled recipes] in remat/compiled.py.
    Where an answer is another one, the general path searches.
    """

    __slots__ = (
        "behind",
        "compiled",
        "item",
        "marks",
        "num_bytes",
        "number",
        "used_behind",
    )

    def __init__(self, spec: "Spec", compiled: Compiled, number: int) -> None:
        self.behind = self.used_behind = NOTHING
        self.num_bytes = spec.num_bytes
        self.item = spec.item
        self.marks = spec.marks
        self.compiled = compiled
        self.number = number

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """A handle that makes it again."""
        if tensor.nbytes == self.num_bytes and run.may_move(tensor):
            return run.rebuild(self, tensor)
        return run.pack_generally(tensor, self)


class RebuiltAgainRow:
    """Another handle of an item that is rebuilt."""

    __slots__ = ("behind", "item", "num_bytes", "number", "used_behind")

    def __init__(self, spec: "Spec", number: int) -> None:
        self.behind = self.used_behind = NOTHING
        self.num_bytes = spec.num_bytes
        self.item = spec.item
        self.number = number

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """A handle of the same recipe, if these are its bytes."""
        if tensor.nbytes == self.num_bytes and run.may_move(tensor):
            return run.rebuild_again(self, tensor)
        return run.pack_generally(tensor, self)


class EndRow:
    """Behind the last one."""

    __slots__ = ()

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """One tensor more than the plan knows."""
        return run.leave(tensor)


class ParameterRow:
    """A parameter."""

    __slots__ = ("num_bytes", "parameter")

    def __init__(self, parameter: nn.Parameter, num_bytes: int) -> None:
        self.parameter = weakref.ref(parameter)
        self.num_bytes = num_bytes

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """Another tensor than this parameter: see `Run.hooks`."""
        return run.leave(tensor)


class ParameterViewRow:
    """A view of a parameter, such as `weight.t()`."""

    __slots__ = ("_parameter", "_part", "num_bytes")

    def __init__(self, parameter: nn.Parameter, num_bytes: int) -> None:
        self._parameter = weakref.ref(parameter)
        self._part: Part | None = None
        """Where the last one lay."""
        self.num_bytes = num_bytes

    def pack(self, tensor: Tensor, run: "Run") -> Any:
        """A handle that finds the view again in the parameter's data."""
        base, parameter = tensor._base, self._parameter()
        if parameter is None or base is not parameter:
            return run.leave(tensor)
        part = self._part
        if part is None or not part.is_of(tensor, parameter):
            found = ParameterView.of(tensor, parameter)
            if found is None or found.shape is None:
                return run.leave(tensor)
            self._part = part = Part(found.shape, found.stride, found.offset)
        return ParameterViewHandle((parameter, tensor._version, part))


class KeptRow:
    """A tensor below `min_bytes`, one that never moves, or a quiet item."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """A parameter, or of another size: see `Run.hooks`."""
        return run.leave(tensor)


class KeptItemRow:
    """An item that the plan keeps, where it has something to do."""

    __slots__ = (
        "behind",
        "closes",
        "is_first",
        "item",
        "marks",
        "name",
        "num_bytes",
        "used_behind",
    )

    def __init__(self, spec: "Spec", name: str, *, closes: bool) -> None:
        self.num_bytes = spec.num_bytes
        self.item = spec.item
        self.marks = spec.marks
        self.is_first = spec.is_first
        self.behind = self.used_behind = NOTHING
        self.name = name
        self.closes = closes
        """Whether backward used this handle of the item last."""

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """Keep it, unless it is a parameter or of another size."""
        if type(tensor) is Tensor and tensor.nbytes == self.num_bytes:
            base = tensor._base
            if base is None or type(base) is Tensor:
                if self.is_first:
                    run.keep(self)
                return KeptItemHandle(tensor.detach(), tensor._version, self, run)
        return run.leave(tensor)


class MoveRow:
    """An item that the plan moves away."""

    __slots__ = ("behind", "extent_bytes", "item", "marks", "num_bytes", "order")

    def __init__(self, spec: "Spec", order: Order) -> None:
        self.behind = NOTHING
        self.extent_bytes = spec.extent_bytes
        self.num_bytes = spec.num_bytes
        self.item = spec.item
        self.marks = spec.marks
        self.order = order

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """Identify its bytes and send them off."""
        if tensor.nbytes == self.num_bytes and run.may_move(tensor):
            return run.move(self, tensor)
        return run.leave(tensor)


class HostRow:
    """An item that the plan moves to host memory, to the same place in every step.

    It fills its base without gaps; `MoveRow` serves all others.
    """

    __slots__ = (
        "behind",
        "free",
        "is_shared",
        "item",
        "marks",
        "name",
        "num_bytes",
        "order",
        "used_behind",
    )

    def __init__(self, spec: "Spec", order: Order, *, is_shared: bool) -> None:
        self.behind = self.used_behind = NOTHING
        self.num_bytes = spec.num_bytes
        self.item = spec.item
        self.marks = spec.marks
        self.order = order
        self.name = order.name
        self.is_shared = is_shared
        """Whether other rows save the same bytes."""
        self.free: list[Place] = []

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """Send it off."""
        if tensor.nbytes == self.num_bytes and run.may_move(tensor):
            return run.send(self, tensor)
        return run.leave(tensor)


class HostAgainRow:
    """Another handle of an item of a `HostRow`."""

    __slots__ = ("item", "num_bytes", "used_behind")

    def __init__(self, spec: "Spec") -> None:
        self.used_behind = NOTHING
        self.num_bytes = spec.num_bytes
        self.item = spec.item

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """A handle of the same bytes, if these are they."""
        if tensor.nbytes == self.num_bytes and run.may_move(tensor):
            return run.send_again(self, tensor)
        return run.leave(tensor)


class AgainRow:
    """Another handle of an item that moves."""

    __slots__ = ("item", "num_bytes")

    def __init__(self, spec: "Spec") -> None:
        self.num_bytes = spec.num_bytes
        self.item = spec.item

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """A handle of the same record, if these are its bytes."""
        if tensor.nbytes == self.num_bytes and run.may_move(tensor):
            return run.move_again(self, tensor)
        return run.leave(tensor)


class RegionRow:
    """A tensor that its region's forward makes again: see [Note: regions].

    It is dropped when the forward has ended, so nothing asks which bytes it is.
    """

    __slots__ = ("num_bytes", "own_bytes")

    def __init__(self, num_bytes: int, own_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.own_bytes = own_bytes
        """Of its record; 0: another row counts them."""

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """Outside of its region, or no plain tensor: see `Run.hooks`."""
        return run.leave(tensor)


class RegionItemRow:
    """As `RegionRow`, where the plan has something to do."""

    __slots__ = (
        "behind",
        "is_first",
        "item",
        "marks",
        "num_bytes",
        "own_bytes",
        "used_behind",
    )

    def __init__(self, spec: "Spec", own_bytes: int) -> None:
        self.behind = self.used_behind = NOTHING
        self.num_bytes = spec.num_bytes
        self.own_bytes = own_bytes
        self.item = spec.item
        self.is_first = spec.is_first
        self.marks = spec.marks

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """A place in the running region."""
        return run.remake(self, tensor, self.own_bytes)


class PlannedUse(NamedTuple):
    """The use of a `RegionItemRow`."""

    row: RegionItemRow
    run: "Run"

    def begin(self) -> int | None:
        """Count it, and release what is due."""
        return self.run.begin_use(self.row)

    def end(self, at: int | None) -> None:
        """Load what the plan wants back by now."""
        self.run.end_use(at)


class PlacedRow:
    """A tensor that is stored, and saved in a region's forward: it has a place there,
    so that those behind it find theirs in a re-run."""

    __slots__ = ("inner",)

    def __init__(self, inner: Row) -> None:
        self.inner = inner

    def pack(self, tensor: Tensor, run: "Run") -> Any:
        """The handle of its own row."""
        return run.pack_placed(self.inner, tensor)


class WrappedRow:
    """A tensor around a plain one, which has a row of its own: [Note: wrappers]."""

    __slots__ = ("inner",)

    def __init__(self, inner: Row) -> None:
        self.inner = inner

    def pack(self, tensor: Tensor, run: "Run") -> Handle:
        """A handle around the part's."""
        found = unwrapped(tensor)
        if found is None:
            return run.leave(tensor)
        local, inner = found.local, self.inner
        if type(inner) is KeptRow:
            if local.nbytes != inner.num_bytes:
                return run.leave(tensor)
            handle: Any = KeptHandle((local, local._version))
        elif tensor._version or parameter_of(tensor) is not None:
            # The part's version says nothing, so only what was never changed moves.
            return run.leave(tensor)
        else:
            handle = inner.pack(local, run)
        return WrappedHandle(tensor, found.build, handle, run.bring_back)


COUNTING = (GeneralRow, KeptItemRow, MoveRow, HostRow, RebuiltRow, RegionItemRow)
"""Rows that count when they are packed, also for the quiet ones before them."""
COUNTING_USES = (
    *(GeneralRow, KeptItemRow, HostRow, HostAgainRow, RebuiltRow),
    *(RebuiltAgainRow, RegionItemRow),
)
"""Rows that count when they are used."""
QUIET = (KeptRow, RegionRow)
"""Rows that do not count."""
BY_NUMBER = (GeneralRow, RebuiltRow, RebuiltAgainRow)
"""Rows whose handles know the row by its number."""


# -- tables ---------------------------------------------------------------------------


class Totals(NamedTuple):
    """What one row adds to the counters."""

    num_records: int = 0
    kept_bytes: int = 0
    parameter_bytes: int = 0


@dataclass(kw_only=True)
class Spec:
    """What one call of `pack` turned out to be in the lane that was watched."""

    num_bytes: int
    """Of the tensor as it was saved, a view perhaps."""
    parameter: nn.Parameter | None = None
    is_whole: bool = True
    """Whether it is the parameter itself, and not a view of it."""
    item: int = -1
    """-1: not an item of the plan."""
    is_first: bool = False
    """Whether it is the item's first handle."""
    is_plain: bool = True
    """False: only the general path, or a recipe, can tell."""
    is_rebuilt: bool = False
    """Whether a recipe made it again."""
    compiled: Compiled | None = None
    """That recipe, where it can be asked for again; of the first handle alone."""
    is_wrapped: bool = False
    """Whether all this is said of the part of a wrapper."""
    is_remade: bool = False
    """Whether its region's forward makes it again."""
    is_placed: bool = False
    """Whether it has a place in its region, and is stored."""
    region: int = -1
    """The region call in whose forward it is saved."""
    serves: int = -1
    """The region call that stores it as its input."""
    is_dense: bool = False
    """Whether it fills its record without gaps, in the record's first dtype."""
    marks: int = 0
    """By how many its pack moved the course on."""
    acts_at_pack: bool = False
    """Whether something was released when it was packed."""
    acts_at_use: bool = False
    """Whether something was released or loaded when it was used."""
    last_use: int = -1
    """Number of its last use in backward."""
    extent_bytes: int = 0
    """Of its record: the tensor may be a view inside."""
    look: Look | None = None
    """What a tensor of another size must be like."""

    @property
    def is_loud(self) -> bool:
        """Whether the plan does something when it is packed or used."""
        return self.acts_at_pack or self.acts_at_use


@dataclass(frozen=True)
class Table:
    """Rows in the order of `pack`; the last one is `EndRow`."""

    rows: tuple[Row, ...]
    totals: tuple[Totals, ...]
    """Of each row."""
    behind: Behind
    """Quiet rows behind the last one that counts."""
    looks: tuple[Look | None, ...]
    """Of each row; None where another size is not the row's to serve."""

    def close(self, pool: PinnedPool) -> None:
        """Give the places of its rows back; what is on its way keeps its own."""
        for row in map(bare, self.rows):
            if type(row) is HostRow:
                while row.free:
                    give_back(pool, row.free.pop())

    @cached_property
    def kept_bytes(self) -> int:
        """Of all rows."""
        return sum(total.kept_bytes for total in self.totals)

    def counters(self, num_packed: int) -> dict[Count, int]:
        """What the counters are told of kept rows and parameters, once a lane."""
        records, kept, parameters = (
            sum(column)
            for column in zip(Totals(), *self.totals[:num_packed], strict=True)
        )
        return {
            Count.RECORDS: records,
            Count.SAVED: kept,
            Count.KEPT: kept,
            Count.PARAMETERS: parameters,
        }


class Binding:
    """Watches a lane that the general path serves, to compile its plan."""

    def __init__(self, cache: Any, lane: Lane, plan: Plan, general: Hooks) -> None:
        self.plan = plan
        self._pack, self._unpack = general
        self._cache = cache
        self._lane = lane
        self._specs: list[Spec] = []
        self._items: set[int] = set()
        self._inputs: set[int] = set()
        """Rows whose tensors a recipe reads."""
        self._compiled: set[int] = set()
        """Items whose recipes rows can ask for again."""
        self._dtypes: dict[int, torch.dtype] = {}
        self._used: list[int] = []
        """Rows in the order in which backward used their tensors."""

    def pack(self, tensor: Tensor) -> Handle:
        """The general path, watched."""
        course, moves = self._cache.course, self._cache.moves
        before, num_acts = course.mark, moves.num_acts
        call = self._cache.regions.current
        num_places = 0 if call is None else call.num_places
        handle = self._pack(tensor)
        spec = self._spec(tensor, handle)
        spec.serves, spec.region = course.storing, course.region
        if course.storing >= 0:
            if spec.is_wrapped:
                self._inputs.add(spec.item)
        elif call is not None and spec.parameter is None:
            self._place(spec, tensor, handle, call.num_places > num_places)
        if type(tensor) is Tensor:
            spec.look = Look(tensor.dtype, tuple(tensor.shape))
        spec.marks = course.mark - before
        if spec.compiled is not None:
            # What its recipe has stored meanwhile has marks of its own.
            spec.marks -= course.of(self._lane).num_items - spec.item - 1
        spec.acts_at_pack = moves.num_acts > num_acts
        handle.number = len(self._specs)
        self._specs.append(spec)
        return handle

    def _place(
        self, spec: Spec, tensor: Tensor, handle: Handle, is_placed: bool
    ) -> None:
        """It was saved in the forward of a region that runs again."""
        source = handle.source
        plain = is_placed and self._cache.is_movable(tensor)
        if isinstance(source, FromRegion):
            spec.is_remade, spec.extent_bytes = plain, handle.num_bytes
        elif isinstance(source, RecordView) and source.record.region is not None:
            spec.is_remade = plain
        else:
            spec.is_placed = plain
        spec.is_plain = spec.is_plain and spec.is_placed

    def unpack(self, handle: Handle) -> Tensor:
        """The general path, watched."""
        if self._cache.course.is_using:  # for a region that runs again
            return self._unpack(handle)
        num_acts = self._cache.moves.num_acts
        tensor = self._unpack(handle)
        if handle.number >= 0:
            spec = self._specs[handle.number]
            spec.acts_at_use |= self._cache.moves.num_acts > num_acts
            spec.last_use = len(self._used)
            self._used.append(handle.number)
        return tensor

    def _spec(self, tensor: Tensor, handle: Handle) -> Spec:
        source = handle.source
        if isinstance(source, Wrapped):
            found = unwrapped(tensor)
            if found is None:
                return Spec(num_bytes=0, is_plain=False)
            spec = self._spec(found.local, source.inner)
            spec.is_wrapped = True
            spec.compiled, spec.is_rebuilt = None, False
            spec.is_plain = spec.is_plain and (spec.item < 0 or not tensor._version)
            return spec
        if isinstance(source, ParameterView):
            whole = source.shape is None
            return Spec(
                num_bytes=tensor.nbytes, parameter=source.parameter, is_whole=whole
            )
        if isinstance(source, Kept):
            return Spec(num_bytes=_num_bytes(tensor), is_plain=type(tensor) is Tensor)
        if isinstance(source, FromRegion):
            return Spec(num_bytes=_num_bytes(tensor), is_plain=False)
        owner = source.record if isinstance(source, RecordView) else source.rebuilt
        first = owner.item not in self._items
        self._items.add(owner.item)
        if isinstance(source, RebuiltView):
            if source.rebuilt.compiled is not None:
                self._compiled.add(owner.item)
            for holder in source.rebuilt.holders:
                self._inputs.add(_item_of(holder))
        own = owner.lane is self._lane
        plain = isinstance(source, RecordView) and own
        rebuilt = source.rebuilt if isinstance(source, RebuiltView) and own else None
        dense = is_dense_in(tensor, source.view, owner.num_bytes) and tensor.numel() > 0
        if first:
            self._dtypes[owner.item] = tensor.dtype
        dense = dense and self._dtypes[owner.item] is tensor.dtype
        return Spec(
            num_bytes=tensor.nbytes,
            extent_bytes=owner.num_bytes,
            item=owner.item,
            is_first=first,
            is_plain=plain,
            is_dense=dense,
            is_rebuilt=rebuilt is not None,
            compiled=None if rebuilt is None or not first else rebuilt.compiled,
        )

    def table(self) -> Table | None:
        """The compiled plan; None if the lane left its plan."""
        course = self._lane.course
        if course is None or course.orders is None:
            return None
        orders = course.orders
        last: dict[int, int] = {}
        for number, spec in enumerate(self._specs):
            before = last.get(spec.item)
            if before is None or spec.last_use > self._specs[before].last_use:
                last[spec.item] = number
        general = self._items_served_generally(orders)
        counts = Counter(spec.item for spec in self._specs)
        sparse = {spec.item for spec in self._specs if not spec.is_dense}
        if not self._cache.moves_to_host:
            sparse.update(range(len(orders)))
        loud = {number for number, spec in enumerate(self._specs) if spec.is_loud}
        uses = [n for n in self._used if self._specs[n].item >= 0]
        # Somebody must notice that backward begins and that it ends.
        loud.update(uses[:1] + uses[-1:])
        loud.update(self._first_of_regions(range(len(self._specs))))
        loud.update(self._first_of_regions(uses))
        closing = {last[spec.item] for spec in self._specs}
        rows: list[Row] = []
        for number, spec in enumerate(self._specs):
            row = self._row(number, orders, general, closes=number in closing)
            if type(row) is KeptItemRow and number not in loud:
                row = KeptRow(spec.num_bytes)
            elif type(row) is RegionItemRow and number not in loud:
                row = RegionRow(spec.num_bytes, row.own_bytes)
            elif type(row) in (MoveRow, AgainRow) and spec.item not in sparse:
                if orders[spec.item].placement is Placement.OFFLOAD:
                    shared = counts[spec.item] > 1
                    row = (
                        HostRow(spec, orders[spec.item], is_shared=shared)
                        if spec.is_first
                        else HostAgainRow(spec)
                    )
            rows.append(row)
        behind = self._tell_of_quiet_packs(rows)
        self._tell_of_quiet_uses(rows, closing)
        totals = tuple(map(self._totals, self._specs, rows))
        looks = tuple(spec.look for spec in self._specs)
        rows = [*map(around, self._specs, rows), EndRow()]
        return Table(tuple(rows), totals, behind, looks)

    def _is_quiet(self, number: int, rows: list[Row]) -> bool:
        return type(rows[number]) in QUIET and self._specs[number].item >= 0

    def _tell_of_quiet_packs(self, rows: list[Row]) -> Behind:
        """Rows that count learn of the quiet ones before them."""
        behind = NOTHING
        for number, (spec, row) in enumerate(zip(self._specs, rows, strict=True)):
            if self._is_quiet(number, rows):
                # What a region makes again its call has booked.
                is_kept = spec.is_first and not spec.is_remade
                own_bytes = spec.num_bytes if is_kept else 0
                behind = Behind(behind.marks + spec.marks, behind.num_bytes + own_bytes)
            elif isinstance(row, COUNTING):
                row.behind, behind = behind, NOTHING
        return behind

    def _tell_of_quiet_uses(self, rows: list[Row], closing: set[int]) -> None:
        behind, freed = NOTHING, self._freed_with(rows)
        for at, number in enumerate(self._used):
            spec, row = self._specs[number], rows[number]
            if spec.item < 0 or at != spec.last_use:
                continue
            freed_bytes = freed.get(number, 0)
            if freed_bytes:
                behind = behind._replace(num_bytes=behind.num_bytes + freed_bytes)
            if self._is_quiet(number, rows):
                is_last = number in closing and not spec.is_remade
                own_bytes = spec.num_bytes if is_last else 0
                behind = Behind(0, behind.num_bytes + own_bytes, behind.uses + 1)
            elif isinstance(row, COUNTING_USES):
                row.used_behind, behind = behind, NOTHING

    def _first_of_regions(self, numbers: Iterable[int]) -> Iterable[int]:
        """The first row of each region: what was kept or freed before it must be
        booked before its bytes come alive."""
        first: dict[int, int] = {}
        for number in numbers:
            spec = self._specs[number]
            if spec.is_remade and spec.item >= 0:
                first.setdefault(spec.region, number)
        return first.values()

    def _freed_with(self, rows: list[Row]) -> dict[int, int]:
        """Bytes of inputs of regions that stay and that nobody else uses, by the row
        with whose use they go: the last one of their region."""
        last: dict[int, int] = {}
        for number in self._used:
            last[self._specs[number].region] = number
        used = {self._specs[number].item for number in self._used}
        freed: dict[int, int] = {}
        for number, spec in enumerate(self._specs):
            alone = spec.serves >= 0 and spec.is_first and spec.item not in used
            if alone and type(rows[number]) is KeptRow and spec.serves in last:
                end = last[spec.serves]
                freed[end] = freed.get(end, 0) + spec.num_bytes
        return freed

    def _totals(self, spec: Spec, row: Row) -> Totals:
        if type(row) is ParameterRow or type(row) is ParameterViewRow:
            return Totals(parameter_bytes=spec.num_bytes)
        if type(row) in (KeptItemRow, KeptRow) and spec.is_first:
            return Totals(1, spec.num_bytes)
        if type(row) in (RegionItemRow, RegionRow) and spec.is_first:
            return Totals(1)
        return Totals()

    def _items_served_generally(self, orders: Any) -> set[int]:
        """Rebuilt ones, and what their recipes read."""
        found = {
            spec.item
            for spec in self._specs
            if spec.item >= 0 and not (spec.is_plain or spec.is_remade)
        }
        for item, order in enumerate(orders):
            if order.placement not in PLANNED and item not in self._remade:
                found.add(item)
        return (found | self._inputs) - {-1}

    @cached_property
    def _remade(self) -> set[int]:
        """Items of which every handle is made again by rows."""
        remade = {spec.item for spec in self._specs if spec.is_remade}
        return remade - {spec.item for spec in self._specs if not spec.is_remade}

    def _row(self, number: int, orders: Any, general: set[int], *, closes: bool) -> Row:
        spec = self._specs[number]
        if spec.compiled is not None:
            return RebuiltRow(spec, spec.compiled, number)
        if spec.is_rebuilt and not spec.is_first and spec.item in self._compiled:
            return RebuiltAgainRow(spec, number)
        if spec.is_remade and (spec.item < 0 or spec.item in self._remade):
            is_last = spec.item < 0 or closes
            return RegionItemRow(spec, spec.extent_bytes if is_last else 0)
        if not spec.is_plain or spec.item in general:
            return GeneralRow(spec.item, number)
        if spec.parameter is not None:
            row = ParameterRow if spec.is_whole else ParameterViewRow
            return row(spec.parameter, spec.num_bytes)
        if spec.item < 0:
            return KeptRow(spec.num_bytes)
        order = orders[spec.item]
        if order.release_after <= 0:
            return KeptItemRow(spec, order.name, closes=closes)
        return MoveRow(spec, order) if spec.is_first else AgainRow(spec)


def _item_of(handle: Handle) -> int:
    source = handle.source
    if isinstance(source, RecordView):
        return source.record.item
    return source.rebuilt.item if isinstance(source, RebuiltView) else -1


def is_dense_in(tensor: Tensor, view: View, record_bytes: int) -> bool:
    """Whether a view fills its record's bytes from the first to the last, once."""
    if view.offset_bytes or view.is_conj or view.is_neg:
        return False
    if tensor.nbytes != record_bytes or tensor.storage_offset() * tensor.itemsize % 16:
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def around(spec: Spec, row: Row) -> Row:
    """The row of what was saved, given that of its part."""
    if type(row) is GeneralRow:
        return row
    if spec.is_placed:
        return PlacedRow(row)
    return WrappedRow(row) if spec.is_wrapped else row


def bare(row: Row) -> Row:
    """The row of a wrapper's part; the row itself where there is no wrapper."""
    return row.inner if isinstance(row, WrappedRow | PlacedRow) else row


def is_like(tensor: Tensor, row: RegionRow) -> bool:
    """Whether these are plain bytes of the row's size, and no parameter's."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    base = tensor._base
    return (
        (base is None or type(base) is Tensor)
        and not (tensor.is_nested or tensor.is_quantized)
        and forward_ad._current_level < 0
        and tensor.nbytes == row.num_bytes
    )


def _num_bytes(tensor: Tensor) -> int:
    return tensor.nbytes if type(tensor) is Tensor else 0


class Run:
    """One lane that follows its table. It lives as long as a handle of it."""

    def __init__(self, cache: Any, lane: Lane, table: Table, general: Hooks) -> None:
        self._cache = cache
        self._generally: Pack = untraced(general[0])
        self._back_generally: Unpack = untraced(general[1])
        self._lane = lane
        self._table = table
        self._course: LaneCourse = cache.course.of(lane)
        self._lock = cache.lock
        self.nothing: Tensor = cache.nothing
        """Empty, on the device, for probes of versions."""
        self._regions = cache.regions
        self._rows: Iterator[Row] = iter(table.rows)
        self.following: Callable[[], Row] = self._rows.__next__
        """The row of the next tensor."""
        self._moved: dict[int, weakref.ref[Moved]] = {}
        self._used: set[Any] = set()
        """Rows whose first use has told of the quiet ones before it."""
        self._num_packed: int | None = None
        """Rows that were followed; None while the table lasts."""
        self._num_sent = self._sent_bytes = self._resized_bytes = 0
        self.holding = Holding(lane)

    def bring_back(self, handle: Handle) -> Tensor:
        """A tensor of the general path, inside a wrapper."""
        return self._back_generally(handle)

    # -- forward ------------------------------------------------------------------

    def hooks(self) -> tuple[Pack, Unpack]:  # noqa: C901 (in place: no calls)
        """What autograd calls. The rows that most tensors have are served in place."""
        general, owner = self._back_generally, self._cache.owner
        regions, graph_task = self._regions, torch._C._current_graph_task_id

        def pack(tensor: Tensor) -> Any:
            row = self.following()
            if type(row) is KeptRow:
                if type(tensor) is Tensor and tensor.nbytes == row.num_bytes:
                    base = tensor._base
                    if base is None or type(base) is Tensor:
                        return KeptHandle((tensor.detach(), tensor._version))
            elif type(row) is ParameterRow and tensor is row.parameter():
                return ParameterHandle((tensor, tensor._version))
            elif type(row) is RegionRow:
                call = regions.current
                if call is not None and graph_task() == -1 and is_like(tensor, row):
                    return call.hold_planned(tensor, row.own_bytes)
            if owner.is_elsewhere:
                return self._generally(tensor)
            # mypy does not narrow by a set: each of these has `num_bytes`.
            if type(row) in SIZED and tensor.nbytes != row.num_bytes:  # type: ignore[attr-defined]
                return self.pack_resized(row, tensor)
            return row.pack(tensor, self)

        def unpack(handle: Any) -> Tensor:
            kind = type(handle)
            if kind is KeptHandle or kind is ParameterHandle:
                tensor: Tensor = handle[0]
                if tensor._version == handle[1]:
                    return tensor
            if owner.is_elsewhere:
                return self._cache.unpack(handle)  # type: ignore[no-any-return]
            if kind is Handle:
                self.count_quiet_uses(handle)
                return general(handle)
            if kind is PlaceHandle and handle.seal is not None:
                return general(handle)
            return handle.get()  # type: ignore[no-any-return]

        return pack, unpack

    def pack_resized(self, row: Any, tensor: Tensor) -> Any:
        """As the row says, for a tensor of another size: [Note: sizes]."""
        number = len(self._table.rows) - length_hint(self._rows) - 1
        look, base = self._table.looks[number], tensor._base
        plain = type(tensor) is Tensor and (base is None or type(base) is Tensor)
        if look is None or not plain or not look.fits(tensor):
            return row.pack(tensor, self)
        num_bytes = tensor.nbytes
        self._cache.course.resized(row.num_bytes, num_bytes)
        if type(row) is not KeptRow and type(row) is not KeptItemRow:
            act: Any = RESIZED[type(row)]
            movable = self.may_move(tensor)
            return act(self, row, tensor) if movable else self.leave(tensor)
        if self._table.totals[number].num_records:
            with self._lock:
                self._resized_bytes += num_bytes - row.num_bytes
                self._live(num_bytes - row.num_bytes)
        if type(row) is KeptItemRow:
            if row.is_first:
                self.keep(row)
            return KeptItemHandle(tensor.detach(), tensor._version, row, self)
        return KeptHandle((tensor.detach(), tensor._version))

    def remake(
        self, row: RegionRow | RegionItemRow, tensor: Tensor, own_bytes: int
    ) -> Handle:
        """A place in the running region, whose forward will make it again."""
        call = self._regions.current
        if call is None or not self.may_move(tensor):
            return self.leave(tensor)
        handle = call.hold_planned(tensor, own_bytes)
        if type(row) is RegionItemRow:
            handle.on_use = PlannedUse(row, self)
            with self._lock:
                self._cache.collect()
                self._cache.course.mark += row.marks + row.behind.marks
                self._live(row.behind.num_bytes)
                self._course.num_items = max(self._course.num_items, row.item + 1)
                self._cache.moves.release_due()
        return handle  # type: ignore[no-any-return]

    def remake_resized(self, row: RegionRow | RegionItemRow, tensor: Tensor) -> Handle:
        """As `remake`, for a tensor of another size."""
        return self.remake(row, tensor, tensor.nbytes if row.own_bytes else 0)

    def pack_placed(self, row: Any, tensor: Tensor) -> Any:
        """As its own row does, and with a place in the running region."""
        call = self._regions.current
        if call is None or not self.may_move(tensor):
            return self.leave(tensor)
        num_places = call.num_places
        if tensor.nbytes != row.num_bytes:
            handle = self.pack_resized(row, tensor)
        elif type(row) is KeptRow:
            handle = KeptHandle((tensor.detach(), tensor._version))
        else:
            handle = row.pack(tensor, self)
        if call.num_places == num_places:  # the general path gives one by itself
            call.place(tensor)
        return handle

    def keep(self, row: KeptItemRow) -> None:
        """A mark: an item that stays."""
        with self._lock:
            self._advance(row, row.marks)
            self._live(row.num_bytes)

    def _live(self, num_bytes: int) -> None:
        """Bytes that stay came alive, or are gone: no record knows of them."""
        if num_bytes:
            self._cache.ledger.live(num_bytes)
            self.holding.live_bytes += num_bytes

    def _advance(self, row: Any, marks: int) -> None:
        cache, behind = self._cache, row.behind
        cache.collect()
        cache.course.mark += marks + behind.marks
        self._course.num_items = row.item + 1
        self._live(behind.num_bytes)
        cache.moves.release_due()

    def may_move(self, tensor: Tensor) -> bool:
        """Whether its bytes may leave: plain, on the device, no parameter."""
        return self._cache.is_movable(tensor)  # type: ignore[no-any-return]

    def move(self, row: MoveRow, tensor: Tensor) -> Handle:
        """A mark: an item whose bytes leave."""
        with self._lock:
            key, view = identify(tensor)
            other = key.end_byte - key.start_byte != row.extent_bytes
            if other and tensor.nbytes == row.num_bytes:
                return self.leave(tensor)
            self._advance(row, row.marks)
            record = self._cache.move(tensor, key, row.order, row.item)
            handle = handle_of(record, view, self._cache.probe_of(tensor))
            self._cache.recipes.note(tensor, handle)
            return handle

    def move_again(self, row: "AgainRow | HostAgainRow", tensor: Tensor) -> Handle:
        """Another tensor in a record that was opened before."""
        with self._lock:
            key, view = identify(tensor)
            record = self._course.record(row.item)
            if record is None or record.key != key:
                return self.leave(tensor)
            handle = handle_of(record, view, self._cache.probe_of(tensor))
            self._cache.recipes.note(tensor, handle)
            return handle

    def send(self, row: HostRow, tensor: Tensor) -> Handle:
        """A mark: an item whose bytes leave for its row's place."""
        base = tensor._base
        if tensor.nbytes != (tensor if base is None else base).nbytes:
            return self.leave(tensor)
        cache = self._cache
        with self._lock:
            place = cache.place_of(row.free, tensor)
            if place is None:
                return self.pack_generally(tensor, row)
            if not fits(place, tensor):
                if place.memory.nbytes == tensor.nbytes:
                    row.free.append(place)
                    return self.leave(tensor)
                place = refitted(cache.offloader.pool, place, tensor)
                if place is None:
                    return self.pack_generally(tensor, row)
            self._advance(row, row.marks)
            trip = Trip(place, row.free)
            moved = Moved(tensor, row.name, self._lane, cache.ledger, trip)
            cache.send(moved, cache.course.mark + row.order.release_after)
            self._num_sent += 1
            self._sent_bytes += moved.num_bytes
            found = self._moved[row.item] = weakref.ref(moved)
            self._course.records[row.item] = found
            if row.is_shared:
                moved.stamp = stamp_of(tensor)
                moved.start_byte, moved.end_byte = extent_bytes(tensor)
            return MovedHandle(moved, tensor, self, row)

    def send_again(self, row: HostAgainRow, tensor: Tensor) -> Handle:
        """Another tensor on the bytes of an item that was sent off before."""
        with self._lock:
            found = self._moved.get(row.item)
            moved = None if found is None else found()
            if moved is None:
                return self.move_again(row, tensor)  # it was served by the general path
            start, end = extent_bytes(tensor)
            inside = moved.start_byte <= start and end <= moved.end_byte
            same = moved.stamp is stamp_of(tensor) and tensor._version == moved.version
            if not (inside and same):
                return self.leave(tensor)
            moved.num_handles += 1
            handle = MovedHandle(moved, tensor, self, row)
            handle.view(tensor, (start - moved.start_byte) // tensor.itemsize)
            return handle

    def fetch(self, moved: Moved, row: "HostRow | HostAgainRow") -> Tensor:
        """A mark: backward asks for an item that was sent off."""
        cache, course = self._cache, self._course
        with self._lock:
            if row.used_behind is not NOTHING and row not in self._used:
                self._used.add(row)
                self._use_quiet(row, again=False)
            cache.collect()
            if not self._lane.in_backward:
                cache.enter_backward(self._lane)
            at = cache.course.count_use(course)
            cache.moves.release_due()
            state = moved.state
            if state is RecordState.LEAVING:
                cache.forward_moved(moved)
            elif state is RecordState.AWAY:
                cache.load_moved(moved)
            if moved.state is RecordState.RETURNING:
                moved.arrive(cache.copies)
            data = moved.data
            if data is None:
                raise RuntimeError(f"{moved.name}: no data in {moved.state}")
            if at is not None and course.orders is not None:
                cache.moves.load_at(course, at, cache.start_load)
            moved.num_uses += 1
            if moved.num_uses >= moved.num_handles:
                moved.put_back()
            return data

    def rebuild(self, row: RebuiltRow, tensor: Tensor) -> Handle:
        """A mark: an item that will be made again."""
        cache, recipes = self._cache, self._cache.recipes
        with self._lock:
            key, view = identify(tensor)
            inside = cache.regions.current is not None
            asked = None if inside else recipes.ask(row.compiled, tensor, key)
            if asked is None:
                return self.pack_generally(tensor, row)
            self._advance(row, row.marks)
            before, cache.course.serving = cache.course.serving, row.item
            try:
                handle = recipes.take(row.compiled, asked, tensor, key, view)
            finally:
                cache.course.serving = before
            handle.source.rebuilt.item = row.item
            handle.number = row.number
            recipes.note(tensor, handle)
            cache.verifier.seal(handle, tensor)
            if self._course.orders is None:
                self._stop()
            return handle  # type: ignore[no-any-return]

    def rebuild_again(self, row: RebuiltAgainRow, tensor: Tensor) -> Handle:
        """Another handle of an item that will be made again."""
        recipes = self._cache.recipes
        with self._lock:
            key, view = identify(tensor)
            handle = recipes.again(tensor, key, view)
            if handle is None:
                return self.pack_generally(tensor, row)
            handle.number = row.number
            recipes.note(tensor, handle)
            self._cache.verifier.seal(handle, tensor)
            return handle  # type: ignore[no-any-return]

    def pack_generally(self, tensor: Tensor, row: Any) -> Handle:
        """A row that is the general path's; it may find that the plan does not fit."""
        behind = row.behind
        if behind is not NOTHING:
            with self._lock:
                self._cache.course.mark += behind.marks
                self._live(behind.num_bytes)
        # Quiet rows before it may have been told to a row of no new item.
        self._course.num_items = max(self._course.num_items, row.item)
        handle = self._generally(tensor)
        if type(handle) is Handle and isinstance(row, BY_NUMBER):
            handle.number = row.number
        if self._course.orders is None:
            self._stop()
        return handle

    def leave(self, tensor: Tensor) -> Handle:
        """Another tensor than the row's: the lane leaves the table for good."""
        with self._lock:
            self._stop(behind=1)
            self._cache.course.leave(self._course)
        return self._generally(tensor)

    def _stop(self, behind: int = 0) -> None:
        if self._num_packed is None:
            self._num_packed = len(self._table.rows) - length_hint(self._rows) - behind
            self.following = repeat(GeneralRow()).__next__

    def end(self) -> None:
        """Forward has ended: what was counted by the table alone is booked."""
        packed = self._num_packed
        if packed is None:
            packed = len(self._table.rows) - length_hint(self._rows)
            if packed == len(self._table.totals):
                with self._lock:
                    self._cache.course.mark += self._table.behind.marks
                    self._live(self._table.behind.num_bytes)
        counters = self._table.counters(packed)
        counters[Count.RECORDS] += self._num_sent
        counters[Count.SAVED] += self._sent_bytes + self._resized_bytes
        counters[Count.KEPT] += self._resized_bytes
        counters[Count.OFFLOADED] = self._sent_bytes
        self._cache.ledger.counters.add_all(counters)

    # -- backward -----------------------------------------------------------------

    def use(self, handle: KeptItemHandle) -> None:
        """A mark: backward asks for an item that stayed."""
        row = handle.row
        with self._lock:
            self._use_quiet(row, handle.is_closed)
            self._cache.use_kept(self._lane)
            if not handle.is_closed:
                handle.is_closed = True
                if row.closes:
                    num_bytes = row.num_bytes + self._more(row.num_bytes)
                    self.holding.live_bytes -= num_bytes
                    self._cache.ledger.hand_over(num_bytes)

    def begin_use(self, row: RegionItemRow) -> int | None:
        """A mark: backward asks for what a region makes again."""
        cache = self._cache
        with self._lock:
            if row.used_behind is not NOTHING:
                self._use_quiet(row, row in self._used)
                self._used.add(row)
            cache.collect()
            if not self._lane.in_backward:
                cache.enter_backward(self._lane)
            at: int | None = cache.course.count_use(self._course)
            cache.moves.release_due()
            return at

    def end_use(self, at: int | None) -> None:
        """It is there: load what the plan wants back by now."""
        if at is not None and self._course.orders is not None:
            with self._lock:
                self._cache.moves.load_at(self._course, at, self._cache.start_load)

    def count_quiet_uses(self, handle: Handle) -> None:
        """Before a tensor of the general path is used."""
        row = self._table.rows[handle.number]
        if isinstance(row, BY_NUMBER) and row.used_behind is not NOTHING:
            with self._lock:
                self._use_quiet(row, row in self._used)
                self._used.add(row)

    def _use_quiet(self, row: Any, again: bool) -> None:
        """Count the uses that were not counted; once, if backward comes again."""
        behind = row.used_behind
        if not again:
            self._cache.course.mark += behind.uses
            self._course.num_uses += behind.uses
            self._live(-behind.num_bytes - self._more(behind.num_bytes))

    def _more(self, planned_bytes: int) -> int:
        """By how much kept tensors are larger than the plan's: their share of all."""
        if not self._resized_bytes:
            return 0
        kept_bytes = max(1, self._table.kept_bytes)
        return self._resized_bytes * planned_bytes // kept_bytes


SIZED = frozenset(
    {KeptRow, KeptItemRow, MoveRow, HostRow, HostAgainRow, AgainRow}
    | {RegionRow, RegionItemRow}
)
"""Rows that serve a tensor of another size."""
RESIZED = {
    MoveRow: Run.move,
    HostRow: Run.send,
    HostAgainRow: Run.send_again,
    AgainRow: Run.move_again,
    RegionRow: Run.remake_resized,
    RegionItemRow: Run.remake_resized,
}


class Tables:
    """Tables of the plan in force, by kind of lane."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self.tables: dict[str, Table] = {}

    def hooks_of(
        self, cache: Any, lane: Lane, plan: Plan | None, general: Hooks
    ) -> Hooks:
        """What serves the forward of a lane; `general` are the general path's."""
        if plan is not self._plan:
            self._plan = plan
            self.close(cache.offloader.pool)
        if plan is None or lane.kind not in plan.orders:
            return general
        table = self.tables.get(lane.kind)
        if table is None:
            lane.binding = binding = Binding(cache, lane, plan, general)
            return binding.pack, binding.unpack
        run = Run(cache, lane, table, general)
        lane.learns = False
        lane.run = run
        cache.retired.watch(run, run.holding)
        lane.num_live += 1
        return run.hooks()

    @property
    def free_bytes(self) -> int:
        """Pinned bytes of places where no tensor is."""
        rows = (bare(row) for table in self.tables.values() for row in table.rows)
        free = (place for row in rows if type(row) is HostRow for place in row.free)
        return sum(place.buffer.capacity_bytes for place in free)

    def close(self, pool: PinnedPool) -> None:
        """Forget all tables, and give their places back."""
        for table in self.tables.values():
            table.close(pool)
        self.tables.clear()

    def left(self, lane: Lane) -> None:
        """Backward of a lane has ended, or its graph is gone."""
        binding, lane.binding = lane.binding, None
        if binding is None or binding.plan is not self._plan or not lane.in_backward:
            return
        table = binding.table()
        if table is not None and lane.kind not in self.tables:
            self.tables[lane.kind] = table
