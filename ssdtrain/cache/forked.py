"""Saved tensors in a forked child. See [Note: after a fork] in ssdtrain/forks.py.

Any lock may be held by a thread that the child does not have, and any book may be half
written. So the child takes no lock and writes no book: what autograd saves there stays,
and of what was saved before the fork it gets what is still on the device, and what
recipes make of that.
"""

from typing import Any

from torch import Tensor

from ssdtrain.cache.handles import KeptHandle, ParameterHandle
from ssdtrain.cache.identity import check_version, parameter_of
from ssdtrain.cache.moved import MovedHandle
from ssdtrain.cache.record import Handle, Kept, ParameterView, RebuiltView, RecordView
from ssdtrain.cache.rows import KeptItemHandle
from ssdtrain.cache.savedindex import SavedIndex, SealedIndex
from ssdtrain.cache.savedplaces import PlaceHandle
from ssdtrain.cache.state import STAYED
from ssdtrain.cache.wrapped import FlattenedHandle, WrappedHandle
from ssdtrain.errors import ForkedError
from ssdtrain.rebuild.expression import evaluate


def handle_in_child(tensor: Tensor) -> Handle:
    """A handle of a tensor that the child saves."""
    parameter = parameter_of(tensor)
    view = None if parameter is None else ParameterView.of(tensor, parameter)
    return Handle(Kept(tensor.detach(), tensor._version) if view is None else view)


def unpack_in_child(handle: Any) -> Tensor:
    """A saved tensor, from its handle.

    Raises:
        InPlaceError: it was changed after it was saved.
        ForkedError: its bytes were moved by the parent.
    """
    if isinstance(handle, KeptHandle | ParameterHandle):
        return handle.get()
    if isinstance(handle, MovedHandle):
        check_version(handle.counter, handle.version, handle.moved.name)
        data = _stayed(handle.moved)
        if handle.shape is None:
            return data
        first = data.storage_offset() + handle.offset
        return data.as_strided(handle.shape, handle.stride, first)
    if isinstance(handle, KeptItemHandle):
        return handle.source.rebuild()
    if isinstance(handle, PlaceHandle | SavedIndex):
        return handle.stayed()
    if isinstance(handle, SealedIndex):
        return handle.index.stayed()
    if isinstance(handle, WrappedHandle | FlattenedHandle):
        return handle.around(unpack_in_child)
    source = handle.source
    if isinstance(source, Kept | ParameterView):
        return source.rebuild()
    if isinstance(source, RecordView):
        source.check()
        return source.view.rebuild(_stayed(source.record))
    return _rebuilt(source)


def _rebuilt(source: RebuiltView) -> Tensor:
    source.probe.check(source.rebuilt)
    inputs = [unpack_in_child(holder) for holder in source.rebuilt.holders]
    return source.view.rebuild(evaluate(source.rebuilt.expression, inputs))


def _stayed(record: Any) -> Tensor:
    # What was on its way back may not have arrived when the process forked.
    data: Tensor | None = record.data
    if record.state not in STAYED or data is None:
        raise ForkedError(
            f"the saved tensor of {record.name} was moved by the process that forked "
            "this one; run backward where forward ran, or fork before forward."
        )
    return data
