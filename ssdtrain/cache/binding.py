"""Compiles a plan: watches a lane that the general path serves, and leaves its rows.

See [Note: compiled plan] in table.py.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssdtrain.cache.bysize import SizedPlan
from ssdtrain.cache.executor import PLANNED
from ssdtrain.cache.identity import View
from ssdtrain.cache.quiet import Passage, Watched
from ssdtrain.cache.record import (
    NO_ITEM,
    Handle,
    Kept,
    Lane,
    ParameterView,
    Rebuilt,
    RebuiltView,
    RecordView,
    Wrapped,
    item_of,
)
from ssdtrain.cache.rows import (
    BY_NUMBER,
    COUNTING,
    COUNTING_USES,
    QUIET,
    STORING,
    EndRow,
    GeneralRow,
    HostAgainRow,
    HostRow,
    KeptItemRow,
    KeptRow,
    ParameterRow,
    ParameterViewRow,
    PlacedRow,
    RebuiltAgainRow,
    RebuiltRow,
    RecordAgainRow,
    RecordRow,
    RegionItemRow,
    RegionRow,
    Row,
    StayRow,
    around,
)
from ssdtrain.cache.savedindex import FromRegion
from ssdtrain.cache.sizes import TensorMetadata
from ssdtrain.cache.spec import NOTHING, QuietCounts, Spec
from ssdtrain.cache.table import Hooks, RegionPart, Sizes, Table, Totals
from ssdtrain.cache.wrapped import FlattenedHandle, as_made, unwrapped
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order


class Binding:
    """Watches a lane that the general path serves, to compile its plan."""

    def __init__(
        self, cache: Any, lane: Lane, sized: SizedPlan, general: Hooks
    ) -> None:
        self.sized = sized
        self._pack, self._unpack = general
        self._cache = cache
        self._lane = lane
        self._specs: list[Spec] = []
        self._items: set[int] = set()
        self._parts_of_wrappers: set[int] = set()
        """Items that lie in a wrapper: [Note: flattened] in wrapped.py."""
        self._inputs: set[int] = set()
        """Items that recipes read."""
        self._compiled: set[int] = set()
        """Items whose recipes rows can ask for again."""
        self._dtypes: dict[int, torch.dtype] = {}
        self._passages: dict[int, Passage] = {}
        self._used: list[int] = []
        """Rows in the order in which backward used their tensors."""

    def pack(self, tensor: Tensor) -> Handle:
        """The general path, watched."""
        cursor, moves = self._cache.cursor, self._cache.moves
        before, num_acts = cursor.mark, moves.num_acts
        call = self._cache.regions.current
        num_places = 0 if call is None else call.num_places
        handle = self._pack(tensor)
        spec = self._spec(tensor, handle)
        spec.serves, spec.region = cursor.storing, cursor.region
        if cursor.storing >= 0:
            if spec.is_wrapped:
                self._inputs.add(spec.item)
        elif call is not None and spec.parameter is None:
            if call.num_places > num_places:
                spec.index = num_places
            self._place(spec, tensor, handle, call.num_places > num_places)
        if type(tensor) is Tensor and not tensor.is_nested:  # those have no sizes
            spec.look = TensorMetadata(tensor.dtype, tuple(tensor.shape))
        spec.marks = cursor.mark - before
        if spec.compiled is not None:
            # What its recipe has stored meanwhile has marks of its own.
            spec.marks -= cursor.of(self._lane).num_items - spec.item - 1
        spec.acts_at_pack = moves.num_acts > num_acts
        spec.by_norm = getattr(handle, "epsilon", None) is not None
        handle.number = len(self._specs)
        self._specs.append(spec)
        return handle

    def watched(self, arguments: Iterable[Any]) -> Watched:
        """What is around a call of a layer with these arguments."""
        counters = self._cache.ledger.counters
        return Watched(self._passages, self._lane, self._specs, counters, arguments)

    def _place(
        self, spec: Spec, tensor: Tensor, handle: Handle, is_placed: bool
    ) -> None:
        """It was saved in the forward of a region that runs again."""
        source = handle.source
        plain = is_placed and self._cache.is_movable(tensor)
        if isinstance(source, FromRegion):
            spec.is_remade, spec.extent_bytes = plain, handle.num_bytes
        elif isinstance(source, RecordView) and source.record.region is not None:
            spec.is_remade = plain and source.record.lane is self._lane
        else:
            spec.is_placed = plain
        spec.is_plain = spec.is_plain and spec.is_placed

    def unpack(self, handle: Handle) -> Tensor:
        """The general path, watched."""
        if self._cache.cursor.is_using:  # for a region that runs again
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
            return self._spec_of_part(tensor, source.inner)
        if isinstance(handle, FlattenedHandle):
            return self._spec_of_parts(handle)
        if isinstance(source, ParameterView):
            whole = source.shape is None
            return Spec(
                num_bytes=tensor.nbytes, parameter=source.parameter, is_whole=whole
            )
        if isinstance(source, Kept):
            num_bytes = _num_bytes(tensor)
            plain = type(tensor) is Tensor and tensor.layout is torch.strided
            plain = plain and not tensor.is_nested
            return Spec(num_bytes=num_bytes, is_plain=plain)
        if isinstance(source, FromRegion):
            return Spec(num_bytes=_num_bytes(tensor), is_plain=False)
        return self._spec_of_item(tensor, source)

    def _spec_of_item(self, tensor: Tensor, source: RecordView | RebuiltView) -> Spec:
        owner = source.record if isinstance(source, RecordView) else source.rebuilt
        if owner.lane is not self._lane:  # it has no place in this one's plan
            return Spec(num_bytes=tensor.nbytes, is_plain=False)
        first = owner.item not in self._items
        self._items.add(owner.item)
        if isinstance(source, RebuiltView):
            if source.rebuilt.compiled is not None:
                self._compiled.add(owner.item)
            for holder in source.rebuilt.holders:
                self._inputs.add(item_of(holder, self._lane))
        plain = isinstance(source, RecordView)
        rebuilt = source.rebuilt if isinstance(source, RebuiltView) else None
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
            is_held=owner.holding.held_bytes > 0,
            is_dense=dense,
            is_view=tensor._base is not None,
            is_rebuilt=rebuilt is not None,
            compiled=None if rebuilt is None or not first else rebuilt.compiled,
            copy=None if rebuilt is None or not first else _copy_of(rebuilt),
        )

    def _spec_of_part(self, wrapper: Tensor, inner: Any) -> Spec:
        found = unwrapped(wrapper)
        if found is None:
            return Spec(num_bytes=0, is_plain=False)
        spec = self._spec(found.local, inner)
        spec.is_wrapped = True
        if as_made(found.local, wrapper) is found.local:
            spec.compiled, spec.is_rebuilt = None, False
        spec.is_plain = spec.is_plain and (spec.item < 0 or not wrapper._version)
        return spec

    def _spec_of_parts(self, handle: FlattenedHandle) -> Spec:
        """The general path serves it, and all items that its parts are."""
        numbers = (item_of(leaf, self._lane) for leaf in handle.leaves())
        items = [each for each in numbers if each >= 0]
        new = [each for each in items if each not in self._items]
        self._items.update(items)
        self._parts_of_wrappers.update(items)
        item = next(iter(new or items), NO_ITEM)
        return Spec(
            num_bytes=0,
            item=item,
            is_first=bool(new),
            is_plain=False,
            is_wrapped=True,
        )

    def table(self) -> Table | None:
        """The compiled plan; None if the lane left its plan."""
        cursor = self._lane.cursor
        if cursor is None or cursor.orders is None:
            return None
        orders = cursor.orders
        last: dict[int, int] = {}
        for number, spec in enumerate(self._specs):
            before = last.get(spec.item)
            if before is None or spec.last_use > self._specs[before].last_use:
                last[spec.item] = number
        general = self._items_served_generally(orders)
        sparse = {spec.item for spec in self._specs if not spec.is_dense}
        # A recipe finds by a note what is saved as it was made alone.
        sparse |= {
            spec.item
            for spec in self._specs
            if spec.is_first and spec.is_view and spec.item in self._read
        }
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
            elif type(row) in (RecordRow, RecordAgainRow) and spec.item not in sparse:
                row = self._light(
                    spec, row, orders, is_shared=self._counts[spec.item] > 1
                )
            rows.append(row)
        behind = self._tell_of_quiet_packs(rows)
        self._tell_of_quiet_uses(rows, closing)
        totals = tuple(map(self._totals, self._specs, rows))
        sizes = tuple(
            self._sizes(spec, row, orders)
            for spec, row in zip(self._specs, rows, strict=True)
        )
        looks = tuple(spec.look for spec in self._specs)
        rows = [*map(around, self._specs, rows), EndRow()]
        parts = self._parts(rows, sizes)
        passages = {n: p for n, p in self._passages.items() if p.is_quiet(rows)}
        return Table(
            rows=tuple(rows),
            totals=totals,
            behind=behind,
            sizes=sizes,
            is_resized=cursor.own_bytes != cursor.planned_bytes,
            looks=looks,
            passages=passages,
            parts=parts,
        )

    def _parts(
        self, rows: list[Row], sizes: tuple[Sizes, ...]
    ) -> dict[int, RegionPart]:
        """The rows of each region call that runs again."""
        numbers: dict[int, list[int]] = {}
        for number, spec in enumerate(self._specs):
            if spec.region >= 0 and spec.serves < 0:
                numbers.setdefault(spec.region, []).append(number)
        uses: dict[int, dict[int, RegionItemRow]] = {}
        for at, number in enumerate(self._used):
            row, spec = rows[number], self._specs[number]
            if type(row) is RegionItemRow and at == spec.last_use:
                uses.setdefault(spec.region, {})[spec.index] = row
        parts = {}
        for region, own in numbers.items():
            first, end = own[0], own[-1] + 1
            indexed = [n for n in own if self._specs[n].index >= 0]
            marking = {
                self._specs[n].index: row
                for n in own
                if type(row := rows[n]) is RegionItemRow
            }
            if end - first != len(own) or not indexed or -1 in marking:
                continue
            stored = {
                self._specs[n].index: (n, row.inner)
                for n in indexed
                if type(row := rows[n]) is PlacedRow and type(row.inner) in STORING
            }
            parts[region] = RegionPart(
                first,
                end,
                marking,
                uses.get(region, {}),
                stored,
                tuple((self._specs[n].look, sizes[n].own_bytes) for n in indexed),
            )
        return parts

    def _light(self, spec: Spec, row: Row, orders: Any, *, is_shared: bool) -> Row:
        """The row of a dense item that needs no record; else the row that it has."""
        is_read = spec.item in self._read
        first = _first_light(
            spec, orders[spec.item], is_shared=is_shared, is_read=is_read
        )
        if first is None:
            return row
        if spec.is_first:
            return first
        is_last = isinstance(row, RecordAgainRow) and row.is_last
        return HostAgainRow(spec, orders[spec.item], is_read=is_read, is_last=is_last)

    def _row_of_copy(self, copy: Spec | None, orders: Any) -> HostRow | StayRow | None:
        """The row of what a recipe stores; None: it is the general path's."""
        if copy is None or not self._cache.moves_to_host:
            return None
        return _first_light(copy, orders[copy.item], is_shared=False, is_read=False)

    def _is_quiet(self, number: int, rows: list[Row]) -> bool:
        return type(rows[number]) in QUIET and self._specs[number].item >= 0

    def _tell_of_quiet_packs(self, rows: list[Row]) -> QuietCounts:
        """Rows that count learn of the quiet ones before them."""
        behind = NOTHING
        for number, (spec, row) in enumerate(zip(self._specs, rows, strict=True)):
            if self._is_quiet(number, rows):
                # What a region makes again its call has booked.
                behind = behind._replace(marks=behind.marks + spec.marks)
                if spec.is_first and not spec.is_remade:
                    behind = self._with(behind, spec)
            elif isinstance(row, COUNTING):
                # What is kept and saved again counts when it is used alone.
                if type(row) is not KeptItemRow or row.is_first:
                    row.behind, behind = behind, NOTHING
        return behind

    def _tell_of_quiet_uses(self, rows: list[Row], closing: set[int]) -> None:
        behind, freed = NOTHING, self._freed_with(rows)
        for at, number in enumerate(self._used):
            spec, row = self._specs[number], rows[number]
            if spec.item < 0 or at != spec.last_use:
                continue
            for other in freed.get(number, ()):
                behind = self._with(behind, other)
            if self._is_quiet(number, rows):
                behind = behind._replace(uses=behind.uses + 1)
                if number in closing and not spec.is_remade:
                    behind = self._with(behind, spec)
            elif isinstance(row, COUNTING_USES):
                # A wrapper's part is asked for past a row that is not general.
                is_general = type(row) is GeneralRow
                if is_general or not (spec.is_wrapped and isinstance(row, BY_NUMBER)):
                    row.used_behind, behind = behind, NOTHING

    def _with(self, behind: QuietCounts, spec: Spec) -> QuietCounts:
        """And what the first row of its item has booked."""
        opener = self._openers[spec.item]
        return behind._replace(
            num_bytes=behind.num_bytes + self._specs[opener].num_bytes,
            openers=(*behind.openers, opener),
        )

    @cached_property
    def _openers(self) -> dict[int, int]:
        """The first row of each item."""
        openers: dict[int, int] = {}
        for number, spec in enumerate(self._specs):
            openers.setdefault(spec.item, number)
        return openers

    @cached_property
    def _last(self) -> dict[int, int]:
        """The last row of each item."""
        return {spec.item: number for number, spec in enumerate(self._specs)}

    def _first_of_regions(self, numbers: Iterable[int]) -> Iterable[int]:
        """The first row of each region: what was kept or freed before it must be
        booked before its bytes come alive."""
        first: dict[int, int] = {}
        for number in numbers:
            spec = self._specs[number]
            if spec.is_remade and spec.item >= 0:
                first.setdefault(spec.region, number)
        return first.values()

    def _freed_with(self, rows: list[Row]) -> dict[int, list[Spec]]:
        """Inputs of regions that stay and that nobody else uses, by the row
        with whose use they go: the last one of their region."""
        last: dict[int, int] = {}
        for number in self._used:
            last[self._specs[number].region] = number
        used = {self._specs[number].item for number in self._used}
        freed: dict[int, list[Spec]] = {}
        for number, spec in enumerate(self._specs):
            alone = spec.serves >= 0 and spec.is_first and spec.item not in used
            if alone and type(rows[number]) is KeptRow and spec.serves in last:
                freed.setdefault(last[spec.serves], []).append(spec)
        return freed

    def _totals(self, spec: Spec, row: Row) -> Totals:
        if type(row) is ParameterRow or type(row) is ParameterViewRow:
            return Totals(parameter_bytes=spec.num_bytes)
        if type(row) in (KeptItemRow, KeptRow) and spec.is_first:
            return Totals(1, spec.num_bytes)
        if type(row) in (RegionItemRow, RegionRow) and spec.is_first:
            return Totals(1)
        return Totals()

    def _sizes(self, spec: Spec, row: Row, orders: Any) -> Sizes:
        """Of an item that its row serves: the general path tells of its own."""
        if spec.item < 0 or not spec.is_first or type(row) in (GeneralRow, RebuiltRow):
            return Sizes()
        return Sizes(orders[spec.item].num_bytes, spec.extent_bytes)

    @cached_property
    def _read(self) -> set[int]:
        """Items that recipes read, and of which a row can open a record without a
        search: plain bytes that no region makes or stores, and no owner holds."""
        others = {
            spec.item
            for spec in self._specs
            if not spec.is_plain
            or spec.is_wrapped
            or spec.is_remade
            or spec.is_placed
            or spec.is_held
            or spec.serves >= 0
        }
        return self._inputs - others - self._parts_of_wrappers - {-1}

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
        found |= self._parts_of_wrappers
        return (found | self._inputs) - self._read - {-1}

    @cached_property
    def _counts(self) -> Counter[int]:
        """How many rows save each item."""
        return Counter(spec.item for spec in self._specs)

    @cached_property
    def _remade(self) -> set[int]:
        """Items of which every handle is made again by rows."""
        remade = {spec.item for spec in self._specs if spec.is_remade}
        return remade - {spec.item for spec in self._specs if not spec.is_remade}

    def _row(self, number: int, orders: Any, general: set[int], *, closes: bool) -> Row:
        spec = self._specs[number]
        if spec.compiled is not None:
            return RebuiltRow(
                spec,
                spec.compiled,
                number,
                copy=self._row_of_copy(spec.copy, orders),
                is_shared=self._counts[spec.item] > 1,
                is_read=spec.item in self._inputs,
            )
        if spec.is_rebuilt and not spec.is_first and spec.item in self._compiled:
            return RebuiltAgainRow(spec, number, is_read=spec.item in self._inputs)
        if spec.is_remade and (spec.item < 0 or spec.item in self._remade):
            is_last = spec.item < 0 or closes
            return RegionItemRow(spec, spec.extent_bytes if is_last else 0)
        if not spec.is_plain or spec.item in general:
            return GeneralRow(spec, number)
        if spec.parameter is not None:
            row = ParameterRow if spec.is_whole else ParameterViewRow
            return row(spec.parameter, spec.num_bytes)
        if spec.item < 0:
            return KeptRow(spec.num_bytes)
        order = orders[spec.item]
        if order.release_after <= 0 and spec.item not in self._read:
            opener = self._openers[spec.item]
            freed_bytes = self._specs[opener].num_bytes if closes else 0
            return KeptItemRow(spec, order, opener, freed_bytes)
        if spec.is_first:
            is_shared = self._counts[spec.item] > 1
            return RecordRow(spec, order, number, is_shared=is_shared)
        is_last = self._last[spec.item] == number
        return RecordAgainRow(spec, order, number, is_last=is_last)


