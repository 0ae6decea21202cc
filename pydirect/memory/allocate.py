"""Host tensors by purpose, from the pools of the process."""

import logging
import math
from collections.abc import Sequence

import torch

from pydirect.memory.arena import Backing
from pydirect.memory.errors import ManagedMemoryError
from pydirect.memory.pool import default_pool

logger = logging.getLogger(__name__)

# Below this the small pages of pinned memory fit the GPU's translation caches.
_TABLE_BYTES = 64 << 20


def empty_pinned(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    numa_nodes: tuple[int, ...] = (),
) -> torch.Tensor:
    """An uninitialised host tensor for copies to and from GPUs; see `HostPool`."""
    return default_pool().empty(shape, dtype, numa_nodes=numa_nodes)


def empty_table(
    shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """An uninitialised host tensor for GPUs to read in place, at random.

    From `Backing.MANAGED`, which GPUs map in large pages, when the tensor is large
    enough for that to matter and the GPUs have as much free (`managed_capacity_bytes`);
    pinned memory (`empty_pinned`) otherwise. `reach` says which it is. Managed memory
    is not for processes forked later; use `empty_pinned` for those.

    Raises:
        HostMemoryError: a limit of the machine forbids it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _TABLE_BYTES:
        try:
            return default_pool(Backing.MANAGED).empty(shape, dtype)
        except ManagedMemoryError as error:
            logger.info("a table of %d bytes is pinned instead: %s", num_bytes, error)
    return empty_pinned(shape, dtype)
