"""A mesh of one rank in this process: DTensors without other processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def one_rank() -> Iterator[Any]:
    """Its `DeviceMesh`; the process group ends with the block."""
    from torch.distributed.device_mesh import init_device_mesh

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
