"""Pin memory that exists: tensors, numpy arrays, memory-mapped files. No copy."""

import functools
import mmap
from typing import Any

import numpy as np
import torch

from pydirect.memory import runtime
from pydirect.memory.allocate import empty_table
from pydirect.memory.managed import Reach, reach_of
from pydirect.memory.region import tensor_over

Pinnable = torch.Tensor | np.ndarray[Any, Any]


def pin(source: Pinnable) -> torch.Tensor:
    """Make host memory readable by every GPU in place, and return a tensor over it.

    The result shares the bytes of ``source`` and keeps ``source`` alive; the memory is
    unpinned when the last alias of the *result* has died, after GPU work on it. Without
    a GPU the memory stays plain and the rules are the same.

    Args:
        source: contiguous CPU tensor (any dtype), C-contiguous numpy array, or
            numpy.memmap. A read-only array is pinned read-only: do not write to it.

    Returns:
        CPU tensor of the same shape, dtype and bytes.

    Raises:
        ValueError: not contiguous, not on the CPU, or a dtype torch does not have.
        HostMemoryError: the driver refused.
    """
    if isinstance(source, np.ndarray):
        return _pin_array(source)
    if source.device.type != "cpu":
        raise ValueError(
            f"pin expects memory of the host, got a tensor on {source.device}: move it "
            "with .cpu() first"
        )
    if not source.is_contiguous() or source.is_sparse:
        raise ValueError(
            f"pin expects a contiguous tensor, got shape {tuple(source.shape)} with "
            "another layout: call .contiguous() first"
        )
    if source.numel() == 0 or is_pinned(source):
        return source
    flat = _pin_bytes(source.data_ptr(), source.nbytes, source, read_only=False)
    return flat.view(source.dtype).view(source.shape)


def to_table(source: Pinnable) -> torch.Tensor:
    """Copy host memory to where GPUs read it in place fastest; see `empty_table`.

    Costs one pass over the bytes, and both copies exist until ``source`` dies; `pin`
    costs neither, but small pages.

    Raises:
        ValueError: not contiguous, not on the CPU, or a dtype torch does not have.
        HostMemoryError: a limit of the machine forbids it.
    """
    rows = _view_of(source) if isinstance(source, np.ndarray) else source
    if rows.device.type != "cpu":
        raise ValueError(f"to_table expects host memory, got {rows.device}")
    return empty_table(rows.shape, rows.dtype).copy_(rows)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether GPUs can read the whole tensor in place (False without a GPU)."""
    return reach(tensor) is not Reach.NONE


def reach(tensor: torch.Tensor) -> Reach:
    """How GPUs reach the bytes of a tensor (NONE without a GPU)."""
    if tensor.device.type != "cpu" or not runtime.cuda_works() or tensor.numel() == 0:
        return Reach.NONE
    first = tensor.data_ptr()
    span = sum(
        (n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    )
    found = reach_of(first)
    if found is not reach_of(first + span * tensor.element_size()):
        return Reach.NONE
    return found


def _pin_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if not array.flags.c_contiguous:
        raise ValueError(
            f"pin expects a C-contiguous array, got strides {array.strides} for shape "
            f"{array.shape}: use numpy.ascontiguousarray first"
        )
    dtype = _torch_dtype(array.dtype)
    if array.nbytes == 0:
        return torch.empty(array.shape, dtype=dtype)
    flat = _pin_bytes(
        array.ctypes.data, array.nbytes, array, read_only=not array.flags.writeable
    )
    return flat.view(dtype).view(array.shape)


def _view_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over an array that may be read-only; it is only read."""
    dtype = _torch_dtype(array.dtype)
    if not array.flags.c_contiguous or array.nbytes == 0:
        return torch.from_numpy(array.copy())
    held = functools.partial(_release, None, array)
    flat = tensor_over(array.ctypes.data, array.nbytes, held)
    return flat.view(dtype).view(array.shape)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype=dtype)).dtype
    except TypeError as error:
        raise ValueError(
            f"pin expects a dtype that torch has, got numpy {dtype}: view the array "
            "as numpy.uint8"
        ) from error


def _pin_bytes(
    address: int, num_bytes: int, owner: Pinnable, *, read_only: bool
) -> torch.Tensor:
    pinned = runtime.cuda_works()
    first = address - address % mmap.PAGESIZE
    last = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if pinned:
        runtime.register(first, last - first, read_only=read_only)
    release = functools.partial(_release, first if pinned else None, owner)
    return tensor_over(address, num_bytes, release)


def _release(address: int | None, owner: Pinnable) -> None:
    """Unpin; ``owner`` is only held, so that the memory is there until now."""
    if address is not None:
        runtime.unregister(address)
