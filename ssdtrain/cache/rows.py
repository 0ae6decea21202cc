"""Rows of a compiled plan: what happens to one saved tensor.

See [Note: compiled plan] in table.py.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ssdtrain.cache.handles import KeptHandle, ParameterViewHandle
from ssdtrain.cache.identity import View, check_version, parameter_of
from ssdtrain.cache.record import Handle, Kept, Part, alias_of
from ssdtrain.cache.spec import NOTHING, Spec
from ssdtrain.cache.wrapped import Shell, Unwrapped, WrappedHandle, as_made, unwrapped
from ssdtrain.plan.plan import Order
from ssdtrain.rebuild.compiled import Compiled
from ssdtrain.transfer.copies import PinnedBuffer


class Follower(Protocol):
    """What rows ask of the lane that follows their table (`Run`)."""

    unpack_generally: Callable[[Any], Tensor]
    may_move: Callable[[Tensor], bool]

    def leave_table(self, tensor: Tensor) -> Handle: ...
    def pack_generally(self, tensor: Tensor, row: "ItemRow") -> Handle: ...
    def keep(self, row: "KeptItemRow") -> None: ...
    def use(self, handle: "KeptItemHandle") -> None: ...
    def open_record(self, row: "RecordRow", tensor: Tensor) -> Handle: ...
    def join_record(self, row: "RecordAgainRow", tensor: Tensor) -> Handle: ...
    def send(self, row: "HostRow", tensor: Tensor) -> Handle: ...
    def send_again(self, row: "HostAgainRow", tensor: Tensor) -> Handle: ...
    def stay(self, row: "StayRow", tensor: Tensor) -> Handle: ...
    def rebuild(
        self, row: "RebuiltRow", tensor: Tensor, wrapper: Tensor | None
    ) -> Handle: ...
    def rebuild_again(
        self, row: "RebuiltAgainRow", tensor: Tensor, wrapper: Tensor | None
    ) -> Handle: ...


class Row:
    """One call of `pack`."""

    __slots__ = ()

    def pack(self, tensor: Tensor, run: Follower) -> Any:
        """The handle for autograd. Here: of a tensor that no row of this kind serves,
        or one that `Run.hooks` serves in place and that is not what the row says."""
        return run.leave_table(tensor)


class EndRow(Row):
    """After the last one: one tensor more than the plan knows."""

    __slots__ = ()


class ParameterRow(Row):
    """A parameter.

    By its id: a weak reference would forbid `torch.utils.swap_tensors`. Another
    parameter that has come to the same address is kept all the same.
    """

    __slots__ = ("num_bytes", "of")

    def __init__(self, parameter: nn.Parameter, num_bytes: int) -> None:
        self.of = id(parameter)
        self.num_bytes = num_bytes


class ParameterViewRow(Row):
    """A view of a parameter, such as `weight.t()`. By its id, as `ParameterRow`."""

    __slots__ = ("_part", "num_bytes", "of")

    def __init__(self, parameter: nn.Parameter, num_bytes: int) -> None:
        self.of = id(parameter)
        self._part: Part | None = None
        """Where the last one lay that may not be held."""
        self.num_bytes = num_bytes

    def pack(self, tensor: Tensor, run: Follower) -> Any:
        """Called only where the look in `Run.hooks` failed: it is no such view, or one
        whose parameter's data are gathered."""
        parameter = tensor._base
        is_it = id(parameter) == self.of
        # The plain type first: torch answers `isinstance` of parameters in Python.
        if not is_it or not (
            type(parameter) is nn.Parameter or isinstance(parameter, nn.Parameter)
        ):
            return run.leave_table(tensor)
        part = self._part
        if part is None or not part.is_of(tensor, parameter):
            self._part = part = Part.between(tensor, parameter)
            if part is None:
                return run.leave_table(tensor)
        alias = alias_of(tensor, parameter)
        shown = part if alias is None else alias
        return ParameterViewHandle((parameter, tensor._version, shown))


