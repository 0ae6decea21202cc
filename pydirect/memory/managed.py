"""Host memory that GPUs map in large pages: managed memory that stays on the host.

[Note: Large pages] A GPU translates the address of every row. Memory that is pinned
(cudaHostRegister, cudaHostAlloc, also the driver's own host allocations, whatever page
size the host uses) is translated in pieces of 64 KiB and less, and random rows of a 16
GiB table then run at 33 million a second: 4 of 51 GB/s at 128 bytes. Managed memory
whose preferred location is the host, and which is "accessed by" the GPU, is mapped in
pages of 2 MiB and runs at 45 of 51 GB/s (H200; figures in docs/pydirect-gather.md). It
is the first of the thesis's three ways to zero-copy access.

Its price: a forked child cannot touch it, other processes cannot map it, and copies by
the copy engine are slower than from pinned memory. It never moves to the GPU, but no
more is handed out than the GPUs have free: a driver that runs out of GPU memory for
what is managed can stall, and with it everybody on that GPU.
"""

import ctypes
from enum import Enum

import torch

from pydirect.kernels.driver import driver
from pydirect.memory import runtime
from pydirect.memory.limits import ManagedMemoryError

_ATTACH_GLOBAL = 1
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5
_HOST = -1
_IS_MANAGED, _MEMORY_TYPE = 8, 2
_TYPE_HOST = 1
_CONCURRENT_MANAGED_ACCESS = 89


class Reach(Enum):
    """How GPUs reach an address of the host."""

    NONE = "none"
    """Plain memory: not at all."""

    PINNED = "pinned"
    """In place, in small pages."""

    MANAGED = "managed"
    """In place, in large pages. See [Note: Large pages]."""


def reach_of(address: int) -> Reach:
    """Ask the driver about an address; NONE without a GPU."""
    if not runtime.cuda_works():
        return Reach.NONE
    query = driver().library.cuPointerGetAttribute
    value = ctypes.c_uint(0)
    # The driver answers "invalid value" for memory it does not know.
    if query(ctypes.byref(value), _IS_MANAGED, address) == 0 and value.value:
        return Reach.MANAGED
    value.value = 0
    known = query(ctypes.byref(value), _MEMORY_TYPE, address) == 0
    return Reach.PINNED if known and value.value == _TYPE_HOST else Reach.NONE


def managed_capacity_bytes() -> int:
    """How much this process may hold in all: what every GPU it uses has free now, less
    a fifth of that GPU's memory, which stays for what the GPU still has to allocate.

    0 where GPU and host cannot use managed memory at the same time.
    """
    if not runtime.cuda_works():
        return 0
    if not all(_is_concurrent(gpu) for gpu in range(torch.cuda.device_count())):
        return 0
    rooms = []
    for gpu in runtime.devices_in_use():
        free, total = torch.cuda.mem_get_info(gpu)
        rooms.append(free - total // 5)
    return max(0, min(rooms))


def _is_concurrent(gpu: int) -> bool:
    value = ctypes.c_int(0)
    driver().call(
        "cuDeviceGetAttribute",
        ctypes.byref(value),
        ctypes.c_int(_CONCURRENT_MANAGED_ACCESS),
        ctypes.c_int(gpu),
    )
    return bool(value.value)


def map_managed(num_bytes: int) -> int:
    """Managed memory on the host, mapped on every GPU; returns its address.

    The pages do not exist yet: they take their size when they are first written, so
    the caller fills the memory in one go (`populate`).
    """
    call = driver().call
    address, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
    call(
        "cuMemAllocManaged", ctypes.byref(address), size, ctypes.c_uint(_ATTACH_GLOBAL)
    )
    advice = [(_PREFERRED_LOCATION, _HOST)]
    advice += [(_ACCESSED_BY, gpu) for gpu in range(torch.cuda.device_count())]
    for what, where in advice:
        call("cuMemAdvise", address, size, ctypes.c_int(what), ctypes.c_int(where))
    return int(address.value)


def unmap_managed(address: int) -> None:
    """Undo `map_managed`, after all GPU work that may still read the memory."""
    runtime.synchronize_all()
    driver().call("cuMemFree_v2", ctypes.c_uint64(address))


def require_managed(num_bytes: int, in_use_bytes: int) -> None:
    """Refuse more managed memory than the GPUs could hold: see [Note: Large pages].

    Raises:
        ManagedMemoryError: ``num_bytes`` next to ``in_use_bytes`` is too much now.
    """
    capacity = managed_capacity_bytes()
    if in_use_bytes + num_bytes > capacity:
        raise ManagedMemoryError(
            f"expects {num_bytes} bytes of managed memory beside {in_use_bytes} in "
            f"use, but hands out {capacity} at most, which is what the GPUs have free "
            "less a fifth: use Backing.REGISTERED, or free GPU memory first"
        )
