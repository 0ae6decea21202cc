"""Buffers that a forward updates in place, as batch normalization does in training.

[Note: updated buffers]
A forward that runs again would update its running statistics twice. So a re-run finds
copies of such buffers in their places, and what it writes goes with the copies. They
have the values from before the forward. Torch's own normalizations only write to their
statistics in training: where no other code of the region names them, any values do,
and nothing is copied in forward. Torch's normalizations are known beforehand. Of all
other modules the first call that updates a buffer runs once, and tells which buffer.
A kernel may write past the version (`F.batch_norm` does), so bytes are compared in the
first calls. Normalization that is synchronized between processes runs once: its re-run
would communicate, and other ranks may follow other plans.
(tests/ssdtrain/regions/test_updated.py)
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from ssdtrain.regions.restore import Undo, put_item

STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
WRITE_ONLY = frozenset((_BatchNorm.forward, _InstanceNorm.forward))
"""Forwards whose results in training do not depend on the statistics."""
MAX_BYTES = 1024 * 1024
"""Of one region's buffers that are copied in each forward; with more it runs once."""
Digest = Callable[[Tensor], Tensor | None]


class BufferPlace(NamedTuple):
    """Where a module holds a buffer."""

    module: nn.Module
    name: str
    buffer: Tensor


class Updated:
    """The buffers of a region that its forward updates.

    Args:
        read: those whose values its code may read.
        unread: the others.
    """

    def __init__(self, read: list[BufferPlace], unread: list[BufferPlace]) -> None:
        self._read, self._unread = read, unread
        self._any: list[Tensor] = []
        """Copies of any values, made for the first re-run."""
        self.ids = {id(place.buffer) for place in (*read, *unread)}

    def values(self) -> list[Tensor]:
        """Copies of the values that its code may read, as they are now."""
        with torch.no_grad():
            return [place.buffer.clone() for place in self._read]

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
        with torch.no_grad():
            if not self._any:
                self._any = [place.buffer.clone() for place in self._unread]
            copies = [*(value.clone() for value in values), *self._any]
        ids.update(map(id, copies))
        try:
            for place, other in zip((*self._read, *self._unread), copies, strict=True):
                put_item(place.module._buffers, place.name, other, undo)
            yield
        finally:
            ids.clear()
            while undo:
                undo.pop()()


NONE_UPDATED = Updated([], [])


class Updating:
    """Which modules of one region update which of their buffers."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, set[str]]
        self._known = weakref.WeakKeyDictionary()

    def note(self, module: nn.Module, names: Iterable[str]) -> None:
        """A forward has updated these."""
        self._known.setdefault(module, set()).update(names)

    def among(self, modules: Sequence[nn.Module], asked: set[str]) -> Updated:
        """Those of these modules.

        Args:
            asked: names that code other than torch's reads.
        """
        read: list[BufferPlace] = []
        unread: list[BufferPlace] = []
        is_asked = not STATISTICS.isdisjoint(asked)
        for module in modules:
            if isinstance(module, nn.SyncBatchNorm):
                continue
            names, found = self._known.get(module, set()), unread
            if isinstance(module, _NormBase) and module.training:
                if module.track_running_stats:
                    names = names | STATISTICS
            if is_asked or not _only_writes(module):
                found = read
            for name in sorted(names):
                buffer = module._buffers.get(name)
                if buffer is not None:
                    found.append(BufferPlace(module, name, buffer))
        if not (read or unread):
            return NONE_UPDATED
        own = [place.buffer for place in (*read, *unread)]
        num_bytes = sum(place.buffer.nbytes for place in read)
        if num_bytes > MAX_BYTES or not _are_apart(own):
            return NONE_UPDATED
        return Updated(read, unread)


def _only_writes(module: nn.Module) -> bool:
    """Whether it is a normalization of torch's that uses the batch's statistics."""
    forward = getattr(type(module), "forward", None)
    is_own = isinstance(module, _NormBase) and "forward" not in vars(module)
    return is_own and module.training and forward in WRITE_ONLY


def _are_apart(buffers: list[Tensor]) -> bool:
    """Whether all are plain, and none shares its bytes with another."""
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