class KeptRow(Row):
    """A tensor below `min_bytes`, one that never moves, or a quiet item."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class ItemRow(Row):
    """A tensor of an item of the plan.

    Args:
        number: of the row in its table.
        is_read: whether recipes read the item.
        is_shared: whether other rows save the same bytes.
    """

    __slots__ = (
        *("behind", "by_norm", "is_first", "is_read", "is_shared", "item", "marks"),
        *("num_bytes", "number", "used_behind"),
    )

    def __init__(
        self,
        spec: Spec,
        number: int = -1,
        *,
        is_read: bool = False,
        is_shared: bool = False,
    ) -> None:
        self.behind = self.used_behind = NOTHING
        self.by_norm = spec.by_norm
        self.is_first = spec.is_first
        self.is_read = is_read
        self.is_shared = is_shared
        self.item = spec.item
        self.marks = spec.marks
        self.num_bytes = spec.num_bytes
        self.number = number


class GeneralRow(ItemRow):
    """Served by the general path: recipes, and tensors that are not plain."""

    __slots__ = ()

    def pack(self, tensor: Tensor, run: Follower) -> Handle:
        """As the general path does."""
        return run.pack_generally(tensor, self)


class RebuiltRow(ItemRow):
    """An item that the plan rebuilds, by a recipe that was found and admitted before.

    What safety needs is asked again: [Note: compiled recipes] in rebuild/compiled.py.
    Where an answer is another one, the general path searches.
    """

    __slots__ = ("compiled", "copy", "whole")

    def __init__(
        self,
        spec: Spec,
        compiled: Compiled,
        number: int,
        *,
        copy: "HostRow | StayRow | None",
        is_shared: bool,
        is_read: bool,
    ) -> None:
        super().__init__(spec, number, is_shared=is_shared, is_read=is_read)
        self.copy = copy
        """Of what the recipe stores; None: nothing, or the general path's."""
        self.compiled = compiled
        layout = compiled.layout
        self.whole: View | None = None
        """Of a tensor that is its own base, in that layout; None: it has gaps."""
        if layout.is_contiguous:
            shape = torch.Size(layout.shape)
            self.whole = View(layout.dtype, shape, layout.stride, 0, False, False)

    def pack(
        self, tensor: Tensor, run: Follower, wrapper: Tensor | None = None
    ) -> Handle:
        """A handle that makes it again; the general path's, of the wrapper if it is the
        part of one, where that must not be."""
        if tensor.nbytes == self.num_bytes and run.may_move(tensor):
            return run.rebuild(self, tensor, wrapper)
        return run.pack_generally(tensor if wrapper is None else wrapper, self)


class RebuiltAgainRow(ItemRow):
    """Another handle of an item that is rebuilt."""

    __slots__ = ()

    def pack(
        self, tensor: Tensor, run: Follower, wrapper: Tensor | None = None
    ) -> Handle:
        """A handle of the same recipe, if these are its bytes; else as `RebuiltRow`."""
        if tensor.nbytes == self.num_bytes and run.may_move(tensor):
            return run.rebuild_again(self, tensor, wrapper)
        return run.pack_generally(tensor if wrapper is None else wrapper, self)


class KeptItemRow(ItemRow):
    """An item that the plan keeps, where it has something to do.

    Args:
        opener: number of the item's first row.
        freed_bytes: what that one has booked, if backward uses this handle of the item
            last; else 0.
    """

    __slots__ = ("freed_bytes", "name", "opener")

    def __init__(self, spec: Spec, order: Order, opener: int, freed_bytes: int) -> None:
        super().__init__(spec)
        self.name = order.name
        self.opener = opener
        self.freed_bytes = freed_bytes

    def pack(self, tensor: Tensor, run: Follower) -> Handle:
        """Keep it, unless it is a parameter or of another size."""
        if type(tensor) is Tensor and tensor.nbytes == self.num_bytes:
            base = tensor._base
            if base is None or type(base) is Tensor:
                if self.is_first:
                    run.keep(self)
                return KeptItemHandle(tensor.detach(), tensor._version, self, run)
        return run.leave_table(tensor)