def _first_light(
    spec: Spec, order: Order, *, is_shared: bool, is_read: bool
) -> HostRow | StayRow | None:
    """The row that opens an item which needs no record; None: it needs one there."""
    if order.release_after <= 0:
        return StayRow(spec, order, is_shared=is_shared)
    if order.placement is not Placement.OFFLOAD:
        return None
    return HostRow(spec, order, is_shared=is_shared, is_read=is_read)


def _copy_of(rebuilt: Rebuilt) -> Spec | None:
    """What its recipe has stored: an item, which nothing but the recipe reads."""
    place = None if rebuilt.compiled is None else rebuilt.compiled.copy_place
    source = None if place is None else rebuilt.holders[place].source
    if not isinstance(source, RecordView):
        return None
    record = source.record
    if record.region is not None or record.lane is not rebuilt.lane:
        return None
    # It is as dense as what it is a copy of.
    return Spec(num_bytes=record.num_bytes, item=record.item, is_first=True, marks=1)


def is_dense_in(tensor: Tensor, view: View, record_bytes: int) -> bool:
    """Whether a view fills its record's bytes from the first to the last, once."""
    if view.offset_bytes or view.is_conj or view.is_neg:
        return False
    base = tensor if tensor._base is None else tensor._base
    if tensor.nbytes != base.nbytes:  # a part of a batch: which bytes it is, a key says
        return False
    if tensor.nbytes != record_bytes or tensor.storage_offset() * tensor.itemsize % 16:
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _num_bytes(tensor: Tensor) -> int:
    strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return tensor.nbytes if strided else 0  # no other layout tells it
