"""One process, a plain PyTorch loop."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from ssdtrain.errors import ConfigError
from ssdtrain.train.checkpoint import fitting, read_checkpoint, write_checkpoint
from ssdtrain.train.runner import Workload, build_optimizer, build_schedule, seed_step
from ssdtrain.train.settings import Precision

_CHECKPOINT = "checkpoint.pt"
_AUTOCAST = {Precision.BF16_AUTOCAST: torch.bfloat16, Precision.FP16: torch.float16}


class PlainRunner:
    """The stock model, its optimizer and the loop body that users write."""

    def __init__(self, workload: Workload) -> None:
        settings, ranks = workload.settings.train, workload.ranks
        if ranks.world_size > 1:
            raise ConfigError(
                f"engine=plain runs in one process, the launcher started "
                f"{ranks.world_size}; set engine=deepspeed."
            )
        torch.manual_seed(settings.seed)
        self._workload = workload
        self._device = ranks.device()
        module = workload.model.whole()
        if settings.precision is Precision.BF16:
            module = module.to(torch.bfloat16)
        self.attachable = module.to(self._device).train()
        self._optimizer = build_optimizer(settings, self.attachable)
        self._schedule = build_schedule(settings, self._optimizer)
        self._scaler = torch.amp.GradScaler(
            self._device.type, enabled=settings.precision is Precision.FP16
        )
        self._parts: dict[str, Any] = {
            "model": self.attachable,
            "optimizer": self._optimizer,
            "schedule": self._schedule,
            "scaler": self._scaler,
        }

    def step(self, step: int) -> float:
        """Run forward and backward over all micro-batches, and one optimizer step."""
        settings = self._workload.settings.train
        seed_step(settings.seed, step, 0)
        losses = [
            self._micro_batch(step, index)
            for index in range(settings.num_micro_batches)
        ]
        if settings.gradient_clipping:
            self._scaler.unscale_(self._optimizer)
            clip_grad_norm_(self.attachable.parameters(), settings.gradient_clipping)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        return float(torch.stack(losses).mean())

    def _micro_batch(self, step: int, index: int) -> torch.Tensor:
        batch = self._workload.batches.batch(step, index, 0)
        tensors = [t.to(self._device) for t in (*batch.inputs, batch.labels)]
        with self._autocast():
            loss: torch.Tensor = self.attachable(*tensors)
        count = self._workload.settings.train.num_micro_batches
        self._scaler.scale(loss / count).backward()
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = _AUTOCAST.get(self._workload.settings.train.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype)

    def save(self, directory: str, step: int) -> None:
        """Write weights, optimizer, schedule and scaler to one file."""
        state = {name: part.state_dict() for name, part in self._parts.items()}
        write_checkpoint(Path(directory) / _CHECKPOINT, {"step": step, **state})

    def load(self, directory: str) -> int:
        """Read what `save` wrote. Raises ConfigError: there is no checkpoint;
        DamagedFileError: it is not one of this model and optimizer."""
        path = Path(directory) / _CHECKPOINT
        state = read_checkpoint(path, self._device, ("step", *self._parts))
        with fitting(path):
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
            return int(state["step"])

    def close(self) -> None:
        """Close the session and drop the model: nothing outlives the runner."""
