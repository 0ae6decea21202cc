"""A lane that follows a compiled plan. See [Note: compiled plan] in table.py."""

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, repeat
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain.cache.handles import KeptHandle, ParameterHandle, ParameterViewHandle
from ssdtrain.cache.identity import Key, extent_bytes, identify, stamp_of
from ssdtrain.cache.moved import MovedHandle, MovedTensor
from ssdtrain.cache.quiet import ForwardHooks, Quietly, sizes_of
from ssdtrain.cache.record import (
    Handle,
    Holding,
    Lane,
    LaneCursor,
    RebuiltView,
    Record,
    handle_of,
)
from ssdtrain.cache.rows import (
    BY_NUMBER,
    STORING,
    GeneralRow,
    HostAgainRow,
    HostRow,
    KeptItemHandle,
    KeptItemRow,
    KeptRow,
    ParameterRow,
    ParameterViewRow,
    RebuiltAgainRow,
    RebuiltRow,
    RecordAgainRow,
    RecordRow,
    RegionItemRow,
    Row,
    StayRow,
)
from ssdtrain.cache.savedindex import SealedIndex
from ssdtrain.cache.savedplaces import PlaceHandle
from ssdtrain.cache.spec import NOTHING, QuietCounts, Spec
from ssdtrain.cache.state import RecordState
from ssdtrain.cache.table import Hooks, Pack, RegionPart, Table, Unpack
from ssdtrain.cache.traced import tracer, untraced
from ssdtrain.cache.wrapped import FlattenedHandle, WrappedHandle
from ssdtrain.counters import Count
from ssdtrain.gathered import MARK
from ssdtrain.rebuild import modes
from ssdtrain.rebuild.modes import may_meddle, without_modes
from ssdtrain.transfer.copies import PinnedCopy, buffer_for, fits_buffer, refitted


