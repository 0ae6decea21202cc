"""Which bytes a saved tensor is, and how to build it again from bytes.

[Note: identity]
A record is the bytes of one base tensor at one version. Its key is
(storage stamp, version, first byte, last byte of the base):
- the storage alone is wrong: `y = x * 1` saved, then changed in place and saved
  again, would share one record (silently wrong gradients);
- storage and version are wrong: the outputs of `unsafe_chunk` share a storage and
  have separate version counters, so two different halves would share one record
  (LSTM and GRU gradients);
- addresses, `id()` and clocks are wrong: memory is reused, and two tensors in a
  tight loop get the same time stamp.
The bytes of a record are taken at its last save: [Note: the last save] in
departures.py.
The stamp is an object put on the Python storage, which torch keeps for the life of
the C++ storage; it is never reused because the key itself keeps it alive.
(tests/ssdtrain/cache/test_identity.py)

[Note: in-place changes]
With saved-tensor hooks autograd no longer compares versions, so `check` does, through
a probe that shares the version counter but not the storage (it keeps no memory alive).
Mutation through `.data` stays invisible, as in plain autograd.
(tests/ssdtrain/cache/test_in_place.py)
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ssdtrain.errors import InPlaceError

STAMP = "_ssdtrain_stamp"
# Record extents start at a multiple of this, so that a view of any dtype finds its
# offset divisible by its item size.
ALIGN_BYTES = 16
# A view of a leaf without gradient is a part of its own if it is so many times smaller.
PART_OF_DATA = 4


class Stamp:
    """Names one storage for its whole life; compared by identity."""

    __slots__ = ("__weakref__",)


class Key(NamedTuple):
    """Identity of a record. See [Note: identity]."""

    stamp: Stamp
    version: int
    start_byte: int
    end_byte: int


class View(NamedTuple):
    """How one saved tensor lies in its record's bytes."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int
    """From the first byte of the record."""
    is_conj: bool
    is_neg: bool

    def rebuild(self, data: Tensor) -> Tensor:
        """The saved tensor over `data` (the record's bytes, on device)."""
        start = data.storage_offset() * data.itemsize + self.offset_bytes
        tensor = torch.empty(0, dtype=self.dtype, device=data.device)
        tensor.set_(
            data.untyped_storage(),
            start // self.dtype.itemsize,
            self.shape,
            self.stride,
        )
        if self.is_conj:
            tensor = torch._conj(tensor)
        if self.is_neg:
            tensor = torch._neg_view(tensor)
        return tensor

    def is_whole(self, data: Tensor) -> bool:
        """Whether the saved tensor is `data` itself, element for element."""
        return (
            not self.offset_bytes
            and self.dtype is data.dtype
            and self.shape == data.shape
            and self.stride == data.stride()
            and not (self.is_conj or self.is_neg)
        )


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is nothing but bytes in one strided storage.

    Wrapper subclasses (DTensor), sparse, nested, quantized, dual and opaque tensors
    are not: reading their storage is meaningless or crashes.
    """
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and (tensor.is_cuda or tensor.is_cpu)
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor._is_zerotensor()  # zeros of forward-mode AD, without memory
        and (forward_ad._current_level < 0 or not is_dual(tensor))
    )


def is_dual(tensor: Tensor) -> bool:
    """Whether it is a dual tensor of forward-mode AD: it has a tangent besides."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def parameter_of(tensor: Tensor) -> nn.Parameter | None:
    """The parameter this tensor is, or is a view of.

    By object, not by storage: FSDP and ZeRO-3 gather parameters into new storages.
    """
    if isinstance(tensor, nn.Parameter):
        return tensor
    base = tensor._base
    if base is None:  # torch asks in Python whether something is a parameter
        return None
    return base if isinstance(base, nn.Parameter) else None


def is_held(tensor: Tensor) -> bool:
    """Whether this is a leaf that requires grad, or a view of one.

    The accumulator of its gradient holds it until the graph is gone, so moving it away
    frees nothing. Of other inputs nobody can tell whether their owner lets go of them.
    """
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad


def stamp_of(tensor: Tensor) -> Stamp:
    """The stamp of the tensor's storage, put there on first sight."""
    storage: Any = tensor.untyped_storage()
    stamp = getattr(storage, STAMP, None)
    if stamp is None:
        stamp = Stamp()
        setattr(storage, STAMP, stamp)
    return stamp


