"""Items that a compiled plan moves to host memory, or that recipes read, and handles.

A `MovedTensor` is to a row of the table what a `Record` is to the general path, for the
common case alone. The tensor fills its storage's extent without gaps. It goes to pinned
host memory, where its place is the same in every step, or stays for backward and for
the recipes that read it.
(tests/ssdtrain/cache/test_table.py, test_rebuilt_rows.py)
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.cache.identity import check_late_writer, check_version
from ssdtrain.cache.ledger import Ledger
from ssdtrain.cache.record import Handle, Holding, Lane
from ssdtrain.cache.state import STAYED, RecordState, SavedBytes
from ssdtrain.rebuild.expression import Layout
from ssdtrain.transfer.copies import PinnedCopy


class MovedTensor(SavedBytes):
    """The bytes of one saved tensor at one version, on their way out and back. It is
    neither conjugated nor negated: its elements are what its bytes say."""

    __slots__ = (
        "copy",
        "due",
        "end_byte",
        "stamp",
        "start_byte",
        "version",
        "written_late",
    )
    lane: Lane

    def __init__(
        self,
        tensor: Tensor,
        name: str,
        lane: Lane,
        ledger: Ledger,
        copy: PinnedCopy | None,
    ) -> None:
        """copy: where it will go; None: it stays."""
        self.data = tensor.detach()
        self.version = tensor._version
        self.num_bytes = num_bytes = tensor.nbytes
        self.name = name
        self.lane = lane
        self.ledger = ledger
        self.copy: Any = copy
        self.state = RecordState.KEPT
        self.num_handles = 1
        self.num_uses = 0
        self.due = 0
        """Mark of its release, once it has left."""
        self.stamp: Any = None
        self.start_byte = self.end_byte = 0
        self.written_late = tensor.grad_fn is None
        """Whether its operator may have filled it after autograd saved it."""
        self.holding = holding = Holding(lane)
        holding.transfer = copy  # taken, also if it never leaves
        holding.live_bytes = num_bytes
        ledger.live(num_bytes)

    @property
    def like(self) -> Tensor:
        """A tensor of the same dtype, shape and strides: the bytes, or their place."""
        data = self.data
        return self.copy.pinned.memory if data is None else data

    def is_read_by(self, view: Tensor) -> bool:
        """Whether a view of the same bytes takes them for the same numbers."""
        like = self.like
        return like.dtype is view.dtype and not (view.is_conj() or view.is_neg())

    def check_writer(self) -> None:
        """Refuse bytes of before their operator filled them."""
        if self.written_late and self.state not in STAYED:
            check_late_writer(self)


class MovedHandle(Handle):
    """A saved tensor inside a `MovedTensor`."""

    __slots__ = (
        "counter",
        "moved",
        "offset",
        "row",
        "run",
        "shape",
        "stride",
        "version",
    )

    def __init__(self, moved: MovedTensor, tensor: Tensor, run: Any, row: Any) -> None:
        self.moved = moved
        self.run = run
        self.row = row
        self.shape: Any = None
        """None: the whole, as it was first saved."""
        # Shares the version counter and no memory: see [Note: in-place changes].
        self.counter = counter = tensor.detach()
        counter.data = run.nothing
        self.version = moved.version
        self.epsilon = None

    def view(self, tensor: Tensor, offset: int) -> None:
        """It is another view of the bytes, `offset` elements after their first."""
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.offset = offset

    def get(self) -> Tensor:
        """The tensor; `InPlaceError` if it was changed after it was saved."""
        if self.counter._version != self.version:
            check_version(self.counter, self.version, self.moved.name)
        data: Tensor = self.run.fetch(self.moved, self.row)
        return data if self.shape is None else self._inside(data)

    def look(self) -> Tensor:
        """As `get`, past the plan: the use that it counts is still to come."""
        check_version(self.counter, self.version, self.moved.name)
        self.moved.check_writer()
        return self._inside(self.run.read(self.moved))

    @property
    def layout(self) -> Layout:
        """Of the tensor."""
        like = self.moved.like
        if self.shape is None:
            return Layout.of(like)
        return Layout(like.dtype, tuple(self.shape), self.stride)

    def peek(self) -> Tensor:
        """The tensor as it is now: no use is counted, and no state changes."""
        data, copy = self.moved.data, self.moved.copy
        if data is None:  # once for each class of recipes
            copy.copied.synchronize()
            data = copy.pinned.memory.to(self.counter.device, copy=True)
        elif self.moved.state is RecordState.RETURNING:
            self.run.read(self.moved)
        return self._inside(data)

    def _inside(self, data: Tensor) -> Tensor:
        if self.shape is None:
            return data
        # `data` may be a part of a storage, as long as it has not left.
        first = data.storage_offset() + self.offset
        return torch.as_strided(data, self.shape, self.stride, first)


class MovedNote(NamedTuple):
    """Put on a node of autograd whose output was saved: a handle of it, which the note
    does not keep alive."""

    reference: "weakref.ref[MovedHandle]"

    def handle(self) -> MovedHandle | None:
        """The handle, while it lives."""
        return self.reference()
