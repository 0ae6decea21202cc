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
(tests/ssdtrain/engines/test_meshes.py, tests/ssdtrain/cache/test_wrapped.py)

[Note: parts with recipes]
`DTensor.from_local` makes no bytes: the part of its result is a view of the plain
tensor that it was given. So where a tensor parallel layer saves its input (a product of
gate and other, an activation), the part shows what a plain operator made, and that
tensor's recipe is the part's. Nothing is computed on a DTensor. What must hold:
- the wrapper is the result of `from_local` or a view of it, and its part lies in the
  plain tensor's storage: an operator of DTensor, or a redistribution that moved bytes,
  has made others;
- the plain tensor went from its operator to `from_local` without another wrapper in
  between, which may have been written to: the edge of the one's node is the other's;
- neither was changed: the plain tensor does not count what is written through the
  wrapper, nor the wrapper what is written past it, so both versions are 0 now (that of
  the plain tensor is asked for with its recipe), and both are compared in backward;
- all placements are shards: `from_local(..., run_check=True)` broadcasts into what it
  was given wherever a placement is a replica, and no version counts that.
Other recipes do not find the plain tensor by such a part: they would not ask for the
wrapper's version.
(tests/ssdtrain/rebuild/test_wrapped.py)

[Note: flattened]
Any other wrapper that torch.compile can take apart (`__tensor_flatten__`: the quantized
tensors of torchao, say) is saved as its inner tensors, each of which is packed by
itself, and as what is around them. Inner tensors may be wrappers again. Versions are
those of the wrapper and of each inner tensor; no recipe makes an inner tensor, as no
operator of autograd did. Jagged tensors stay: their sizes are those of one offsets
tensor, by identity. So do wrappers that their class does not put together as they were:
it is tried when they are saved. A region that runs again makes the wrapper itself
again.
(tests/ssdtrain/cache/test_flattened.py)
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ssdtrain.cache.identity import check_version, is_plain
from ssdtrain.cache.record import Flattened, Handle, Kept, Wrapped, part_of
from ssdtrain.rebuild.between import is_unwritten

DTENSOR = "torch.distributed.tensor"
FROM_LOCAL = "_FromTorchTensorBackward"
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


def as_made(part: Tensor, wrapper: Any) -> Tensor:
    """The part of a wrapper, as a view of the plain tensor that `from_local` was given,
    whose recipe makes it: [Note: parts with recipes]. The part itself where one must
    not be asked for, or where the wrapper is none."""
    if part is wrapper or wrapper._version:
        return part
    whole = wrapper if wrapper._base is None else wrapper._base
    node = whole.grad_fn
    if node is None or node.name() != FROM_LOCAL:
        return part
    if type(whole) is not _named(DTENSOR, "DTensor"):
        return part
    if not all(placement.is_shard() for placement in whole.placements):
        return part
    source = whole._local_tensor._base
    if type(source) is not Tensor or source.dtype is not part.dtype:
        return part
    made_by, output = node.next_functions[0]
    if made_by is None or made_by is not source.grad_fn or output != source.output_nr:
        return part
    if source.untyped_storage()._cdata != part.untyped_storage()._cdata:
        return part
    if not is_unwritten(wrapper, whole):
        return part
    with torch.enable_grad():  # so that it shows what lies between: nothing
        size, stride = part.size(), part.stride()
        return torch.as_strided(source, size, stride, part.storage_offset())


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor, or the part that it wraps."""
    if type(tensor) is Tensor:
        return tensor
    found = unwrapped(tensor)
    return tensor if found is None else found.local


NOT_PUT_TOGETHER = (AssertionError, NotImplementedError, TypeError, ValueError)
"""By a class that does not put a wrapper together, as the base class of a library's."""


class Frame(NamedTuple):
    """A wrapper without its inner tensors: [Note: flattened]."""

    kind: Any
    names: list[str]
    """Of the attributes that hold them."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def around(self, inners: list[Tensor]) -> Tensor:
        """The wrapper again, around its inner tensors."""
        parts = dict(zip(self.names, inners, strict=True))
        wrapper: Tensor = self.kind.__tensor_unflatten__(
            parts, self.context, self.size, self.stride
        )
        return wrapper


def flattened(tensor: Tensor) -> tuple[list[Tensor], Frame] | None:
    """The inner tensors of a wrapper, and what is around them; None for what cannot be
    taken apart."""
    if not is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        return None
    if _waits(type(tensor)) or tensor.is_nested:
        return None
    try:
        names, context = tensor.__tensor_flatten__()
        inners = [_waited(getattr(tensor, name)).detach() for name in names]
        size, stride = tensor.size(), tensor.stride()
        frame = Frame(type(tensor), list(names), context, size, stride)
        return (inners, frame) if _is_like(frame.around(inners), tensor) else None
    except NOT_PUT_TOGETHER:
        return None


def _is_like(again: Tensor, tensor: Tensor) -> bool:
    """Whether a wrapper that was put together again is what it was, but for bytes: its
    class may pass over the size or the strides."""
    return (
        type(again) is type(tensor)
        and again.dtype is tensor.dtype
        and again.size() == tensor.size()
        and again.stride() == tensor.stride()
    )


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """All plain tensors inside a wrapper; nothing for what is none."""
    found = unwrapped(tensor)
    if found is not None:
        yield found.local
        return
    apart = flattened(tensor)
    for inner in () if apart is None else apart[0]:
        yield from (inner,) if is_plain(inner) else plain_parts(inner)


def _waited(tensor: Tensor) -> Tensor:
    """The tensor that a collective fills, after it in compute order."""
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
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
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


class FlattenedHandle(Handle):
    """A saved wrapper: the handles of its inner tensors, and what is around them."""

    __slots__ = ("_back", "_counter", "_frame", "_version")

    def __init__(
        self,
        tensor: Tensor,
        frame: Frame,
        inners: list[Handle],
        back: Callable[[Any], Tensor],
    ) -> None:
        """inners: of its inner tensors, in order. back: brings one of them back."""
        super().__init__(Flattened(tuple(inners)))  # type: ignore[arg-type]
        self._frame = frame
        self._back = back
        self._counter = counter = counter_of(tensor)
        self._version = counter._version

    @property
    def is_kept(self) -> bool:
        """Whether all that it holds stays where it is, by no plan."""
        return all(isinstance(each.source, Kept) for each in self.leaves())

    def leaves(self) -> Iterator[Handle]:
        """The handles of all plain tensors inside."""
        for each in self.source.inners:  # type: ignore[union-attr]
            if isinstance(each, FlattenedHandle):
                yield from each.leaves()
            else:
                yield part_of(each)

    def get(self) -> Tensor:
        """The wrapper; `InPlaceError` if it was changed after it was saved."""
        if self._counter._version != self._version:
            check_version(self._counter, self._version, self._frame.kind.__name__)
        return self.around(self._back)

    def around(self, back: Callable[[Any], Tensor]) -> Tensor:
        """The wrapper around what `back` brings of its inner tensors."""
        inners = self.source.inners  # type: ignore[union-attr]
        return self._frame.around([back(each) for each in inners])
