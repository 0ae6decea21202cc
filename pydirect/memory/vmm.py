"""Host memory from the driver's virtual memory management, in large GPU pages.

[Note: Large pages] Memory that a process brings (mmap, numpy, a file) is mapped into
the GPU's page tables in the small pages of the CPU, and random reads of a large table
spend their time translating addresses. Memory that the driver allocates on a host node
comes in granules of 2 MiB and is mapped as such.
"""

import ctypes
import functools
import math
from collections.abc import Sequence

import torch

from pydirect.kernels.driver import Handle, driver
from pydirect.memory import runtime
from pydirect.memory.limits import read_limits
from pydirect.memory.region import shaped, tensor_over

_PINNED = 1
_LOCATION_DEVICE = 1
_LOCATION_HOST_NUMA = 3
_READ_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("allocation_flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def empty_large_pages(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, *, numa_node: int = 0
) -> torch.Tensor:
    """An uninitialised host tensor mapped in large pages on every GPU.

    Raises:
        CudaDriverError: the driver cannot place memory on a host node.
        HostMemoryError: a limit of the machine forbids it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    address, size = map_host_memory(num_bytes, numa_node)
    release = functools.partial(unmap_host_memory, address, size)
    return shaped(tensor_over(address, size, release), shape, dtype)


def map_host_memory(num_bytes: int, numa_node: int) -> tuple[int, int]:
    """Allocate on a host node and map for the CPU and all GPUs: address and bytes."""
    location = _Location(_LOCATION_HOST_NUMA, numa_node)
    properties = _Properties(type=_PINNED, location=location)
    granule = ctypes.c_size_t()
    call = driver().call
    call(
        "cuMemGetAllocationGranularity",
        ctypes.byref(granule),
        ctypes.byref(properties),
        ctypes.c_int(1),
    )
    size = -(-num_bytes // granule.value) * granule.value
    read_limits().check(size)
    allocation, address = ctypes.c_uint64(), Handle()
    wide = ctypes.c_size_t(size)
    zero = ctypes.c_uint64(0)
    call("cuMemCreate", ctypes.byref(allocation), wide, ctypes.byref(properties), zero)
    try:
        call("cuMemAddressReserve", ctypes.byref(address), wide, granule, None, zero)
        call("cuMemMap", address, wide, ctypes.c_size_t(0), allocation, zero)
    finally:
        # The mapping keeps the memory; without one it goes at once.
        call("cuMemRelease", allocation)
    places = [location] + [
        _Location(_LOCATION_DEVICE, gpu) for gpu in range(torch.cuda.device_count())
    ]
    access = (_Access * len(places))(*(_Access(p, _READ_WRITE) for p in places))
    call("cuMemSetAccess", address, wide, access, ctypes.c_size_t(len(places)))
    return int(address.value or 0), size


def unmap_host_memory(address: int, size: int) -> None:
    """Undo `map_host_memory`, after all GPU work that may still read the memory."""
    runtime.synchronize_all()
    call = driver().call
    call("cuMemUnmap", ctypes.c_void_p(address), ctypes.c_size_t(size))
    call("cuMemAddressFree", ctypes.c_void_p(address), ctypes.c_size_t(size))
