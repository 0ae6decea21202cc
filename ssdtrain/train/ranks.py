"""Which process of the run this is, and how results come together."""

import atexit
import gc
import os
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import distributed

from ssdtrain import numa
from ssdtrain.errors import ConfigError

RUN_DIRECTORY = "SSDTRAIN_RUN_DIRECTORY"
"""Environment: the run's directory, from the process that started the ranks."""
PARENT = "SSDTRAIN_PARENT"
"""Environment: that process."""


def end_process(code: int) -> NoReturn:
    """End a rank's process after its exit handlers, and destroy no more: DeepSpeed
    holds process groups for good, whose threads now and then abort a process that ends
    as usual."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Place of this process, read from the launcher's environment."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launched: bool
    """True when a launcher (deepspeed, torchrun, slurm wrapper) started us."""
    run_directory: str | None = None
    """What `ssdtrain train` chose when it started the ranks itself."""

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Return RANK, WORLD_SIZE, LOCAL_RANK and the number of ranks on this node."""
        env = os.environ
        world_size = int(env.get("WORLD_SIZE", "1"))
        local_size = env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE")
        return cls(
            rank=int(env.get("RANK", "0")),
            world_size=world_size,
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_size=int(local_size or world_size),
            launched="RANK" in env,
            run_directory=env.get(RUN_DIRECTORY),
        )

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes the shared files."""
        return self.rank == 0

    def join(self) -> None:
        """Join the process group of the launcher's environment, once. Raises
        ConfigError: the ranks cannot meet at the launcher's address."""
        if self.world_size > 1 and not distributed.is_initialized():
            on_gpu = torch.cuda.is_available()
            if on_gpu:
                torch.cuda.set_device(self.device())
            try:
                distributed.init_process_group("nccl" if on_gpu else "gloo")
            except distributed.DistNetworkError as error:
                raise ConfigError(_no_meeting(str(error))) from error

    def from_first(self, value: Any) -> Any:
        """Return the first rank's `value` on every rank (any picklable)."""
        return self.gather(value)[0]

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' values, on every rank."""
        if self.world_size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.int64, device=self.device())
        distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        return int(shared)

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values in rank order, on every rank (any picklable)."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values

    def leave(self) -> None:
        """Leave the process group, if one was joined, once all ranks are about to.
        Models in cycles go first: a group's threads that outlive it abort a process
        that is ending."""
        if self.world_size > 1 and distributed.is_initialized():
            self.gather(None)
            gc.collect()
            distributed.destroy_process_group()

    def device(self) -> torch.device:
        """Return the GPU of this local rank, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def share_cores(self) -> None:
        """Limit this rank to its share of the cores, unless OMP_NUM_THREADS is set."""
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0))
            # Those of other NUMA nodes run on other cores.
            apart = len(numa.nodes()) if len(numa.nodes_of_process()) == 1 else 1
            torch.set_num_threads(max(1, cores // -(-self.local_size // max(1, apart))))

    def bind(self) -> int | None:
        """Run on the NUMA node of this rank's GPU; return it, or None: unchanged."""
        device = self.device()
        if device.type != "cuda" or len(numa.nodes()) < 2:
            return None
        gpu = torch.cuda.get_device_properties(device)
        node = numa.node_of_pci(numa.pci_address(gpu))
        return node if node is not None and numa.bind(node) else None


def _no_meeting(text: str) -> str:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    why = "another process listens there" if "EADDRINUSE" in text else text
    return (
        f"the ranks expect to meet at {place}, and cannot ({why}); where another run "
        "has that port, choose one: --master_port of deepspeed, --master-port of "
        "torchrun, or MASTER_PORT"
    )
