"""Tensors over raw host memory, with an owner that outlives every alias.

[Note: Who keeps the memory] A tensor made by `tensor_over` holds, through its storage,
a ctypes buffer; the buffer's finalizer is the release of the memory. Every view, alias
and slice shares the storage, so the release runs when the last of them has died, and
not when the Python object that the user held goes. GPU work is asynchronous: it may
still read the memory then. A release therefore waits for the devices before the memory
is unpinned, unmapped or given to somebody else (`unregister`, `HostPool`). A forked
child has the finalizers but not the memory's owner, so there they do nothing. Tests:
tests/pydirect/memory/test_pinning.py, tests/pydirect/gather/test_gpu.py.
"""

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Sequence

import torch


def tensor_over(
    address: int, num_bytes: int, release: Callable[[], object]
) -> torch.Tensor:
    """A uint8 tensor of shape (num_bytes,) over memory that stays where it is.

    Args:
        address: first byte; the memory must be mapped, readable and writable.
        num_bytes: at least 1.
        release: called once, when no alias of the tensor is left (never at
            interpreter exit, when the driver may be gone before us).
    """
    buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
    finalizer = weakref.finalize(buffer, release_in_owner, os.getpid(), release)
    finalizer.atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)


def release_in_owner(owner_pid: int, release: Callable[[], object]) -> None:
    """Call ``release`` unless this is a forked child of ``owner_pid``."""
    if os.getpid() == owner_pid:
        release()


def shaped(
    flat: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """View the first bytes of ``flat`` (uint8, 1-D) as ``shape`` of ``dtype``."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return flat[:num_bytes].view(dtype).view(tuple(shape))