def extent_bytes(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of the tensor's elements inside its storage."""
    # No symbolic sizes here: those live in the compiler, and hooks run outside it.
    start = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():  # most are: no look at the strides
        return start, start + tensor.nbytes
    if tensor.numel() == 0:
        return start, start
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (int(size) - 1) * int(stride)
    return start, start + (last + 1) * tensor.itemsize


def identify(tensor: Tensor) -> tuple[Key, View]:
    """Key of the record that holds this plain tensor, and the view of it."""
    start, end = extent_bytes(tensor)
    first = start
    base = tensor._base
    if base is not None and is_plain(base) and not is_part_of_data(tensor, base):
        base_start, base_end = extent_bytes(base)
        # as_strided may reach beyond its base; then both are covered.
        start, end = min(start, base_start), max(end, base_end)
    start -= start % ALIGN_BYTES
    key = Key(stamp_of(tensor), tensor._version, start, end)
    return key, view_of(tensor, first - start)


def is_part_of_data(tensor: Tensor, base: Tensor) -> bool:
    """Whether it is a small part of what no operator made: a batch of a data set.

    Its record holds the part alone. Equal parts are one record, others are several.
    """
    if base.requires_grad:
        return False
    start, end = extent_bytes(tensor)
    return (end - start) * PART_OF_DATA <= base.nbytes


def view_of(tensor: Tensor, offset_bytes: int) -> View:
    """How it lies in a record that begins so many bytes before it."""
    return View(
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        offset_bytes,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def raw_bytes(tensor: Tensor, key: Key) -> Tensor:
    """The record's bytes as a 1-D uint8 alias that holds the storage, not the graph."""
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    size = (key.end_byte - key.start_byte,)
    return alias.set_(tensor.untyped_storage(), key.start_byte, size, (1,))


class Named(Protocol):
    """What a probe tells of."""

    @property
    def name(self) -> str:
        """Made only when it is told."""


class Probe(NamedTuple):
    """Sees in-place changes of a tensor without keeping its memory."""

    counter: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor, nothing: Tensor) -> "Probe":
        """A probe of a plain tensor at its present version.

        Args:
            tensor: whose counter it shares.
            nothing: an empty tensor on its device, for all probes.
        """
        counter = tensor.detach()
        counter.data = nothing
        return cls(counter, tensor._version)

    def check(self, owner: Named) -> None:
        """Compare the version.

        Raises:
            InPlaceError: the tensor was changed after it was saved.
        """
        if self.counter._version != self.version:
            check_version(self.counter, self.version, owner.name)


def check_version(tensor: Tensor, version: int, name: str) -> None:
    """Raise as plain autograd does if a saved tensor was changed in place.

    Raises:
        InPlaceError: the versions differ.
    """
    if tensor._version != version:
        raise InPlaceError(
            "one of the variables needed for gradient computation has been modified "
            f"by an inplace operation: the saved tensor of {name} is at version "
            f"{tensor._version}; expected version {version} instead. Replace the "
            "in-place operation, or clone the tensor before it."
        )


def asking_node() -> int | None:
    """A number of the operator whose backward runs; None outside of backward."""
    # torch has no public name for it (2.11 to 2.13).
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def check_late_writer(owner: Named) -> None:
    """Refuse the one operator that fills a tensor which autograd has saved already.

    `rrelu` in training saves its noise before the kernel draws it, and no version
    counts that: whatever copies at pack gets bytes of before (torch 2.11 to 2.13, in
    `save_on_cpu` too). Only backward can tell whose tensor it is; one that never left
    the device is right. To be asked after all that may release it.

    Raises:
        InPlaceError: the backward of such an operator asks for a tensor.
    """
    node = torch._C._current_autograd_node()
    if node is None or node.name() != "RreluWithNoiseBackward0":
        return
    if getattr(node, "_saved_training", True):
        raise InPlaceError(
            f"rrelu in training saves its noise before it draws it, so {owner.name} "
            "cannot be offloaded; write it as torch.where(x < 0, x * noise, x) with a "
            "noise of your own, or call it outside the offloaded module."
        )
