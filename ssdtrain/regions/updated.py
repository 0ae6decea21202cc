"""Statistics that batch normalization updates in place in training.

[Note: updated buffers]
A forward that runs again would update its running statistics twice. So a re-run finds
copies of such buffers in their places, which have the values from before the forward,
and what it writes goes with the copies. That holds for torch's own batch normalization
alone, and where nobody else in the region can read its buffers: no code asks for them
by name, and nothing that it reads leads to them or shares their bytes. A forward that
updates any other tensor runs once. A kernel may write past the version
(`F.batch_norm` does), so bytes of all tensors that a region reads are compared in the
first call. Where the program's own code names a way to do so (`data`), it runs once.
Another thread that uses the module while it runs again finds the copies as well.
(tests/ssdtrain/regions/test_updated.py)
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ssdtrain.regions.restore import Undo, put_item
from ssdtrain.regions.weights import PLACE, STORAGE, has_place

STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
MAX_DEPTH = 4
"""Of containers and objects in one another, among a module's attributes."""
Digest = Callable[[Tensor], Tensor | None]


class BufferPlace(NamedTuple):
    """Where a module holds a buffer."""

    module: nn.Module
    name: str
    buffer: Tensor


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Where their storages are told apart."""
    return {*map(PLACE, map(STORAGE, tensors))}


class Updated:
    """The buffers of a region that its forward updates."""

    def __init__(self, places: list[BufferPlace]) -> None:
        self._places = places
        self._buffers = [place.buffer for place in places]
        self.ids = set(map(id, self._buffers))
        self._storages = storages(self._buffers)

    def values(self) -> list[Tensor]:
        """Copies of them as they are now."""
        return _copies(self._buffers)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is one of them, or a view of one."""
        return id(tensor) in self.ids or id(tensor._base) in self.ids

    def shares(self, tensor: Tensor) -> bool:
        """Whether it has the bytes of one of them, under another name."""
        apart = id(tensor) not in self.ids and has_place(tensor)
        return apart and not self._storages.isdisjoint(storages([tensor]))

    @contextmanager
    def replaced(self, values: list[Tensor], ids: set[int]) -> Iterator[None]:
        """A block in which copies are in the places of the buffers.

        Args:
            values: what `values` gave when the forward began.
            ids: filled with those of the copies.
        """
        undo: Undo = []
        copies = _copies(values)
        ids.update(map(id, copies))
        try:
            for place, other in zip(self._places, copies, strict=True):
                put_item(place.module._buffers, place.name, other, undo)
            yield
        finally:
            ids.clear()
            while undo:
                undo.pop()()


NONE_UPDATED = Updated([])


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Of a normalization's many small ones; in one kernel on a GPU."""
    with torch.no_grad():
        found = [*map(torch.empty_like, tensors)]
        if found:
            torch._foreach_copy_(found, tensors)
    return found


def is_norm(module: nn.Module) -> bool:
    """Whether it is a batch normalization of torch's own code."""
    own = type(module).forward is _BatchNorm.forward and "forward" not in vars(module)
    return own and isinstance(module, _BatchNorm)


def has_statistics(module: nn.Module) -> bool:
    """Whether a normalization of torch's may update statistics of the module."""
    is_norm_of_torch = isinstance(module, _NormBase)
    return is_norm_of_torch and module._buffers.get("running_mean") is not None


def storages_of(normalizations: Iterable[nn.Module]) -> set[int]:
    """Those of the statistics that these may update."""
    held = (x._buffers.values() for x in normalizations if x.track_running_stats)
    buffers = (each for one in held for each in one if each is not None)
    return storages(filter(has_place, buffers))


def updated_by(
    modules: Sequence[nn.Module], trained: Container[nn.Module], *, are_asked_for: bool
) -> Updated | None:
    """The statistics that the batch normalizations among a region's modules update: in
    evaluation before backward comes. None: others may read them.

    Args:
        trained: those that do at times.
        are_asked_for: whether other code does, by name.
    """
    found = [
        BufferPlace(module, name, buffer)
        for module in modules
        if is_norm(module) and module in trained and module.track_running_stats
        for name in sorted(STATISTICS)
        if (buffer := module._buffers.get(name)) is not None
    ]
    if not found:
        return NONE_UPDATED
    if are_asked_for or not _are_apart(found):
        return None
    updated = Updated(found)
    return None if _are_reached(modules, updated) else updated


def _are_apart(places: list[BufferPlace]) -> bool:
    """Whether all are plain, and no two share their bytes."""
    buffers = [place.buffer for place in places]
    for each in buffers:
        is_plain = type(each) is Tensor and each.layout is torch.strided
        if not is_plain or each._base is not None or each.requires_grad:
            return False
    return len(storages(buffers)) == len(places)


def _are_reached(modules: Sequence[nn.Module], updated: Updated) -> bool:
    """Whether an attribute of a module leads to one of them."""
    own = ("_buffers", "_parameters", "_modules")
    for module in modules:
        others = (value for name, value in vars(module).items() if name not in own)
        if any(_leads_to(updated, value, MAX_DEPTH) for value in others):
            return True
        if not is_norm(module):
            if any(id(each) in updated.ids for each in module._buffers.values()):
                return True
    return False


def _leads_to(updated: Updated, value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return id(value) in updated.ids or updated.shares(value)
    if depth == 0 or isinstance(value, nn.Module | type):
        return False
    if isinstance(value, dict):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, tuple | list | set | frozenset | deque):
        inside = value
    else:
        inside = getattr(value, "__dict__", {}).values()
    return any(_leads_to(updated, each, depth - 1) for each in inside)


class UnwrittenDigests:
    """Digests of what a call that is not trusted yet must leave as it is: a kernel may
    write to it past its version, and `data` may be another tensor's.

    Args:
        tensors: parameters, buffers and other tensors that the call may reach.
        digest: of a tensor; None: there is none.
    """

    def __init__(self, tensors: Iterable[Tensor], digest: Digest) -> None:
        self._digest = digest
        found = [(each, digest(each)) for each in tensors]
        self._before = [(x, x.data_ptr(), own) for x, own in found if own is not None]

    def are_same(self) -> bool:
        """Whether bytes and places are what they were; waits for the device."""
        for tensor, place, before in self._before:
            if tensor.data_ptr() != place:
                return False
            now = self._digest(tensor)
            if now is None or not torch.equal(now, before):
                return False
        return True
