"""Data-parallel training: which process this is, and what it draws."""

import atexit
import gc
import hashlib
import os
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of a run, each with a share of every batch's labelled nodes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> "Ranks":
        """From RANK, WORLD_SIZE and LOCAL_RANK of a launcher such as torchrun."""
        env = os.environ
        return cls(
            rank=int(env.get("RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
        )

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device that `RunConfig.device` names, on this rank.

        Raises:
            ValueError: neither the CPU nor a GPU that is there.
        """
        count = torch.cuda.device_count()
        if name == "auto":
            name = "cuda" if count else "cpu"
        kind, _, index = name.partition(":")
        if name == "cuda" and count and self.world_size > 1:
            name = f"cuda:{self.local_rank % count}"
        there = name == "cpu" or (
            kind == "cuda" and count and int(index if index.isdigit() else 0) < count
        )
        if not there:
            raise ValueError(
                f"expected device auto, cpu, or a GPU (torch sees {count}), got "
                f"{name!r}"
            )
        return torch.device(name)

    def join(self, device: torch.device) -> None:
        """Join the process group of the launcher's environment, once."""
        if self.world_size > 1 and not distributed.is_initialized():
            on_gpu = device.type == "cuda"
            if on_gpu:
                torch.cuda.set_device(device)
            distributed.init_process_group("nccl" if on_gpu else "gloo")
            atexit.register(_leave)

    def share(self, rows: Tensor) -> Tensor:
        """Every `world_size`-th row, from the rank's on: of fewer rows than ranks some
        ranks have none."""
        return rows if self.world_size == 1 else rows[self.rank :: self.world_size]

    def mean(self, values: Tensor) -> Tensor:
        """The mean of all ranks' values, on every rank."""
        if self.world_size > 1:
            distributed.all_reduce(values)
            values /= self.world_size
        return values

    def seed(self, *facts: int, own: bool) -> None:
        """Seed all random numbers by `facts`, and with `own` by the rank as well: what
        ranks draw the same, and what each draws for itself, go on after a resume as
        they would have. One process goes on with the numbers that it has."""
        if self.world_size > 1:
            text = repr((*facts, self.rank if own else None)).encode()
            digest = hashlib.blake2b(text, digest_size=7).digest()
            torch.manual_seed(int.from_bytes(digest, "little"))


def _leave() -> None:
    if distributed.is_initialized():
        gc.collect()  # what holds the group: its threads must end with it
        distributed.destroy_process_group()