class KeptItemHandle(Handle):
    """A tensor that stays, and at whose use the plan has something to do."""

    __slots__ = ("is_closed", "row", "run", "tensor", "version")

    def __init__(
        self, tensor: Tensor, version: int, row: KeptItemRow, run: Follower
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


class StoredRow(ItemRow):
    """An item whose bytes stay where recipes find them, or leave.

    Args:
        order: of the item.
        is_last: whether it is the last of the item's rows: [Note: the last save].
    """

    __slots__ = ("extent_bytes", "is_last", "name", "order")

    def __init__(
        self,
        spec: Spec,
        order: Order,
        number: int = -1,
        *,
        is_read: bool = False,
        is_shared: bool = False,
        is_last: bool = False,
    ) -> None:
        super().__init__(spec, number, is_read=is_read, is_shared=is_shared)
        self.extent_bytes = spec.extent_bytes
        self.is_last = is_last
        self.name = order.name
        self.order = order

    def pack(self, tensor: Tensor, run: Follower) -> Handle:
        """Take it over, if these may be its bytes."""
        if tensor.nbytes == self.num_bytes and run.may_move(tensor):
            return self.take(tensor, run)
        return run.leave_table(tensor)

    def take(self, tensor: Tensor, run: Follower) -> Handle:
        """As `pack`, for a tensor that may be served, of whatever size; each kind's
        own."""
        raise NotImplementedError


class RecordRow(StoredRow):
    """An item with a record: one that the plan moves away, or that recipes read. Where
    other rows save the same bytes, the last of them sends these."""

    __slots__ = ()

    def take(self, tensor: Tensor, run: Follower) -> Handle:
        """Identify its bytes, and send them off if the plan says so."""
        return run.open_record(self, tensor)


class HostRow(StoredRow):
    """An item that the plan moves to host memory, to the same place in every step.

    It fills its base without gaps; `RecordRow` serves all others.
    """

    __slots__ = ("free",)

    def __init__(
        self, spec: Spec, order: Order, *, is_read: bool, is_shared: bool
    ) -> None:
        super().__init__(spec, order, is_read=is_read, is_shared=is_shared)
        self.free: list[PinnedBuffer] = []

    def take(self, tensor: Tensor, run: Follower) -> Handle:
        """Send it off."""
        return run.send(self, tensor)


class StayRow(StoredRow):
    """An item that stays, and that recipes read."""

    __slots__ = ()

    def take(self, tensor: Tensor, run: Follower) -> Handle:
        """Keep it where recipes find it."""
        return run.stay(self, tensor)


class HostAgainRow(StoredRow):
    """Another handle of an item of a `HostRow` or a `StayRow`."""

    __slots__ = ()

    def take(self, tensor: Tensor, run: Follower) -> Handle:
        """A handle of the same bytes, if these are they."""
        return run.send_again(self, tensor)


class RecordAgainRow(StoredRow):
    """Another handle of an item of a `RecordRow`."""

    __slots__ = ()

    def take(self, tensor: Tensor, run: Follower) -> Handle:
        """A handle of the same record, if these are its bytes."""
        return run.join_record(self, tensor)


class RegionRow(Row):
    """A tensor that its region's forward makes again: see [Note: regions].

    It is dropped when the forward has ended, so nothing asks which bytes it is. Not
    served outside of such a forward: see `Run.enter_region`.
    """

    __slots__ = ("num_bytes", "own_bytes")

    def __init__(self, num_bytes: int, own_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.own_bytes = own_bytes
        """Of its record; 0: another row counts them."""


class RegionItemRow(ItemRow):
    """As `RegionRow`, where the plan has something to do."""

    __slots__ = ("own_bytes",)

    def __init__(self, spec: Spec, own_bytes: int) -> None:
        super().__init__(spec)
        self.own_bytes = own_bytes


class PlacedRow(Row):
    """A tensor that is stored, and saved in the forward of a region that runs again.
    Not served outside of such a forward, as `RegionRow`."""

    __slots__ = ("inner",)

    def __init__(self, inner: Row) -> None:
        self.inner = inner


class WrappedRow(Row):
    """A tensor around a plain one, which has a row of its own: [Note: wrappers]."""

    __slots__ = ("_kind", "inner")

    def __init__(self, inner: Row) -> None:
        self.inner = inner
        self._kind: Any = None
        """DTensor, once one was here."""

    def pack(self, tensor: Tensor, run: Follower) -> Handle:
        """A handle around the part's."""
        found = self._part_of(tensor)
        if found is None:
            return run.leave_table(tensor)
        (local, shell), inner = found, self.inner
        if type(inner) is KeptRow:
            if local.nbytes != inner.num_bytes:
                return run.leave_table(tensor)
            handle: Any = KeptHandle((local, local._version))
        elif tensor._version or parameter_of(tensor) is not None:
            # The part's version does not count what is written through the wrapper.
            return run.leave_table(tensor)
        elif type(inner) is RebuiltRow or type(inner) is RebuiltAgainRow:
            handle = inner.pack(as_made(local, tensor), run, tensor)
            if type(handle) is WrappedHandle:
                return handle  # the general path's
        else:
            handle = inner.pack(local, run)
        return WrappedHandle(tensor, shell, handle, run.unpack_generally)

    def _part_of(self, tensor: Any) -> Unwrapped | None:
        """As `unwrapped`, for what was here before in a few looks. A row that moves
        its part asks all the rest of it (`Run.may_move`)."""
        if type(tensor) is self._kind:
            local = tensor._local_tensor
            if type(local) is Tensor and local.layout is torch.strided:
                base = local._base
                if base is None or type(base) is Tensor:
                    return Unwrapped(local.detach(), Shell(self._kind, tensor._spec))
        found = unwrapped(tensor)
        if found is not None and found.shell is not None:
            self._kind = found.shell.kind
        return found


COUNTING = (
    *(GeneralRow, KeptItemRow, RecordRow, HostRow, StayRow),
    *(RebuiltRow, RegionItemRow),
)
"""Rows that count when they are packed, also for the quiet ones before them."""
COUNTING_USES = (*COUNTING, RecordAgainRow, HostAgainRow, RebuiltAgainRow)
"""Rows that count when they are used."""
STORING = (
    *(KeptRow, KeptItemRow, StayRow),
    *(RecordRow, RecordAgainRow, HostRow, HostAgainRow),
)
"""Rows under which the bytes of a tensor stay, or move."""
QUIET = (KeptRow, RegionRow)
"""Rows that do not count."""
BY_NUMBER = (GeneralRow, RecordRow, RecordAgainRow, RebuiltRow, RebuiltAgainRow)
"""Rows whose handles know the row by its number."""


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


def moving(row: Row) -> Row | None:
    """What may move bytes there: the row, or that of what its recipe stores."""
    row = bare(row)
    return row.copy if type(row) is RebuiltRow else row
