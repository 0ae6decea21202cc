"""What recipes may read: the saved tensors of a cache, and its model's parameters.

See `OperandLookup` in rebuild/graph.py.
"""

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ssdtrain.cache.handles import KeptHandle, ParameterHandle, ParameterViewHandle
from ssdtrain.cache.identity import Probe, View, is_plain
from ssdtrain.cache.moved import MovedHandle, MovedNote
from ssdtrain.cache.record import (
    Handle,
    Kept,
    ParameterView,
    Rebuilt,
    RebuiltView,
    Record,
    RecordView,
)
from ssdtrain.cache.rows import KeptItemHandle
from ssdtrain.cache.weights import Weights
from ssdtrain.counters import Fallback
from ssdtrain.rebuild.expression import Epsilon, Layout, TensorInput
from ssdtrain.rebuild.graph import Store, notes_of
from ssdtrain.rebuild.modes import ENTRIES
from ssdtrain.rebuild.recipes import narrow

if TYPE_CHECKING:
    from ssdtrain.cache.cache import TensorCache

HANDLES = frozenset(
    (Handle, KeptHandle, KeptItemHandle, ParameterHandle, ParameterViewHandle)
)
"""Handles whose tensor a recipe may read, besides those of a table's items. Not those
of wrappers and of regions."""


class Note(NamedTuple):
    """Put on a node of autograd whose output was saved: its owner, and the view."""

    owner: "weakref.ref[Record | Rebuilt]"
    view: View
    probe: Probe

    def handle(self) -> Handle | None:
        """A new handle, while the owner lives."""
        owner = self.owner()
        if owner is None:
            return None
        if isinstance(owner, Record):
            return Handle(RecordView(owner, self.view, self.probe))
        return Handle(RebuiltView(owner, self.view, self.probe))


class CacheKeeper:
    """Finds what recipes may read, and refuses what was changed."""

    def __init__(self, cache: "TensorCache", weights: Weights) -> None:
        self._cache = cache
        self._weights = weights
        self.met_unsaved = False
        """Whether the running search met an unsaved tensor that may have changed."""

    def saved(self, packed: Any, node: Any) -> TensorInput | None:
        """The tensor after a handle or a note of this node, unless it was changed."""
        is_note = type(packed) is Note or type(packed) is MovedNote
        handle: Any = packed.handle() if is_note else packed
        if type(handle) is MovedHandle:
            return self._of_table(handle, None if is_note else handle.epsilon)
        if type(handle) not in HANDLES:
            return None  # nobody's, or without a record
        source: Any = handle.source
        kind = type(source)
        if kind is Kept:
            tensor = source.tensor
            if tensor._version != source.version or not is_plain(tensor):
                return None
            return TensorInput(holder=handle, layout=Layout.of(tensor), owner=tensor)
        if kind is ParameterView:
            return self._saved_parameter(source, node)
        if kind is not RecordView and kind is not RebuiltView:
            return None
        owner, view, probe = source
        if self.is_of_another_region(owner):
            return None
        ours = owner.retired is self._cache.retired
        if probe.counter._version != probe.version:
            self.refuse()
            return None
        if not ours or view.is_conj or view.is_neg:
            return None
        depth = owner.expression.depth if kind is RebuiltView else 0
        layout = Layout(view.dtype, tuple(view.shape), view.stride)
        return TensorInput(
            holder=handle,
            layout=layout,
            depth=depth,
            owner=owner,
            epsilon=handle.epsilon,
        )

    def is_of_another_region(self, owner: Record | Rebuilt) -> bool:
        """Whether a region that is not the running one would have to run again, too
        early, for who reads these bytes. A region that read its input from the one
        before would keep both alive, and so all of them."""
        region = owner.region
        return region is not None and region is not self._cache.regions.current

    def _of_table(
        self, handle: MovedHandle, epsilon: Epsilon | None
    ) -> TensorInput | None:
        """An item that a row of a table has taken over."""
        moved = handle.moved
        if moved.ledger is not self._cache.ledger:
            return None  # another session's
        if handle.counter._version != handle.version:
            self.refuse()
            return None
        return TensorInput(
            holder=handle, layout=handle.layout, owner=moved, epsilon=epsilon
        )

    def is_altered(self) -> bool:
        """Whether a dispatch mode stands, which the hooks count, or was entered in this
        step."""
        return ENTRIES.num != self._cache.ledger.modes_before

    def refuse(self) -> None:
        """Count a recipe that had to be refused."""
        self._cache.offloader.fall_back(Fallback.RECIPE_REFUSED)

    def refuse_unsaved(self) -> None:
        """A way refused by [Note: unsaved tensors]: counted if there is no other."""
        self.met_unsaved = True

    def parameter(
        self, parameter: nn.Parameter, node: Any, edge: int | None = None
    ) -> TensorInput | None:
        """A parameter as the operator of this node read it."""
        if not is_plain(parameter):
            return None
        state, seen = self._weights.state(parameter), None
        if edge is not None:
            seen = notes_of(node).parameters.get(edge)
        if seen is None:
            is_same = self._weights.was_read_as_is(
                parameter, node, was_saved=edge is None
            )
        else:
            is_same = seen == state
        if not is_same:
            self.refuse()
            return None
        if edge is not None:
            notes_of(node).parameters[edge] = state
        handle = self._weights.operand(parameter)
        if handle is None:
            return None
        layout = Layout.of(parameter)
        return TensorInput(holder=handle, layout=layout, parameter=parameter)

    def _saved_parameter(self, view: ParameterView, node: Any) -> TensorInput | None:
        """A parameter, or a view of one: the transposed weight of a linear layer."""
        parameter = view.parameter
        if parameter._version != view.version or not is_plain(parameter):
            return None
        if view.shape is None:
            return self.parameter(parameter, node)
        dense = torch.ops.aten.is_non_overlapping_and_dense
        if not parameter.is_contiguous() and not dense(parameter):
            return None  # a copy of it would have other strides
        if not self._weights.was_read_as_is(parameter, node, was_saved=True):
            self.refuse()
            return None
        handle = self._weights.operand(parameter, view)
        if handle is None:
            return None
        layout = Layout(parameter.dtype, tuple(view.shape), view.stride)
        return TensorInput(holder=handle, layout=layout, parameter=parameter)

    def narrowed(
        self, wide: Tensor, dtype: torch.dtype, store: Store | None = None
    ) -> TensorInput:
        """Store a narrow copy; it goes where its placement says."""
        observer = self._cache.cursor.observer
        if observer.listens:
            observer.makes()
        tensor = narrow(wide.detach(), dtype)
        if observer.listens:
            observer.made()
        handle = (store or self._cache.pack)(tensor)
        return TensorInput(
            holder=handle, layout=Layout.of(tensor), stored_bytes=tensor.nbytes
        )
