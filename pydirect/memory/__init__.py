"""Host memory that GPUs read in place."""

from collections.abc import Sequence

import torch

from pydirect.memory.alias import device_alias
from pydirect.memory.errors import HostMemoryError, HostMemoryWarning
from pydirect.memory.limits import MemoryLimits, read_limits
from pydirect.memory.pinning import is_pinned, pin
from pydirect.memory.pool import HostPool, PoolStats, default_pool
from pydirect.memory.runtime import numa_node_of, numa_nodes
from pydirect.memory.table import HostTable

__all__ = [
    "HostMemoryError",
    "HostMemoryWarning",
    "HostPool",
    "HostTable",
    "MemoryLimits",
    "PoolStats",
    "default_pool",
    "device_alias",
    "empty_pinned",
    "is_pinned",
    "numa_node_of",
    "numa_nodes",
    "pin",
    "read_limits",
]


def empty_pinned(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    numa_nodes: tuple[int, ...] = (),
) -> torch.Tensor:
    """An uninitialised host tensor from the process's pool; see `HostPool.empty`."""
    return default_pool().empty(shape, dtype, numa_nodes=numa_nodes)
