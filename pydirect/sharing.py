"""Unified tensors across processes: shared memory and pickling.

Shared memory is ordinary host memory that several processes map; each process pins the
same region for its own GPU when that GPU first works on it (Wu's design:
``cudaHostRegister`` in every process, after ``share_memory_``).
"""

import functools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch.multiprocessing import reductions

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
    _replace("clone", _clone, torch.UntypedStorage)
    _replace("to", _storage_to, torch.UntypedStorage)
    _replace_new_shared()
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, functools.partial(_reduce, enable))


def _replace(
    name: str, make: Callable[[_Method], _Method], owner: type = torch.Tensor
) -> None:
    stock = getattr(owner, name)
    setattr(owner, name, make(stock))


def _replace_new_shared() -> None:
    """DataLoader workers collate batches into shared storages they ask for here."""
    stock = torch.UntypedStorage._new_shared

    def _new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        if torch.device(device).type != DEVICE_TYPE:
            return stock(size, device=device)  # type: ignore[no-untyped-call]
        flat = torch.empty(0, dtype=torch.uint8).set_(stock(size, device="cpu"))  # type: ignore[no-untyped-call]
        return show(Region(flat, Affinity.HOST))

    new_shared = classmethod(_new_shared)
    torch.UntypedStorage._new_shared = new_shared  # type: ignore[method-assign,assignment]


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
    flat = torch.empty(0, dtype=torch.uint8).set_(shared)[: region.num_bytes]
    flat.copy_(torch.empty(0, dtype=torch.uint8).set_(region.host)[: region.num_bytes])
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
    shared = flat_bytes(torch.empty(0, dtype=torch.uint8).set_(region.host))
    if not region.is_shared:
        shared = shared.clone()
    geometry = (tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (
        _rebuild,
        (
            enable,
            shared.untyped_storage(),
            geometry,
            tensor.storage_offset(),
            region.affinity.value,
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
        ),
    )


def _rebuild(
    enable: Callable[[], None],
    storage: torch.UntypedStorage,
    geometry: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]],
    offset: int,
    affinity: str,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    # A spawned process has its own PyTorch.
    enable()
    dtype, size, stride = geometry
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    tensor = tensor_on(
        show(Region(flat, Affinity(affinity))), dtype, size, stride, offset
    )
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
