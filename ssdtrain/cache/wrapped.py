"""Saved tensors that wrap a plain one: DTensor, and the result of a collective.

[Note: wrappers]
A DTensor is a description around this rank's part, a plain tensor. The part is what
has bytes: it is packed as any other tensor, and backward gets a new DTensor of the same
description around it. A collective may still be filling the part when autograd saves
it; the operator that saves it is about to wait for that, so pack waits.
What runs below autograd never counts versions, so the part of a DTensor that was
changed in place looks unchanged. The wrapper's own version decides: it is part of the
record's identity, and backward compares it through a tensor that shares the counter
and none of the bytes.
(tests/ssdtrain/hosts/test_meshes.py)
"""

import sys
from collections.abc import Callable
from functools import partial
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
    build: Callable[[Tensor], Tensor]
    """The wrapper again, around a part."""


def unwrapped(tensor: Tensor) -> Unwrapped | None:
    """The parts of a wrapper; None for what is none, or wraps no plain tensor."""
    kind = type(tensor)
    if _waits(kind):
        return _checked(_waited(tensor), _itself)
    if kind is not _named(DTENSOR, "DTensor"):
        return None
    # Not `from_local`, which has a graph and forgets in which order dimensions were
    # split; `__tensor_flatten__` gives other parts in 2.11 than in 2.13.
    build = partial(_around, kind, tensor._spec)  # type: ignore[attr-defined]
    return _checked(_waited(tensor._local_tensor), build)  # type: ignore[attr-defined]


def _checked(local: Tensor, build: Callable[[Tensor], Tensor]) -> Unwrapped | None:
    return Unwrapped(local.detach(), build) if is_plain(local) else None


def _around(kind: Any, spec: Any, local: Tensor) -> Tensor:
    wrapper: Tensor = kind(local, spec, requires_grad=False)
    return wrapper


def _itself(local: Tensor) -> Tensor:
    return local


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

    __slots__ = ("_back", "_build", "_counter", "_version")

    def __init__(
        self,
        tensor: Tensor,
        build: Callable[[Tensor], Tensor],
        inner: Any,
        back: Callable[[Any], Tensor],
    ) -> None:
        """inner: of the part. back: brings the part back."""
        # Nothing but `get` looks into it; whoever asks for a record finds none.
        super().__init__(Wrapped(inner))  # type: ignore[arg-type]
        self._build = build
        self._back = back
        self._counter = counter_of(tensor)
        self._version = tensor._version

    def get(self) -> Tensor:
        """The wrapper; `InPlaceError` if it was changed after it was saved."""
        if self._counter._version != self._version:
            check_version(self._counter, self._version, "a distributed tensor")
        back = self._back
        return self.around(lambda i: back(i) if type(i) is Handle else i.get())

    def around(self, back: Callable[[Any], Tensor]) -> Tensor:
        """The wrapper around what `back` brings of its part."""
        return self._build(back(self.source.inner))  # type: ignore[union-attr]
