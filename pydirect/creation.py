"""Kernels of the unified device that make, copy, view and resize: no computing."""

from collections.abc import Callable
from typing import Any, cast

import torch

from pydirect.errors import UnsupportedOperatorError
from pydirect.operators import refuse_recorded_writes
from pydirect.placement import Affinity
from pydirect.region import DEVICE_TYPE, allocate, region_of, set_storage, show
from pydirect.transfer import copy_into, empty_strided, to_host

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# Views read sizes and strides only: the CPU kernels make them, on unified storages.
_VIEWS = (
    "as_strided", "view", "view.dtype", "_reshape_alias", "unfold", "view_as_real",
    "view_as_complex", "alias",
)  # fmt: skip


def creation_kernels() -> dict[str, Callable[..., Any]]:
    """Kernels of allocation, copies and views."""
    own: dict[str, Callable[..., Any]] = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "empty_like": _empty_like,
        "_to_copy": _to_copy,
        "clone": _clone,
        "copy_": _copy,
        "_copy_from": _copy_from,
        "resize_": _resize,
        "set_.source_Storage": _set_source,
        "set_.source_Storage_storage_offset": _set_part,
        "set_.source_Tensor": _set_tensor,
    }
    own.update({name: _view(name) for name in _VIEWS})
    return own


def _view(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    shown_on_cpu = torch._C._dispatch_has_kernel_for_dispatch_key(
        f"aten::{name}", "CPU"
    )
    if not shown_on_cpu:
        return _alias

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(_CPU_KEYS, *args, **kwargs)

    return kernel


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    operator = torch.ops.aten.as_strided.default
    return cast(
        torch.Tensor,
        operator.redispatch(_CPU_KEYS, tensor, tensor.size(), tensor.stride(), None),
    )


def _empty(
    size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any
) -> torch.Tensor:
    shape = torch.empty(size, device="meta", memory_format=_format(memory_format))
    return empty_strided(
        tuple(shape.shape), shape.stride(), dtype or torch.get_default_dtype()
    )


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
    return empty_strided(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


def _empty_like(
    tensor: Any, *, dtype: Any = None, device: Any = None, **options: Any
) -> torch.Tensor:
    """As PyTorch's, and the affinity is inherited."""
    target = torch.device(DEVICE_TYPE) if device is None else torch.device(device)
    form = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="meta"
    )
    memory_format = options.get("memory_format") or torch.preserve_format
    like = torch.empty_like(form, memory_format=memory_format)
    if target.type != DEVICE_TYPE:
        return torch.empty_strided(
            like.size(), like.stride(), dtype=like.dtype, device=target
        )
    unified = tensor.device.type == DEVICE_TYPE
    affinity = region_of(tensor).affinity if unified else Affinity.GPU
    return empty_strided(tuple(like.shape), like.stride(), like.dtype, affinity)


def _to_copy(tensor: Any, *, non_blocking: bool = False, **options: Any) -> Any:
    """From unified, and (PyTorch dispatches on the target) to unified."""
    if tensor.layout != torch.strided:
        raise UnsupportedOperatorError(
            f"unified tensors are dense, got {tensor.layout}: use to_dense() first"
        )
    _refuse_recorded_move(tensor, options.get("device"))
    made = _empty_like(
        tensor,
        dtype=options.get("dtype"),
        device=options.get("device"),
        memory_format=options.get("memory_format"),
    )
    return copy_into(made, tensor, non_blocking=non_blocking)


def _to_copy_recorded(tensor: Any, **options: Any) -> Any:
    """Above autograd: see [Note: Gradients do not travel] in `pydirect.transfer`."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return _to_copy(tensor, **options)
    _refuse_recorded_move(tensor, options.get("device"))
    options["device"] = options.get("device") or "cpu"
    return torch.ops.aten._to_copy.default(to_host(tensor), **options)


def _refuse_recorded_move(tensor: Any, device: Any) -> None:
    if device is None or torch.device(device).type != DEVICE_TYPE:
        return
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise UnsupportedOperatorError(
            'to("unified") inside an autograd graph: use tensor.detach().to("unified") '
            "and, if it is to be trained, requires_grad_() on the result"
        )


def _clone_recorded(tensor: Any, *, memory_format: Any = None) -> Any:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return to_host(tensor).clone(memory_format=memory_format)
    return _clone(tensor, memory_format=memory_format)


def _clone(tensor: Any, *, memory_format: Any = None) -> Any:
    made = _empty_like(tensor, memory_format=memory_format)
    return copy_into(made, tensor, non_blocking=False)


def _format(memory_format: torch.memory_format | None) -> torch.memory_format:
    return memory_format or torch.contiguous_format


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    refuse_recorded_writes("copy_", (target, source), (target,))
    return copy_into(target, source, non_blocking=non_blocking)


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    return copy_into(target, source, non_blocking=non_blocking)


def _resize(tensor: Any, size: Any, *, memory_format: Any = None) -> Any:
    shape = torch.empty(size, device="meta", memory_format=_format(memory_format))
    needed = (tensor.storage_offset() + shape.numel()) * tensor.element_size()
    region = region_of(tensor)
    storage = tensor.untyped_storage()
    if needed > region.num_bytes:
        grown = allocate(needed, region.affinity)
        region.wait_for_gpu(before_write=False)
        grown.host[: region.num_bytes].copy_(region.host[: region.num_bytes])
        storage = show(grown)
    set_storage(
        tensor, storage, tensor.storage_offset(), tuple(shape.shape), shape.stride()
    )
    return tensor


def _set_source(tensor: Any, source: Any) -> Any:
    size = source.nbytes() // tensor.element_size()
    set_storage(tensor, source, 0, (size,), (1,))
    return tensor


def _set_part(
    tensor: Any, source: Any, offset: Any, size: Any, stride: Any = ()
) -> Any:
    shape = torch.empty(size, device="meta")
    set_storage(tensor, source, offset, tuple(size), tuple(stride) or shape.stride())
    return tensor


def _set_tensor(tensor: Any, source: Any) -> Any:
    set_storage(
        tensor,
        source.untyped_storage(),
        source.storage_offset(),
        tuple(source.shape),
        source.stride(),
    )
    return tensor


RECORDED_KERNELS: dict[str, Callable[..., Any]] = {
    "_to_copy": _to_copy_recorded,
    "clone": _clone_recorded,
}
"""Taken over above autograd: see [Note: Gradients do not travel]."""
