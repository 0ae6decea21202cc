"""Which process of the run this is, and how results come together."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Place of this process, read from the launcher's environment."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launched: bool
    """True when a launcher (deepspeed, torchrun, slurm wrapper) started us."""

    @classmethod
    def from_environment(cls) -> "Ranks":
        """RANK, WORLD_SIZE, LOCAL_RANK and the number of ranks on this node."""
        env = os.environ
        world_size = int(env.get("WORLD_SIZE", "1"))
        local_size = env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE")
        return cls(
            rank=int(env.get("RANK", "0")),
            world_size=world_size,
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_size=int(local_size or world_size),
            launched="RANK" in env,
        )

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes the shared files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank (any picklable)."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values

    def leave(self) -> None:
        """Leave the process group, if one was joined."""
        if self.world_size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    def device(self) -> torch.device:
        """The GPU of this local rank, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def share_cores(self) -> None:
        """Without OMP_NUM_THREADS every rank would start a thread per core of the
        node; give each its share."""
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // self.local_size))
