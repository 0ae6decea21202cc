"""The one call of the CUDA driver that no framework offers: whose memory is this?"""

import ctypes
from typing import NamedTuple


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
