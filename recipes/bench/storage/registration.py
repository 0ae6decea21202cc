"""Device memory registered with cuFile by hand, for comparison with what is not.

The product leaves that to the malloc hook: an allocation must be deregistered before
it is freed, and only the hook sees the caching allocator free one.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ssdtrain.storage.kvikio_shim import DeviceBytes


class Allocation(NamedTuple):
    """A device allocation as the driver knows it (a segment of torch's allocator)."""

    base: int
    """Device address."""
    num_bytes: int


def allocation_of(address: int) -> Allocation:
    """The device allocation that contains an address.

    Raises:
        OSError: no CUDA driver.
        ValueError: the address is not in device memory.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    result = driver.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    if result != 0:
        raise ValueError(f"{address:#x} is not in a device allocation (error {result})")
    return Allocation(base.value, size.value)


@contextmanager
def registered(buffer: torch.Tensor) -> Iterator[None]:
    """Around transfers of any tensor in the allocation behind `buffer`.

    Raises:
        OSError: cuFile refuses.
    """
    import kvikio

    data = DeviceBytes(*allocation_of(buffer.data_ptr()))
    try:
        kvikio.memory_register(data)
    except RuntimeError as error:
        raise OSError(f"registering {data} failed: {error}") from error
    try:
        yield
    finally:
        kvikio.memory_deregister(data)
