"""The one place that calls the CUDA runtime and the kernel about host memory.

Everything here is a thin call: who owns what is decided in `raw`.
"""

import ctypes
import os
from pathlib import Path

import torch

from pydirect.memory.limits import HostMemoryError, read_limits

# Flags of cudaHostRegister (CUDA runtime API, "Memory Management").
_REGISTER_PORTABLE = 0x01
_REGISTER_MAPPED = 0x02
_REGISTER_READ_ONLY = 0x08

_MPOL_PREFERRED = 1
_MPOL_INTERLEAVE = 3
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MADV_HUGEPAGE = 14


def cuda_works() -> bool:
    """Whether there is a CUDA device; without one memory stays plain."""
    # Counting devices takes microseconds, and every gather asks.
    return torch.cuda.is_initialized() or torch.cuda.is_available()


def register_memory(address: int, num_bytes: int, *, read_only: bool) -> None:
    """Pin and map ``num_bytes`` at ``address`` for every CUDA device.

    Raises:
        HostMemoryError: the driver refused; the text names the limits.
    """
    torch.cuda.init()
    flags = _REGISTER_PORTABLE | _REGISTER_MAPPED
    if read_only:
        flags |= _REGISTER_READ_ONLY
    status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, flags)
    if int(status) != 0:
        raise HostMemoryError(
            f"cudaHostRegister of {num_bytes} bytes at {address:#x} failed with CUDA "
            f"error {int(status)} ({status}); {read_limits().describe()}. Memory that "
            "maps a file cannot be pinned on every file system: copy it into "
            "pydirect.memory.empty_pinned(...) instead"
        )


def unregister(address: int) -> None:
    """Undo `register_memory`, after all GPU work that may still read the memory."""
    synchronize_all()
    status = torch.cuda.cudart().cudaHostUnregister(address)
    if int(status) != 0:
        raise HostMemoryError(
            f"cudaHostUnregister at {address:#x} failed with CUDA error {int(status)}"
        )


def synchronize_all() -> None:
    """Wait for every device on which this process has a context."""
    if not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        # A device that was never used has no work, and asking it would build a
        # context of several hundred MB.
        if _has_context(device):
            torch.cuda.synchronize(device)


def devices_in_use() -> list[int]:
    """The current device and those on which this process has a context."""
    current = torch.cuda.current_device()
    every = range(torch.cuda.device_count())
    return [gpu for gpu in every if gpu == current or _has_context(gpu)]


def _has_context(device: int) -> bool:
    # torch's own question before it guesses a device for a pinned allocation.
    return bool(getattr(torch._C, "_cuda_hasPrimaryContext")(device))  # noqa: B009


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for transparent huge pages: faster to fault in and to pin. Advice only."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)


def bind_memory(address: int, num_bytes: int, nodes: tuple[int, ...]) -> None:
    """Place untouched pages: on one node, or interleaved over several.

    Raises:
        HostMemoryError: the kernel knows no such node.
    """
    if not set(nodes) <= set(numa_nodes()):
        raise HostMemoryError(
            f"NUMA placement expects nodes of this machine, {numa_nodes()}, got nodes "
            f"{nodes}"
        )
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        raise HostMemoryError(
            f"NUMA placement is not known for {os.uname().machine}: leave "
            "numa_nodes out"
        )
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    mode = _MPOL_PREFERRED if len(nodes) == 1 else _MPOL_INTERLEAVE
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(mode),
        ctypes.byref(mask),
        # The kernel takes one off before it reads the mask.
        ctypes.c_ulong(65),
        ctypes.c_uint(0),
    )
    if failed:
        code = ctypes.get_errno()
        raise HostMemoryError(
            f"NUMA placement on nodes {nodes} failed: {os.strerror(code)}"
        )


def numa_nodes() -> tuple[int, ...]:
    """The NUMA nodes of this machine that hold memory."""
    found = Path("/sys/devices/system/node").glob("node[0-9]*")
    return tuple(sorted(int(p.name[4:]) for p in found)) or (0,)


def numa_node_of(device: torch.device) -> int | None:
    """The NUMA node next to a CUDA device; None where the machine does not say."""
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    address = [getattr(properties, name, None) for name in names]
    if None in address:
        return None
    domain, bus, slot = address
    place = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        text = Path(f"/sys/bus/pci/devices/{place}/numa_node").read_text()
    except OSError:
        return None
    return int(text) if int(text) >= 0 else None
