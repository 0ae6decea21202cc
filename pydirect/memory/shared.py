"""Host memory that several processes of one user map, without a file system's limits.

[Note: Memory without a name] A file of memfd_create lies in no directory: /dev/shm may
be small in containers, and a name would outlive a crash. Processes of the same user on
the same machine open it through /proc, by the maker's process id and descriptor. Once
they have, the descriptor is closed, and the memory goes with the last mapping. Tests:
tests/pydirect/test_ranks.py.
"""

import os
from dataclasses import dataclass

import torch

from pydirect.memory.limits import HostMemoryError, read_limits


@dataclass(frozen=True, kw_only=True)
class SharedFile:
    """Where another process finds the memory."""

    pid: int
    descriptor: int
    num_bytes: int


def create_shared(num_bytes: int) -> tuple[torch.Tensor, SharedFile]:
    """New shared memory, zeros: uint8, shape (num_bytes,), and where others find it.

    ``os.close`` the descriptor when they have.

    Raises:
        HostMemoryError: a limit of the machine forbids it.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes: expects at least 1, got {num_bytes}")
    limits = read_limits()
    limits.check(num_bytes)
    free = limits.available_bytes
    if free is not None and num_bytes > free:
        # The kernel would end a process rather than refuse this one.
        raise HostMemoryError(
            f"shared memory of {num_bytes} bytes: the machine has {free} left"
        )
    descriptor = os.memfd_create("pydirect", os.MFD_CLOEXEC)
    try:
        # Reserved now: memory that is missing later would be a bus error.
        os.posix_fallocate(descriptor, 0, num_bytes)
        place = SharedFile(pid=os.getpid(), descriptor=descriptor, num_bytes=num_bytes)
        return _map(place), place
    except (OSError, RuntimeError) as error:
        os.close(descriptor)
        raise HostMemoryError(
            f"shared memory of {num_bytes} bytes: {error}; {read_limits().describe()}"
        ) from error


def open_shared(place: SharedFile) -> torch.Tensor:
    """The memory that another process has made: uint8, shape (num_bytes,).

    Raises:
        HostMemoryError: it is out of reach: another machine, container or user.
    """
    try:
        return _map(place)
    except (OSError, RuntimeError) as error:
        raise HostMemoryError(
            f"shared memory of process {place.pid} cannot be opened ({error}): expects "
            "processes of one user in one container"
        ) from error


def _map(place: SharedFile) -> torch.Tensor:
    path = f"/proc/{place.pid}/fd/{place.descriptor}"
    # PyTorch would make a file that is missing.
    os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    return torch.from_file(path, shared=True, size=place.num_bytes, dtype=torch.uint8)