class Run:
    """One lane that follows its table. It lives as long as a handle of it."""

    def __init__(self, cache: Any, lane: Lane, table: Table, general: Hooks) -> None:
        self._cache = cache
        self._generally: Pack = untraced(general[0])
        self.unpack_generally: Unpack = untraced(general[1])  # a wrapper's part, too
        self._lane = lane
        self._table = table
        self._cursor: LaneCursor = cache.cursor.of(lane)
        self._lock = cache.lock
        self.may_move: Callable[[Tensor], bool] = cache.is_movable
        self.nothing: Tensor = cache.nothing
        """Empty, on the device, for probes of versions."""
        self._rows: Iterator[Row] = iter(table.rows)
        self.following: Callable[[], Row] = self._rows.__next__
        """The row of the next tensor."""
        self._moved: dict[int, weakref.ref[MovedTensor]] = {}
        self._dues: dict[int, int | None] = {}
        """Marks of the release of records that the last of their rows will send."""
        self._used: set[Any] = set()
        """Rows whose use has booked the uncounted uses before it."""
        self._num_packed: int | None = None
        """Rows that were followed; None while the table lasts."""
        self._num_sent = self._sent_bytes = 0
        self._more: dict[int, int] = {}
        """By how many bytes an item that stays is larger than its first row's."""
        self._num_stayed = self._stayed_bytes = 0
        self._num_resized = self._grown_bytes = 0
        """Tensors of another size than their row's, and by how much items' are more."""
        self._first_ratio = table.first_ratio
        """Size of the first item over the plan's."""
        self.holding = Holding(lane)
        self._reads_ahead = cache.offloader.storage is not None
        """Whether a use may read from a storage what is loaded later."""

    # -- forward ------------------------------------------------------------------

    def hooks(self) -> tuple[Pack, Unpack]:  # noqa: C901 (in place: no calls)
        """What autograd calls. The rows that most tensors have are served in place."""
        general, pid, getpid = self.unpack_generally, self._cache.owner.pid, os.getpid
        dispatching, overriding, inferring = modes.ASKED
        telling = self._table.telling

        def pack(tensor: Tensor) -> Any:  # noqa: C901
            if dispatching() or (overriding() and may_meddle()):
                return self._apart(0, tensor)
            row = self.following()
            try:
                if type(row) is KeptRow:
                    if type(tensor) is Tensor and tensor.nbytes == row.num_bytes:
                        base = tensor._base
                        if base is None or type(base) is Tensor:
                            return KeptHandle((tensor.detach(), tensor._version))
                elif (
                    type(row) is ParameterRow
                    and id(tensor) == row.of
                    and (type(tensor) is Parameter or isinstance(tensor, Parameter))
                ):
                    return ParameterHandle((tensor, tensor._version))
                elif type(row) is ParameterViewRow:
                    base = tensor._base
                    if (
                        id(base) == row.of
                        and type(base) is Parameter
                        and type(tensor) is Tensor
                        and not hasattr(base, MARK)
                    ):
                        view = base, tensor._version, tensor.detach()
                        return ParameterViewHandle(view)
                if getpid() != pid:  # see [Note: after a fork]
                    return self._generally(tensor)
                if type(row) is HostRow and tensor.nbytes == row.num_bytes:
                    if self.may_move(tensor):
                        return self.send(row, tensor)
                    return self.leave_table(tensor)
                # mypy does not narrow by a set: each of these has `num_bytes`.
                if type(row) in SIZED and tensor.nbytes != row.num_bytes:  # type: ignore[attr-defined]
                    return self.pack_resized(row, tensor)
                return row.pack(tensor, self)
            except RuntimeError:
                if tensor.layout is torch.strided:
                    raise
                return self.leave_table(tensor)  # a sparse one tells no size

        def unpack(handle: Any) -> Tensor:  # noqa: C901
            kind = type(handle)
            if kind is KeptHandle or kind is ParameterHandle:
                tensor: Tensor = handle[0]
                if tensor._version == handle[1]:
                    return tensor
            elif kind is ParameterViewHandle:
                parameter, version, shown = handle
                if type(shown) is Tensor and parameter._version == version:
                    return shown
            if dispatching() or inferring() or (overriding() and may_meddle()):
                return self._apart(1, handle)  # type: ignore[no-any-return]
            if getpid() != pid:
                return self._cache.unpack(handle)  # type: ignore[no-any-return]
            if kind is Handle:
                if handle.number in telling:
                    self.count_quiet_uses(handle)
                source: Any = handle.source
                if type(source) is RebuiltView and handle.seal is None:
                    if tracer() is None:  # a user's recipe may run
                        return self.make(source)
                return general(handle)
            if kind in WRAPPERS and handle.number in telling:
                self.count_quiet_uses(handle)
            if kind in SEALED and handle.seal is not None:
                return general(handle)
            return handle.get()  # type: ignore[no-any-return]

        return pack, unpack

    def _apart(self, which: int, argument: Any) -> Any:
        """Call one of the hooks where no mode sees it. Through new ones: a hook that
        knew itself would live until the garbage is collected, and its lane with it."""
        with without_modes():
            return self.hooks()[which](argument)

    def pack_resized(self, row: Any, tensor: Tensor, number: int = -1) -> Any:
        """As the row says, for a tensor of another size: [Note: sizes]."""
        if number < 0:
            number = len(self._table.rows) - length_hint(self._rows) - 1
        look, base = self._table.looks[number], tensor._base
        plain = type(tensor) is Tensor and (base is None or type(base) is Tensor)
        if look is None or not plain or not look.fits(tensor, self._table.most):
            return row.pack(tensor, self)
        num_bytes = tensor.nbytes
        ratio = num_bytes / max(1, row.num_bytes)
        if not self._num_resized and number <= self._table.first_item:
            over = ratio * self._table.first_ratio
            if self._cache.cursor.is_too_large(self._cursor, over):
                return self.outgrow(tensor, over)
            self._first_ratio = over
        self._num_resized += 1
        own_bytes = self._table.sizes[number].own_bytes
        if own_bytes:
            self._grown_bytes += round(own_bytes * ratio) - own_bytes
        if type(row) is not KeptRow and type(row) is not KeptItemRow:
            movable = self.may_move(tensor)
            return row.take(tensor, self) if movable else self.leave_table(tensor)
        if self._table.totals[number].num_records:
            self._more[number] = num_bytes - row.num_bytes
        if type(row) is KeptItemRow:
            if row.is_first:
                self.keep(row)
            return KeptItemHandle(tensor.detach(), tensor._version, row, self)
        return KeptHandle((tensor.detach(), tensor._version))

    def enter_region(self, number: int) -> RegionPart | None:
        """The forward of a region call begins that runs again: pass over its rows.

        Returns:
            What they say; None: the rows do not fit.
        """
        part = self._table.parts.get(number)
        position = len(self._table.rows) - length_hint(self._rows)
        if part is None or self._num_packed is not None or position != part.first:
            return None
        num_rows = part.end - part.first
        next(islice(self._rows, num_rows, num_rows), None)
        return part

    def without_rows(self) -> None:
        """A region call runs again and has not entered: all that it saves needs a
        place, which a row of somebody else's would not give it."""
        if self._num_packed is None:
            self.following = repeat(GENERALLY).__next__

    def with_rows(self) -> None:
        """It has ended."""
        if self._num_packed is None:
            self.following = self._rows.__next__

    def mark_in_region(self, row: RegionItemRow) -> None:
        """A mark: a tensor of a region that runs again is saved."""
        with self._lock:
            num_items = self._cursor.num_items
            self._advance(row, row.marks)
            self._cursor.num_items = max(num_items, row.item + 1)

    def leave_region(self, part: RegionPart, looks: list[Any]) -> None:
        """Its forward has ended.

        Args:
            looks: shape, dtype and strides of each tensor that it saved.
        """
        if len(looks) != len(part.looks):
            with self._lock:
                self._stop()
                self._cache.cursor.leave(self._cursor)
            return
        for (look, own_bytes), (shape, *_) in zip(part.looks, looks, strict=True):
            if look is not None and own_bytes and look.shape != shape:
                ratio = math.prod(shape) / max(1, math.prod(look.shape))
                self._num_resized += 1
                self._grown_bytes += round(own_bytes * ratio) - own_bytes

    def store_in_region(self, number: int, row: Any, tensor: Tensor) -> Any:
        """The handle of a tensor that the plan stores and a region saves; None: its row
        does not fit it."""
        if not self.may_move(tensor):
            return None
        if type(row) is KeptRow:
            return KeptHandle((tensor.detach(), tensor._version))
        if tensor.nbytes == row.num_bytes:
            return row.pack(tensor, self)
        return self.pack_resized(row, tensor, number)

    def quietly(
        self, number: int, hooks: ForwardHooks, arguments: Iterable[Any]
    ) -> Quietly | None:
        """What is around that call of a layer; None: the hooks stay on."""
        passage = self._table.passages.get(number)
        if (
            passage is None
            or not hooks.are_alone
            or self._num_packed is not None
            or len(self._table.rows) - length_hint(self._rows) != passage.first
            or self._num_resized
            or sizes_of(arguments) != passage.sizes
        ):
            return None
        if passage.parameter_bytes:
            counters = self._cache.ledger.counters
            counters.add(Count.PARAMETERS, passage.parameter_bytes)
        return Quietly(hooks, self._lane, self._rows, passage)

    def keep(self, row: KeptItemRow) -> None:
        """A mark: an item that stays."""
        with self._lock:
            self._advance(row, row.marks)
            self._live(row.num_bytes + self._more.get(row.opener, 0))

    def _live(self, num_bytes: int) -> None:
        """Bytes that stay came alive, or are gone: no record knows of them."""
        if num_bytes:
            self._cache.ledger.live(num_bytes)
            self.holding.live_bytes += num_bytes

    def _advance(self, row: Any, marks: int) -> None:
        cache, behind = self._cache, row.behind
        if cache.retired.queue or cache.ledger.handed_bytes or cache.window.lingering:
            cache.collect()
        self._cursor.num_items = row.item + 1
        if behind is NOTHING:
            cache.cursor.mark += marks
        else:
            cache.cursor.mark += marks + behind.marks
            self._live_behind(behind)
        if cache.cursor.mark >= cache.window.next_due:
            cache.moves.release_due()

    def open_record(self, row: RecordRow, tensor: Tensor) -> Handle:
        """A mark: an item with a record, whose bytes may leave."""
        with self._lock:
            key, view = identify(tensor)
            other = key.end_byte - key.start_byte != row.extent_bytes
            if other and tensor.nbytes == row.num_bytes:
                return self.leave_table(tensor)
            self._advance(row, row.marks)
            order = row.order
            record = self._cache.open_planned(tensor, key, order.name, row.item)
            after = order.release_after
            due = self._cache.cursor.mark + after if after > 0 else None
            if row.is_shared:  # [Note: the last save] in departures.py
                leaves, self._dues[row.item] = False, due
            else:
                leaves = self._cache.moves.send(record, order, due)
            self._cache.book(record, leaves=leaves)
            handle = handle_of(record, view, self._cache.probe_of(tensor))
            handle.number = row.number
            self._cache.recipes.note(tensor, handle, by_norm=row.by_norm)
            return handle

    def join_record(
        self, row: "RecordAgainRow | HostAgainRow", tensor: Tensor
    ) -> Handle:
        """Another tensor in a record that was opened before."""
        with self._lock:
            key, view = identify(tensor)
            record = self._cursor.record(row.item)
            if record is None or record.key != key:
                return self.leave_table(tensor)
            if record.state is RecordState.KEPT and type(row) is RecordAgainRow:
                if row.is_last:
                    self._send_record(record, row)
            else:
                self._cache.saved_again(record, tensor)
            handle = handle_of(record, view, self._cache.probe_of(tensor))
            by_norm = True
            if type(row) is RecordAgainRow:
                handle.number, by_norm = row.number, row.by_norm
            self._cache.recipes.note(tensor, handle, by_norm=by_norm)
            return handle

    def _send_record(self, record: Record, row: RecordAgainRow) -> None:
        due = self._dues.pop(row.item, None)
        if self._cache.moves.send(record, row.order, due):
            counters = self._cache.ledger.counters
            counters.shift(Count.KEPT, Count.OFFLOADED, record.num_bytes)

    def send(self, row: HostRow, tensor: Tensor) -> Handle:
        """A mark: an item whose bytes leave for its row's place."""
        base = tensor._base
        if tensor.nbytes != (tensor if base is None else base).nbytes:
            return self.leave_table(tensor)
        cache = self._cache
        with self._lock:
            free = row.free
            if not free and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                return self.leave_table(tensor)  # a view that repeats its bytes
            place = free.pop() if free else buffer_for(cache.offloader.pool, tensor)
            if place is None:
                return self.pack_generally(tensor, row)
            if not fits_buffer(place, tensor):
                if place.memory.nbytes == tensor.nbytes:
                    free.append(place)
                    return self.leave_table(tensor)
                place = refitted(cache.offloader.pool, place, tensor)
                if place is None:
                    return self.pack_generally(tensor, row)
            self._advance(row, row.marks)
            copy = PinnedCopy(place, free)
            lane = self._lane
            moved = MovedTensor(tensor, row.name, lane, cache.ledger, copy)
            cache.retired.watch(moved, moved.holding)
            lane.num_live += 1
            moved.due = cache.cursor.mark + row.order.release_after
            found = self._moved[row.item] = weakref.ref(moved)
            self._cursor.records[row.item] = found
            if row.is_shared:  # [Note: the last save] in departures.py
                moved.stamp = stamp_of(tensor)
                moved.start_byte, moved.end_byte = extent_bytes(tensor)
                self._num_stayed += 1
                self._stayed_bytes += moved.num_bytes
            else:
                self._depart(moved)
            handle = MovedHandle(moved, tensor, self, row)
            if row.is_read:
                cache.recipes.note(tensor, handle, by_norm=row.by_norm)
            return handle

    def _depart(self, moved: MovedTensor) -> None:
        """Its bytes leave for their place."""
        data: Any = moved.data
        order = self._cache.copies.out(moved.copy.pinned, data)
        moved.leave(moved.copy)
        self._cache.window.add(moved, data, moved.copy, moved.due, order)
        self._num_sent += 1
        self._sent_bytes += moved.num_bytes

    def stay(self, row: StayRow, tensor: Tensor) -> Handle:
        """A mark: an item that stays, and that recipes read."""
        base = tensor._base
        if tensor.nbytes != (tensor if base is None else base).nbytes:
            return self.leave_table(tensor)
        if tensor.is_conj() or tensor.is_neg():
            return self.leave_table(tensor)
        cache, lane = self._cache, self._lane
        with self._lock:
            self._advance(row, row.marks)
            moved = MovedTensor(tensor, row.name, lane, cache.ledger, None)
            cache.retired.watch(moved, moved.holding)
            lane.num_live += 1
            self._num_stayed += 1
            self._stayed_bytes += moved.num_bytes
            self._moved[row.item] = weakref.ref(moved)
            if row.is_shared:
                moved.stamp = stamp_of(tensor)
                moved.start_byte, moved.end_byte = extent_bytes(tensor)
            handle = MovedHandle(moved, tensor, self, row)
            cache.recipes.note(tensor, handle, by_norm=row.by_norm)
            return handle

    def send_again(self, row: HostAgainRow, tensor: Tensor) -> Handle:
        """Another tensor on the bytes of an item that was sent off before."""
        with self._lock:
            found = self._moved.get(row.item)
            moved = None if found is None else found()
            if moved is None:
                # It was served by the general path.
                return self.join_record(row, tensor)
            start, end = extent_bytes(tensor)
            inside = moved.start_byte <= start and end <= moved.end_byte
            same = moved.stamp is stamp_of(tensor) and tensor._version == moved.version
            if not (inside and same and moved.is_read_by(tensor)):
                return self.leave_table(tensor)
            moved.num_handles += 1
            handle = MovedHandle(moved, tensor, self, row)
            handle.view(tensor, (start - moved.start_byte) // tensor.itemsize)
            if row.is_last and moved.copy is not None:
                self._num_stayed -= 1
                self._stayed_bytes -= moved.num_bytes
                self._depart(moved)
            if row.is_read:
                self._cache.recipes.note(tensor, handle, by_norm=row.by_norm)
            return handle

    def fetch(
        self, moved: MovedTensor, row: "HostRow | StayRow | HostAgainRow"
    ) -> Tensor:
        """A mark: backward asks for an item that was sent off, or that recipes read."""
        cache, cursor = self._cache, self._cursor
        with self._lock:
            if row.used_behind is not NOTHING and not cache.cursor.is_using:
                self._use_quiet(row)
            at = self._count_use()  # may release it
            if moved.written_late:
                moved.check_writer()
            data = moved.data
            if data is None or moved.state not in AT_HAND:
                data = cache.moves.fetch_moved(moved)
            if at in cursor.loads or self._reads_ahead:
                self.load_at(at)
            moved.num_uses += 1
            if moved.num_uses >= moved.num_handles:
                moved.drop_copy()
            return data

    def read(self, moved: MovedTensor) -> Tensor:
        """The bytes of an item that was sent off, on the device."""
        with self._lock:
            return self._cache.moves.fetch_moved(moved)  # type: ignore[no-any-return]

    def rebuild(
        self, row: RebuiltRow, tensor: Tensor, wrapper: Tensor | None = None
    ) -> Handle:
        """A mark: an item that will be made again.

        Args:
            row: its own.
            tensor: that was saved, or the part of it.
            wrapper: that was saved, if it is the part of one.
        """
        cache, recipes = self._cache, self._cache.recipes
        with self._lock:
            key: Key | None
            if row.whole is not None and tensor._base is None:
                # As `identify` finds it, if it is what the recipe makes.
                view, key = row.whole, None
                if row.is_shared:
                    key = Key(stamp_of(tensor), tensor._version, 0, row.num_bytes)
            else:
                key, view = identify(tensor)
            inside = cache.regions.current is not None
            asked = None if inside else recipes.ask(row.compiled, tensor, key)
            if asked is None:
                return self.pack_generally(tensor if wrapper is None else wrapper, row)
            self._advance(row, row.marks)
            before, cache.cursor.serving = cache.cursor.serving, row.item
            store = None if row.copy is None else partial(row.copy.pack, run=self)
            try:
                handle = recipes.take(row.compiled, asked, tensor, key, view, store)
            finally:
                cache.cursor.serving = before
            handle.source.rebuilt.item = row.item
            handle.number = row.number
            if row.is_read and wrapper is None:  # see [Note: parts with recipes]
                recipes.note(tensor, handle, by_norm=row.by_norm)
            cache.verifier.seal(handle, tensor)
            if self._cursor.orders is None:
                self._stop()
            return handle  # type: ignore[no-any-return]

    def rebuild_again(
        self, row: RebuiltAgainRow, tensor: Tensor, wrapper: Tensor | None = None
    ) -> Handle:
        """Another handle of an item that will be made again; as `rebuild`."""
        recipes = self._cache.recipes
        with self._lock:
            key, view = identify(tensor)
            handle = recipes.again(tensor, key, view)
            if handle is None:
                return self.pack_generally(tensor if wrapper is None else wrapper, row)
            handle.number = row.number
            if row.is_read and wrapper is None:
                recipes.note(tensor, handle, by_norm=row.by_norm)
            self._cache.verifier.seal(handle, tensor)
            return handle  # type: ignore[no-any-return]

    def pack_generally(self, tensor: Tensor, row: Any) -> Handle:
        """A row that is the general path's; it may find that the plan does not fit."""
        behind = row.behind
        if behind is not NOTHING:
            with self._lock:
                self._cache.cursor.mark += behind.marks
                self._live_behind(behind)
        # Quiet rows before it may have been told to a row of no new item.
        self._cursor.num_items = max(self._cursor.num_items, row.item)
        handle = self._generally(tensor)
        kind = type(handle)
        is_told = kind in WRAPPERS and type(row) is GeneralRow
        if is_told or (kind is Handle and isinstance(row, BY_NUMBER)):
            handle.number = row.number
        if self._cursor.orders is None:
            self._stop()
        return handle

    def leave_table(self, tensor: Tensor) -> Handle:
        """Another tensor than the row's: the lane leaves the table for good."""
        with self._lock:
            self._stop(behind=1)
            self._cache.cursor.leave(self._cursor)
        return self._generally(tensor)

    def outgrow(self, tensor: Tensor, ratio: float) -> Handle:
        """The lane is so many times the plan's, for which there is no room."""
        with self._lock:
            self._stop(behind=1)
            self._cache.cursor.outgrow(self._cursor, ratio)
        return self._generally(tensor)

    def _stop(self, behind: int = 0) -> None:
        if self._num_packed is None:
            self._num_packed = len(self._table.rows) - length_hint(self._rows) - behind
            self.following = repeat(GENERALLY).__next__

    def end(self) -> None:
        """Forward has ended: what was counted by the table alone is booked."""
        packed = self._num_packed
        if packed is None:
            packed = len(self._table.rows) - length_hint(self._rows)
            if packed == len(self._table.totals):
                with self._lock:
                    self._cache.cursor.mark += self._table.behind.marks
                    self._live_behind(self._table.behind)
        self._tell_size(packed)
        counters = self._table.counters(packed)
        stayed_bytes = self._stayed_bytes + sum(self._more.values())
        counters[Count.RECORDS] += self._num_sent + self._num_stayed
        counters[Count.SAVED] += self._sent_bytes + stayed_bytes
        counters[Count.KEPT] += stayed_bytes
        counters[Count.OFFLOADED] = self._sent_bytes
        self._cache.ledger.counters.add_all(counters)

    def _tell_size(self, num_packed: int) -> None:
        """Tell how large the lane was, if its size is not the plan's."""
        table = self._table
        planned_bytes, own_bytes = table.sizes_of(num_packed)
        own_bytes += self._grown_bytes
        is_plans = abs(own_bytes - planned_bytes) <= ROUNDING * planned_bytes
        if not is_plans:
            num = table.num_items if table.is_resized else self._num_resized
            self._cache.cursor.resized(max(1, num), planned_bytes, own_bytes)
        elif self._num_resized and not table.is_resized:
            self._cache.cursor.resized(self._num_resized, 0, 0)
        if self._num_packed is None and planned_bytes:
            ratio = max(self._first_ratio, own_bytes / planned_bytes)
            self._cache.cursor.by_size.note(self._lane.num_elements, ratio)

    # -- backward -----------------------------------------------------------------

    def use(self, handle: KeptItemHandle) -> None:
        """A mark: backward asks for an item that stayed."""
        row = handle.row
        with self._lock:
            if row.used_behind is not NOTHING:
                self._use_quiet(row)
            at = self._count_use()
            if at in self._cursor.loads or self._reads_ahead:
                self.load_at(at)
            if not handle.is_closed:
                handle.is_closed = True
                if row.freed_bytes:
                    num_bytes = row.freed_bytes + self._more.get(row.opener, 0)
                    self.holding.live_bytes -= num_bytes
                    self._cache.ledger.hand_over(num_bytes)

    def make(self, source: RebuiltView) -> Tensor:
        """A mark: backward asks for what a recipe makes."""
        with self._lock:
            return self._cache.use_rebuilt(source)  # type: ignore[no-any-return]

    def mark_use(self, row: RegionItemRow) -> int | None:
        """A mark: backward asks for what a region makes again."""
        with self._lock:
            if row.used_behind is not NOTHING:
                self._use_quiet(row)
            return self._count_use()

    def _count_use(self) -> int | None:
        """A mark: give back what is dead, and release what is due."""
        cache = self._cache
        if cache.ledger.handed_bytes or cache.retired.queue or cache.window.lingering:
            cache.collect()
        if not self._lane.in_backward:
            cache.enter_backward(self._lane)
        at: int | None = cache.cursor.count_use(self._cursor)
        if cache.cursor.mark >= cache.window.next_due:
            cache.moves.release_due()
        return at

    def load_at(self, at: int | None) -> None:
        """It is there: load what the plan wants back by now."""
        if at is not None and self._cursor.orders is not None:
            with self._lock:
                self._cache.moves.load_at(self._cursor, at)

    def count_quiet_uses(self, handle: Handle) -> None:
        """Before a tensor of the general path is used."""
        row = self._table.telling.get(handle.number)
        if row is not None:
            with self._lock:
                self._use_quiet(row)

    def _use_quiet(self, row: Any) -> None:
        """Count the uses before this one that were not counted; once, if backward comes
        again."""
        if row in self._used:
            return
        self._used.add(row)
        behind = row.used_behind
        self._cache.cursor.mark += behind.uses
        self._cursor.num_uses += behind.uses
        self._live_behind(behind, -1)

    def _live_behind(self, behind: QuietCounts, sign: int = 1) -> None:
        """What quiet rows keep came alive (1), or is gone (-1), as large as it is in
        this lane."""
        num_bytes, more = behind.num_bytes, self._more
        if more:
            num_bytes += sum([more.get(number, 0) for number in behind.openers])
        if num_bytes:  # as `_live`, in place: a call less at each mark
            self._cache.ledger.live(sign * num_bytes)
            self.holding.live_bytes += sign * num_bytes


GENERALLY = GeneralRow(Spec(num_bytes=0))
"""Of all tensors after the end of a table."""
WRAPPERS = frozenset({FlattenedHandle, WrappedHandle})
"""Handles around others."""
SEALED = frozenset({PlaceHandle, SealedIndex, WrappedHandle})
"""Handles that the general path checks, where they have a seal."""
AT_HAND = (RecordState.BACK, RecordState.KEPT)
"""Bytes that are on the device, and are to stay for now."""
ROUNDING = 1e-3
"""Of a lane's bytes: views do not fill what they are views of."""
SIZED = frozenset(STORING)
"""Rows that serve a tensor of another size."""
