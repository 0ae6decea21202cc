"""Buffers that a forward updates in place, as batch normalization does in training.

[Note: updated buffers]
A forward that runs again would update its running statistics twice. So a re-run finds
copies of such buffers in their places, which have the values from before the forward,
and what it writes goes with the copies. Batch normalizations are known beforehand. Of
all other modules the first call that updates a buffer runs once, and tells which
buffer. A kernel may write past the version (`F.batch_norm` does), so bytes are compared
in the first calls. Two kinds run once. Normalization that is synchronized between
processes communicates, and other ranks may follow other plans. Instance normalization
has copies of its statistics saved, and writes to these copies after that: `verify`
could not tell them from wrong ones.
(tests/ssdtrain/regions/test_updated.py)
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ssdtrain.regions.restore import Undo, put_item

STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
ONCE = (nn.SyncBatchNorm, _InstanceNorm)
MAX_BYTES = 1024 * 1024
"""Of buffers of one region that are copied in each forward; with more it runs once.
Batch normalization's do not count: what it saves is a hundred times as large."""
Digest = Callable[[Tensor], Tensor | None]


class BufferPlace(NamedTuple):
    """Where a module holds a buffer."""

    module: nn.Module
    name: str
    buffer: Tensor


class Updated:
    """The buffers of a region that its forward updates."""

    def __init__(self, places: list[BufferPlace]) -> None:
        self._places = places
        self._buffers = [place.buffer for place in places]
        self.ids = set(map(id, self._buffers))

    def values(self) -> list[Tensor]:
        """Copies of them as they are now."""
        return _copies(self._buffers)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is one of them, or a view of one."""
        return id(tensor) in self.ids or id(tensor._base) in self.ids

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


class Updating:
    """Which modules of one region update which of their buffers."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, set[str]]
        self._known = weakref.WeakKeyDictionary()

    def note(self, module: nn.Module, names: Iterable[str]) -> None:
        """A forward has updated these."""
        self._known.setdefault(module, set()).update(names)

    def among(self, modules: Sequence[nn.Module]) -> Updated:
        """Those of these modules."""
        found: list[BufferPlace] = []
        num_bytes = 0
        for module in modules:
            if isinstance(module, ONCE):
                continue
            names = self._known.get(module, set())
            is_norm = isinstance(module, _BatchNorm)
            if is_norm and module.training and module.track_running_stats:
                names = names | STATISTICS
            for name in sorted(names):
                buffer = module._buffers.get(name)
                if buffer is not None:
                    found.append(BufferPlace(module, name, buffer))
                    num_bytes += 0 if is_norm and name in STATISTICS else buffer.nbytes
        if not found or num_bytes > MAX_BYTES or not _are_apart(found):
            return NONE_UPDATED
        return Updated(found)


def _are_apart(places: list[BufferPlace]) -> bool:
    """Whether all are plain, and none shares its bytes with another."""
    buffers = [place.buffer for place in places]
    for each in buffers:
        is_plain = type(each) is Tensor and each.layout is torch.strided
        if not is_plain or each._base is not None or each.requires_grad:
            return False
    storages = {each.untyped_storage().data_ptr() for each in buffers if each.numel()}
    return len(storages) == sum(each.numel() > 0 for each in buffers)


class BufferDigests:
    """Digests of the buffers of one call that is not trusted yet: a kernel may write
    to them past their versions.

    Args:
        places: of the modules.
        digest: of a tensor; None: there is none.
    """

    def __init__(self, places: Iterable[BufferPlace], digest: Digest) -> None:
        self._digest = digest
        self._before = [(place, digest(place.buffer)) for place in places]

    def written(self) -> list[BufferPlace]:
        """Those whose bytes are others now; waits for the device."""
        found = []
        for place, before in self._before:
            now = None if before is None else self._digest(place.buffer)
            if before is not None and (now is None or not torch.equal(now, before)):
                found.append(place)
        return found
