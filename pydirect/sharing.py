"""Unified tensors across processes: shared memory and pickling.

Shared memory is ordinary host memory that several processes map; each process pins the
same region for its own GPU when that GPU first works on it (Wu's design:
``cudaHostRegister`` in every process, after ``share_memory_``). Private memory travels
as a copy of the elements that the tensor shows. What arrives is a unified tensor of the
same affinity: a process without a CUDA context gets one only when its GPU works on it.

[Note: Sent memory outlives the sending] A process that is started is handed the
descriptors of shared memory after its arguments have been pickled. A copy made for it
must live until then, and nobody else holds it: so the object that starts the process
does. Test: test_processes_that_are_started.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch.multiprocessing import reductions

from pydirect.memory.runtime import synchronize_all
from pydirect.placement import Affinity
from pydirect.region import (
    DEVICE_TYPE,
    Region,
    copy_region,
    flat_bytes,
    region_of,
    region_of_storage,
    set_storage,
    show,
    tensor_on,
)

_Method = Callable[..., Any]


def register(enable: Callable[[], None]) -> None:
    """Teach PyTorch's sharing about unified storages; see the methods below.

    Args:
        enable: what a process that is sent a unified tensor calls first.
    """
    _replace("share_memory_", _share_memory_)
    _replace("is_shared", _is_shared)
    _replace("new", _new)
    _replace("clone", _clone, torch.UntypedStorage)
    _replace("to", _storage_to, torch.UntypedStorage)
    _replace("_new_shared", _shared_room, torch.UntypedStorage)
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, functools.partial(_reduce, enable))
    ForkingPickler.register(torch.device, functools.partial(_reduce_device, enable))
    # A forked child cannot wait for a GPU: see `Region.wait_for_gpu`.
    os.register_at_fork(before=synchronize_all)


def _replace(
    name: str, make: Callable[[_Method], _Method], owner: type = torch.Tensor
) -> None:
    stock = getattr(owner, name)
    setattr(owner, name, make(stock))


def _shared_room(stock: _Method) -> Any:
    """DataLoader workers collate batches into shared storages they ask for here."""

    def new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        if torch.device(device).type != DEVICE_TYPE:
            return stock(size, device=device)
        room = stock(size, device="cpu")
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(room)
        return show(Region(flat, Affinity.HOST))

    return classmethod(new_shared)


def _clone(stock: _Method) -> _Method:
    """`copy.deepcopy` clones storages, and a storage made by PyTorch owns no region."""

    @functools.wraps(stock)
    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != DEVICE_TYPE:
            return cast(torch.UntypedStorage, stock(self))
        region = region_of_storage(self)
        region.wait_for_gpu(before_write=False)
        return show(copy_region(region.host, region.num_bytes, region.affinity))

    return clone


def _storage_to(stock: _Method) -> _Method:
    """`torch.load` moves storages."""

    @functools.wraps(stock)
    def to(
        self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False
    ) -> torch.UntypedStorage:
        wanted = torch.device(device).type
        if wanted != DEVICE_TYPE or self.device.type == DEVICE_TYPE:
            return cast(
                torch.UntypedStorage,
                stock(self, device=device, non_blocking=non_blocking),
            )
        on_host = self.cpu()
        return show(copy_region(on_host, on_host.nbytes(), Affinity.GPU))

    return to


def _new(stock: _Method) -> _Method:
    """PyG's workers ask ``value.new(storage)`` for room for rows, and the storage that
    they allocate is the CPU's. So are the rows then: the worker gathers them there."""

    @functools.wraps(stock)
    def new(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        given = args[0] if len(args) == 1 and not options else None
        if self.device.type == DEVICE_TYPE and isinstance(given, torch.UntypedStorage):
            if given.device.type == "cpu":
                return torch.empty(0, dtype=self.dtype, device="cpu").set_(given)
        return cast(torch.Tensor, stock(self, *args, **options))

    return new


def _share_memory_(stock: _Method) -> _Method:
    @functools.wraps(stock)
    def share_memory_(self: torch.Tensor) -> torch.Tensor:
        if self.device.type != DEVICE_TYPE:
            return cast(torch.Tensor, stock(self))
        _move_to_shared_memory(self)
        return self

    return share_memory_


def _is_shared(stock: _Method) -> _Method:
    @functools.wraps(stock)
    def is_shared(self: torch.Tensor) -> bool:
        if self.device.type != DEVICE_TYPE:
            return bool(stock(self))
        return region_of(self).is_shared

    return is_shared


def _move_to_shared_memory(tensor: torch.Tensor) -> None:
    region = region_of(tensor)
    if region.is_shared:
        return
    storage = tensor.untyped_storage()
    # One use is the tensor, one the storage object asked here.
    if torch._C._storage_Use_Count(storage._cdata) > 2:
        raise ValueError(
            "share_memory_ expects a unified tensor without views or aliases: they "
            "would keep showing the private memory. Share it before taking views"
        )
    region.wait_for_gpu(before_write=False)
    shared = torch.UntypedStorage._new_shared(region.num_bytes, device="cpu")
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(shared)[
        : region.num_bytes
    ]
    flat.copy_(
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(region.host)[
            : region.num_bytes
        ]
    )
    set_storage(
        tensor,
        show(Region(flat_bytes(flat), region.affinity)),
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tensor.stride(),
    )


def _reduce(enable: Callable[[], None], tensor: torch.Tensor) -> Any:
    """How a tensor travels to another process: unified ones by shared memory."""
    if tensor.device.type != DEVICE_TYPE:
        return reductions.reduce_tensor(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise ValueError(
            "a unified tensor inside an autograd graph cannot be sent to another "
            "process: detach it first"
        )
    region = region_of(tensor)
    offset = tensor.storage_offset()
    if region.is_shared:
        flat = flat_bytes(
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(region.host)
        )
    else:
        flat, offset = _copy_of(tensor), 0
    sent = _Sent(
        dtype=tensor.dtype,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(offset),
        affinity=region.affinity.value,
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
        requires_grad=tensor.requires_grad,
        is_parameter=isinstance(tensor, torch.nn.Parameter),
    )
    return _rebuild, (enable, flat.untyped_storage(), sent)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes that a unified tensor shows, in shared memory: uint8, 1-D.

    See [Note: Sent memory outlives the sending].
    """
    region, size = region_of(tensor), tensor.element_size()
    region.wait_for_gpu(before_write=False)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 0 if tensor.numel() == 0 else 1 + sum((n - 1) * s for n, s in steps)
    begin = tensor.storage_offset() * size
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    shown = flat.set_(region.host)[begin : begin + extent * size]
    copy: torch.Tensor = shown.clone().share_memory_()
    starting = get_spawning_popen()
    if starting is not None:
        vars(starting).setdefault("_pydirect_sent", []).append(copy)
    return copy


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A tensor's geometry and kind, in plain values."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    affinity: str
    conj: bool
    neg: bool
    requires_grad: bool
    is_parameter: bool


def _rebuild(
    enable: Callable[[], None], storage: torch.UntypedStorage, sent: _Sent
) -> torch.Tensor:
    # A spawned process has its own PyTorch.
    enable()
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    tensor = tensor_on(
        show(Region(flat, Affinity(sent.affinity))),
        sent.dtype,
        sent.size,
        sent.stride,
        sent.offset,
    )
    tensor = tensor.conj() if sent.conj else tensor
    tensor = torch._neg_view(tensor) if sent.neg else tensor
    if sent.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=sent.requires_grad)
    return tensor.requires_grad_(sent.requires_grad)


def _reduce_device(enable: Callable[[], None], device: torch.device) -> Any:
    """The receiver knows the device by name once it has it."""
    if device.type != DEVICE_TYPE:
        plain: Any = device.__reduce__()
        return plain
    return _rebuild_device, (enable, str(device))


def _rebuild_device(enable: Callable[[], None], name: str) -> torch.device:
    enable()
    return torch.device(name)
