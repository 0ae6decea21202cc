"""Host memory that GPUs read in place."""

from pydirect.memory.alias import HostTable, device_alias
from pydirect.memory.arena import Backing
from pydirect.memory.limits import (
    HostMemoryError,
    HostMemoryWarning,
    ManagedMemoryError,
    MemoryLimits,
    read_limits,
)
from pydirect.memory.managed import Reach, managed_capacity_bytes
from pydirect.memory.pinning import is_pinned, pin, reach, to_table
from pydirect.memory.pool import (
    HostPool,
    PoolStats,
    default_pool,
    empty_pinned,
    empty_table,
)
from pydirect.memory.runtime import numa_node_of, numa_nodes

__all__ = [
    "Backing",
    "HostMemoryError",
    "HostMemoryWarning",
    "HostPool",
    "HostTable",
    "ManagedMemoryError",
    "MemoryLimits",
    "PoolStats",
    "Reach",
    "default_pool",
    "device_alias",
    "empty_pinned",
    "empty_table",
    "is_pinned",
    "managed_capacity_bytes",
    "numa_node_of",
    "numa_nodes",
    "pin",
    "reach",
    "read_limits",
    "to_table",
]
