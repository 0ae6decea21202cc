"""What the loop needs of whoever runs the training step."""

import math
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ssdtrain.train.data.batches import Batches
from ssdtrain.train.models.base import Model
from ssdtrain.train.ranks import Ranks
from ssdtrain.train.settings import OptimizerKind, RunSettings, TrainSettings


class Workload(NamedTuple):
    """What is trained, on what, where: the same for both runs of a comparison."""

    settings: RunSettings
    model: Model
    batches: Batches
    ranks: Ranks


class Runner(Protocol):
    """One host with one freshly built model."""

    attachable: Any
    """What `ssdtrain.offload` is given: the module, the engine or the chunks."""

    def step(self, step: int) -> float:
        """Train on the micro-batches of a step; return the mean loss of all ranks."""

    def save(self, directory: str, step: int) -> None:
        """Write a checkpoint from which step number `step` comes next."""

    def load(self, directory: str) -> int:
        """Read the newest checkpoint; returns the step that comes next."""

    def close(self) -> None:
        """Drop the model and everything the host keeps for it."""


def build_optimizer(settings: TrainSettings, module: nn.Module) -> Optimizer:
    """Return the optimizer of `settings` over the parameters of `module`."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if settings.optimizer is OptimizerKind.SGD:
        return SGD(parameters, lr=settings.learning_rate)
    return AdamW(
        parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
    )


def build_schedule(settings: TrainSettings, optimizer: Optimizer) -> LambdaLR:
    """Build linear warm-up, then cosine decay to the last ratio."""
    return LambdaLR(optimizer, partial(schedule_ratio, settings))


def schedule_ratio(settings: TrainSettings, step: int) -> float:
    """Return the learning rate of a step over the highest."""
    warmup, steps = settings.warmup_steps, settings.steps
    last = settings.min_learning_rate_ratio
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed one step's dropout on one rank, so that resuming needs no generator
    state."""
    torch.manual_seed((seed * 1_000_003 + step) * 4096 + rank)
