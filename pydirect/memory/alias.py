"""CUDA tensors over host memory: zero-copy access for every CUDA kernel."""

import math

import torch

from pydirect.memory import runtime
from pydirect.memory.pinning import is_pinned


class _DeviceView:
    """What `torch.as_tensor` reads to build the alias, and what the alias holds."""

    def __init__(self, host: torch.Tensor) -> None:
        # The alias's storage keeps this object, and this object keeps the host
        # tensor's storage: see [Note: Who keeps the memory].
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def device_alias(host: torch.Tensor, device: torch.device | str | int) -> torch.Tensor:
    """A tensor on ``device`` over the memory of ``host``: no byte is copied.

    Writes through either are seen by the other, after the usual synchronisation. The
    alias keeps the host memory alive, and the memory outlives GPU work on the alias.
    With ``device="cpu"`` (no GPU) the alias is a view.

    Args:
        host: contiguous CPU tensor from `pin`, `empty_pinned` or torch's pin_memory.
        device: CUDA device, or "cpu".

    Raises:
        ValueError: ``host`` is not pinned, not contiguous or not on the CPU.
    """
    target = torch.device("cuda", device) if isinstance(device, int) else device
    target = torch.device(target)
    if host.device.type != "cpu" or not host.is_contiguous():
        raise ValueError(
            f"device_alias expects a contiguous CPU tensor, got {host.device} with "
            f"strides {host.stride()}"
        )
    if target.type == "cpu":
        return host.view(host.shape)
    if target.type != "cuda" or not runtime.cuda_works():
        raise ValueError(f"device_alias expects a CUDA device, got {target}")
    if host.numel() == 0:
        return torch.empty(host.shape, dtype=host.dtype, device=target)
    if not is_pinned(host):
        raise ValueError(
            f"device_alias expects pinned memory, got a tensor of {host.nbytes} bytes "
            "that is not: pass it through pydirect.memory.pin first"
        )
    with torch.cuda.device(target):
        flat = torch.as_tensor(_DeviceView(host), device=target)
    if flat.data_ptr() != host.data_ptr():
        raise RuntimeError("the alias was copied instead of mapped")
    return _reinterpret(flat, host)


def _reinterpret(flat: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    if math.prod(host.shape) * host.element_size() != flat.numel():
        raise RuntimeError("the alias does not cover the tensor")
    return flat.view(host.dtype).view(host.shape)
