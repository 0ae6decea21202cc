"""NUMA nodes: where processors and memory are, and a process bound to one of them.

Host memory of another node is read and written over the link between sockets, up to
three times slower. A process that runs on its GPU's node has its pinned memory there,
and the threads that it starts inherit both.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1
_MASK_BITS = 65
"""The kernel takes one off before it reads the mask, a word of 64."""


def nodes() -> dict[int, frozenset[int]]:
    """Return the processors of each node that has some; empty where nothing says."""
    found = {}
    for path in sorted(NODES.glob("node[0-9]*")):
        try:
            cpus = frozenset(_numbers((path / "cpulist").read_text()))
        except (OSError, ValueError):
            continue
        if cpus:
            found[int(path.name.removeprefix("node"))] = cpus
    return found


def _numbers(text: str) -> Iterator[int]:
    """`0-3,8` as 0, 1, 2, 3, 8."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def node_of_pci(address: str | None) -> int | None:
    """Return the node of a PCI device; None when unknown (the kernel says -1)."""
    if address is None:
        return None
    try:
        node = int((PCI_DEVICES / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def pci_address(gpu: Any) -> str | None:
    """Return the address of a GPU by its properties in torch; None: they lack it."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(gpu, name) for name in names):
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*(getattr(gpu, name) for name in names))


def nodes_of_process() -> tuple[int, ...]:
    """Return the nodes on whose processors this process may run."""
    own = os.sched_getaffinity(0)
    return tuple(node for node, cpus in nodes().items() if cpus & own)


def bind(node: int) -> bool:
    """Run this process on a node's processors, and take its memory first.

    Processors that it may not use stay out. Returns False, and changes nothing, where
    the process is on one node already, or may use none of this one's processors.
    """
    if len(nodes_of_process()) < 2:
        return False
    cpus = nodes().get(node, frozenset()) & os.sched_getaffinity(0)
    if not cpus:
        return False
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except OSError:  # it has ended
            continue
    prefer_memory(node)
    return True


def prefer_memory(node: int) -> None:
    """Let pages come from a node while it has some; the kernel's way where it refuses,
    which is the node of the processor that touches them first."""
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None or node >= _MASK_BITS - 1:
        return
    mask = ctypes.c_ulong(1 << node)
    ctypes.CDLL(None).syscall(
        ctypes.c_long(number),
        ctypes.c_int(_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(_MASK_BITS),
    )
