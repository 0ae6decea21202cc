"""Megatron's process groups: how many ranks share a layer, and how many a model."""

from dataclasses import dataclass

import torch
from torch import distributed

from ssdtrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How one model is spread; what is left of the ranks is data parallel."""

    tensor: int = 1
    """Ranks that share every layer."""
    pipeline: int = 1
    """Stages that the layers are cut into."""
    virtual_pipeline: int | None = None
    """Model chunks of each stage (interleaved schedule); None: one, 1F1B."""
    sequence: bool = False
    """Norms and dropouts, too, are divided among the tensor-parallel ranks."""
    distributed_optimizer: bool = False
    """Optimizer states divided among the data-parallel ranks."""
    recompute: str | None = None
    """Megatron's own recomputation: `full`, `selective` (core attention) or None."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"parallel.{name} expects 1 or more, got {getattr(self, name)}"
                )
        if self.virtual_pipeline is not None:
            if self.virtual_pipeline < 2 or self.pipeline < 2:
                raise ConfigError(
                    "parallel.virtual_pipeline expects 2 or more chunks on 2 or more "
                    f"stages, got {self.virtual_pipeline} on {self.pipeline}; leave it "
                    "unset for one chunk a stage."
                )
        if self.sequence and self.tensor == 1:
            raise ConfigError(
                "parallel.sequence divides norms among tensor-parallel ranks; set "
                "parallel.tensor=2 or more, or parallel.sequence=false."
            )
        if self.recompute not in (None, "full", "selective"):
            raise ConfigError(
                "parallel.recompute expects 'full', 'selective' or null, got "
                f"{self.recompute!r}"
            )

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError unless whole models fit on this many ranks."""
        model = self.tensor * self.pipeline
        if num_ranks % model:
            raise ConfigError(
                f"parallel.tensor x parallel.pipeline = {self.tensor} x "
                f"{self.pipeline} must divide the number of ranks, got {num_ranks}; "
                f"start a multiple of {model}."
            )

    @property
    def chunks(self) -> int:
        """Model chunks on each rank."""
        return self.virtual_pipeline or 1


def start(
    parallel: Parallel, seed: int, timeout_minutes: int = 30, experts: int = 1
) -> None:
    """Join the process group (torchrun's environment) and make Megatron's groups,
    `experts` data-parallel ranks sharing a layer's. Raises ConfigError: the ranks do
    not divide."""
    from megatron.core import parallel_state

    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel.check_ranks(distributed.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        expert_model_parallel_size=experts,
        distributed_timeout_minutes=timeout_minutes,
    )
    seed_everything(seed)


def seed_everything(seed: int, data_rank: int = 0) -> None:
    """Seed weights and dropout, every stage its own way. A `data_rank` above 0:
    dropouts (not weights) that differ between data-parallel ranks. Megatron adds 2718
    and its number to ranks of one layer, which the last factor leaves room for."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    stage = parallel_state.get_pipeline_model_parallel_rank()
    own = ((seed * 64 + stage) * 64 + data_rank) * 4096 % 2**63
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own)


def stop() -> None:
    """Drop Megatron's groups; the process group stays."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()


def data_rank() -> int:
    """This rank's place among the ranks that train on different data."""
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_rank())
