"""One optimizer step under Megatron's schedules, for the reference trainer."""

import math
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from ssdtrain.errors import ConfigError
from ssdtrain.train.checkpoint import fitting, read_checkpoint, write_checkpoint
from ssdtrain.train.choices import NO_GPU
from ssdtrain.train.mcore import models, parallel
from ssdtrain.train.mcore.steps import step_of
from ssdtrain.train.runner import Workload, schedule_ratio
from ssdtrain.train.settings import OptimizerKind, Precision, TrainSettings

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


class MegatronRunner:
    """Chunks in Megatron's data parallelism, its optimizer and its schedule."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._device = megatron_device()
        settings = workload.settings
        self._parallel = settings.parallel
        models.check_layout(settings.model, self._parallel)
        parallel.start(self._parallel, settings.train.seed)
        config = models.config_of(settings.model, self._parallel, self._dtype())
        chunks = models.Chunks(
            settings.model, config, workload.model.config.vocab_size
        ).build()
        self.attachable: list[Any] = self._wrapped(config, chunks)
        self._optimizer = get_megatron_optimizer(
            optimizer_config(settings.train, self._parallel), self.attachable
        )
        config.no_sync_func = [chunk.no_sync for chunk in self.attachable]
        if len(self.attachable) == 1:
            config.no_sync_func = config.no_sync_func[0]
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        self._forward_step = step_of(settings.model.family, self._device)
        self._run = get_forward_backward_func()

    def _dtype(self) -> torch.dtype:
        precision = self._workload.settings.train.precision
        if precision not in DTYPES:
            raise ConfigError(
                f"train.precision={precision.value} is for engine=plain; Megatron "
                "expects train.precision=bf16, fp16 or fp32."
            )
        return DTYPES[precision]

    def _wrapped(self, config: Any, chunks: list[nn.Module]) -> list[nn.Module]:
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self._parallel.distributed_optimizer,
        )
        return [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]

    def step(self, step: int) -> float:
        """Run all micro-batches through the schedule, and one optimizer step."""
        settings = self._workload.settings.train
        # A function of the step alone: a resumed run needs no generator state.
        seed = settings.seed * 1_000_003 + step
        parallel.seed_everything(seed, parallel.data_rank())
        for chunk in self.attachable:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        own = self._losses(step)
        rate = settings.learning_rate * schedule_ratio(settings, step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        found = [x for x in self._workload.ranks.gather(own) if x is not None]
        return math.fsum(found) / len(found)

    def _losses(self, step: int) -> float | None:
        """Return the mean over micro-batches, on ranks of the last stage."""
        settings = self._workload.settings
        count = settings.train.num_micro_batches
        rank = parallel.data_rank()

        def batches() -> Any:
            for number in range(count):
                yield self._workload.batches.batch(step, number, rank)

        losses: list[dict[str, Tensor]] = self._run(
            forward_step_func=self._forward_step,
            data_iterator=[batches() for _ in self.attachable],
            model=self.attachable,
            num_microbatches=count,
            seq_length=settings.model.sequence_length,
            micro_batch_size=settings.train.micro_batch_size,
            forward_only=False,
        )
        if not losses:
            return None
        return float(torch.stack([one["loss"] for one in losses]).mean())

    def save(self, directory: str, step: int) -> None:
        """Write this rank's weights and optimizer to a file of its own."""
        state = {
            "step": step,
            "chunks": [chunk.state_dict() for chunk in self.attachable],
            "optimizer": self._shards(),
        }
        write_checkpoint(self._path(directory), state)

    def load(self, directory: str) -> int:
        """Read what `save` wrote on as many ranks. Raises ConfigError: there is none;
        DamagedFileError: it is of another model or optimizer."""
        path = self._path(directory)
        keys = ("step", "chunks", "optimizer")
        state = read_checkpoint(path, self._device, keys)
        with fitting(path):
            for chunk, values in zip(self.attachable, state["chunks"], strict=True):
                chunk.load_state_dict(values)
            self._load_shards(state["optimizer"])
            return int(state["step"])

    def _shards(self) -> Any:
        """Return the optimizer's state on this rank, shards with their fp32 weights:
        Megatron's own format knows Apex's and Transformer Engine's Adam alone."""
        if not self._parallel.distributed_optimizer:
            return self._optimizer.state_dict()
        return [
            {
                "state": inner.state_dict(),
                "weights": [
                    p.detach() for g in inner.param_groups for p in g["params"]
                ],
                "scaler": None if scaler is None else scaler.state_dict(),
            }
            for inner, scaler in self._parts()
        ]

    def _load_shards(self, state: Any) -> None:
        if not self._parallel.distributed_optimizer:
            self._optimizer.load_state_dict(state)
            return
        for (inner, scaler), saved in zip(self._parts(), state, strict=True):
            inner.load_state_dict(saved["state"])
            own = [p for group in inner.param_groups for p in group["params"]]
            with torch.no_grad():
                for parameter, value in zip(own, saved["weights"], strict=True):
                    parameter.copy_(value)
            if scaler is not None:
                scaler.load_state_dict(saved["scaler"])

    def _parts(self) -> list[tuple[Any, Any]]:
        """torch's optimizers inside Megatron's, each with its loss scaler or None."""
        parts = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return [(one.optimizer, getattr(one, "grad_scaler", None)) for one in parts]

    def _path(self, directory: str) -> Path:
        return Path(directory) / f"megatron-rank{self._workload.ranks.rank}.pt"

    def close(self) -> None:
        """Drop Megatron's groups."""
        self.attachable = []
        parallel.stop()


def optimizer_config(
    settings: TrainSettings, layout: parallel.Parallel
) -> OptimizerConfig:
    """Return Megatron's configuration of the same optimizer. Raises ConfigError: the
    distributed optimizer is for adamw alone."""
    adam = settings.optimizer is OptimizerKind.ADAMW
    if layout.distributed_optimizer and not adam:
        raise ConfigError(
            "parallel.distributed_optimizer divides Adam's states; set "
            "train.optimizer=adamw, or parallel.distributed_optimizer=false."
        )
    return OptimizerConfig(
        optimizer="adam" if adam else "sgd",
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay if adam else 0.0,
        sgd_momentum=0.0,
        bf16=settings.precision is Precision.BF16,
        fp16=settings.precision is Precision.FP16,
        params_dtype=DTYPES[settings.precision],
        clip_grad=settings.gradient_clipping,
        use_distributed_optimizer=layout.distributed_optimizer,
    )


def megatron_device() -> torch.device:
    """Return this rank's device, as Megatron asks for it. Raises ConfigError: there is
    no GPU."""
    try:
        return torch.device(torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(NO_GPU) from error
