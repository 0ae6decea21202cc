"""Pin memory that exists: tensors, numpy arrays, memory-mapped files. No copy.

[Note: Exact ranges] CUDA refuses a copy whose host side is pinned in part ("invalid
argument"). So the bytes of a storage are registered, all of them and no others: with
whole pages the tensors on the same page would be pinned in part. And a range can be
registered once: who pins it again holds the same registration, which ends with the last
of them. Tests: memory/test_pinning.py and gather/test_gpu.py in tests/pydirect.
"""

import functools
import os
import threading
import weakref
from typing import Any

import numpy as np
import torch

from pydirect.memory import runtime
from pydirect.memory.managed import Reach, reach_of
from pydirect.memory.pool import empty_table
from pydirect.memory.raw import release_in_owner, tensor_over

Pinnable = torch.Tensor | np.ndarray[Any, Any]


def pin(source: Pinnable) -> torch.Tensor:
    """Make host memory readable by every GPU in place, and return a tensor over it.

    The result shares the bytes of ``source`` and keeps ``source`` alive; the memory is
    unpinned when the last alias of the *result* has died, after GPU work on it. The
    storage of a tensor is pinned whole. Without a GPU the memory stays plain and the
    rules are the same.

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
    if source.numel() == 0:
        return source
    storage = source.untyped_storage()
    whole = (storage.data_ptr(), storage.nbytes())
    if is_pinned(source) and _covering(*whole) is None:
        return source  # by its own allocator: pinned as long as it lives
    flat = _pin_bytes(*whole, source, read_only=False)
    begin = source.data_ptr() - whole[0]
    part = flat[begin : begin + source.nbytes]
    return part.view(source.dtype).view(source.shape)


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
    if tensor.is_contiguous():
        span = tensor.numel() - 1
    else:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        span = sum((n - 1) * abs(s) for n, s in sizes)
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
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    flat = _pin_bytes(
        array.ctypes.data, array.nbytes, array, read_only=not array.flags.writeable
    )
    return flat.view(dtype).view(array.shape)


def _view_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over an array that may be read-only; it is only read."""
    dtype = _torch_dtype(array.dtype)
    if not array.flags.c_contiguous or array.nbytes == 0:
        return torch.from_numpy(array.copy())
    held = functools.partial(_hold, array)
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


class _Registration:
    """Memory that `pin` has pinned; unpinned once no tensor over it is left."""

    def __init__(self, address: int, num_bytes: int, owner: Pinnable) -> None:
        """``owner`` keeps the memory until it is unpinned."""
        self.address = address
        self.num_bytes = num_bytes
        finalizer = weakref.finalize(
            self, release_in_owner, os.getpid(), functools.partial(_end, address, owner)
        )
        finalizer.atexit = False


_live: "weakref.WeakSet[_Registration]" = weakref.WeakSet()
_lock = threading.Lock()


def _pin_bytes(
    address: int, num_bytes: int, owner: Pinnable, *, read_only: bool
) -> torch.Tensor:
    """See [Note: Exact ranges]."""
    if not runtime.cuda_works():
        return tensor_over(address, num_bytes, functools.partial(_hold, owner))
    with _lock:
        registration = _covering(address, num_bytes)
        if registration is None:
            runtime.register_memory(address, num_bytes, read_only=read_only)
            registration = _Registration(address, num_bytes, owner)
            _live.add(registration)
    return tensor_over(address, num_bytes, functools.partial(_hold, registration))


def _covering(address: int, num_bytes: int) -> _Registration | None:
    """What has pinned these bytes already and must live on for them."""
    last = address + num_bytes
    for found in list(_live):
        if found.address <= address and last <= found.address + found.num_bytes:
            return found
    return None


def _end(address: int, owner: Pinnable) -> None:
    """Unpin; the memory is there until this is done."""
    runtime.unregister(address)


def _hold(what: object) -> None:
    """Nothing to do: ``what`` was to live until now."""
