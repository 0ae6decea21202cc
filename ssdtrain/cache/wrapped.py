"""Saved tensors that wrap a plain one: DTensor, and the result of a collective.

[Note: wrappers]
A DTensor is a description around this rank's part, a plain tensor. The part is what
has bytes: it is packed as any other tensor, and backward gets a new DTensor of the same
description around it. A collective may still be filling the part when autograd saves
it; the operator that saves it is about to wait for that, so pack waits.
What runs below autograd never counts versions, so the part of a DTensor that was
changed in place looks unchanged. The wrapper's own version decides: it is part of the
record's identity, and backward compares it through a tensor that shares the counter
and none of the bytes. In a region the part is a record and an item as well: the
observed step runs all regions again, and a plan may choose that some do not.
A tensor parallel step is bound by its host, so a row that has met a DTensor takes the
next one apart without a search for classes, and nothing but its constructor builds it.
(tests/ssdtrain/hosts/test_meshes.py, tests/ssdtrain/cache/test_wrapped.py)
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.cache.identity import check_version, is_plain
from ssdtrain.cache.record import Handle, Wrapped

DTENSOR = "torch.distributed.tensor"
COLLECTIVES = "torch.distributed._functional_collectives"


class Unwrapped(NamedTuple):
    """A wrapper taken apart."""

    local: Tensor
    """This rank's part: plain, and without a graph."""
    shell: "Shell | None"
    """What is around it; None: the wrapper was nothing else."""


class Shell(NamedTuple):
    """A DTensor without its part."""

    kind: Any
    spec: Any

    def around(self, local: Tensor) -> Tensor:
        """The wrapper again, around a part."""
        # Not `from_local`, which has a graph and forgets in which order dimensions were
        # split; `__tensor_unflatten__` takes other parts in 2.11 than in 2.13. Its
        # `__init__` does nothing, in three microseconds.
        kind = self.kind
        wrapper: Tensor = kind.__new__(kind, local, self.spec, requires_grad=False)
        return wrapper


def unwrapped(tensor: Tensor) -> Unwrapped | None:
    """The parts of a wrapper; None for what is none, or wraps no plain tensor."""
    kind = type(tensor)
    if kind is _named(DTENSOR, "DTensor"):
        local = _waited(tensor._local_tensor)  # type: ignore[attr-defined]
        shell = Shell(kind, tensor._spec)  # type: ignore[attr-defined]
        return Unwrapped(local.detach(), shell) if is_plain(local) else None
    if not _waits(kind):
        return None
    local = _waited(tensor)
    return Unwrapped(local.detach(), None) if is_plain(local) else None


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor, or the part that it wraps."""
    if type(tensor) is Tensor:
        return tensor
    found = unwrapped(tensor)
    return tensor if found is None else found.local


def _waited(tensor: Tensor) -> Tensor:
    """The tensor that a collective fills, behind it in compute order."""
    if _waits(type(tensor)):
        return tensor.trigger_wait()  # type: ignore[attr-defined, no-any-return]
    return tensor


def _waits(kind: type) -> bool:
    return kind is not Tensor and kind is _named(COLLECTIVES, "AsyncCollectiveTensor")


def _named(module: str, name: str) -> Any:
    """A class of a module that somebody has imported; None before."""
    return getattr(sys.modules.get(module), name, None)


def counter_of(tensor: Tensor) -> Tensor:
    """A tensor with the wrapper's version counter and none of its bytes."""
    # torch has no public name for it (2.11 to 2.13).
    with torch._C._DisableTorchDispatch():
        return Tensor.detach(tensor)


class WrappedHandle(Handle):
    """A saved wrapper: the handle of its part, and what is around it."""

    __slots__ = ("_back", "_counter", "_shell", "_version")

    def __init__(
        self,
        tensor: Tensor,
        shell: Shell | None,
        inner: Any,
        back: Callable[[Any], Tensor],
    ) -> None:
        """inner: of the part. back: brings the part back."""
        # Not by the base class: a call for each tensor. Nothing but `get` looks into
        # the source; whoever asks for a record finds none.
        self.source = Wrapped(inner)  # type: ignore[assignment]
        self.number = -1
        self.epsilon = self.seal = None
        self._shell = shell
        self._back = back
        self._counter = counter = counter_of(tensor)
        self._version = counter._version

    def get(self) -> Tensor:
        """The wrapper; `InPlaceError` if it was changed after it was saved."""
        if self._counter._version != self._version:
            check_version(self._counter, self._version, "a distributed tensor")
        inner = self.source.inner  # type: ignore[union-attr]
        local = self._back(inner) if type(inner) is Handle else inner.get()
        shell = self._shell
        return local if shell is None else shell.around(local)

    def around(self, back: Callable[[Any], Tensor]) -> Tensor:
        """The wrapper around what `back` brings of its part."""
        local = back(self.source.inner)  # type: ignore[union-attr]
        return local if self._shell is None else self._shell.around(local)
