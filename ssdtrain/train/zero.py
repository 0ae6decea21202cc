"""DeepSpeed's data-parallel engine: ZeRO stages 0 to 3 over the stock model."""

import math
from typing import Any

import torch

from ssdtrain.train.engine import (
    EngineCheckpoints,
    engine_config,
    import_deepspeed,
    start,
)
from ssdtrain.train.runner import (
    Workload,
    build_optimizer,
    build_schedule,
    seed_step,
)


class ZeroRunner:
    """A DeepSpeedEngine over the stock model, one micro-batch after the other."""

    def __init__(self, workload: Workload) -> None:
        settings = workload.settings
        deepspeed = import_deepspeed()
        start(deepspeed)
        self._workload = workload
        torch.manual_seed(settings.train.seed)  # the same weights on every rank
        module = workload.model.whole().train()
        optimizer = build_optimizer(settings.train, module)
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=build_schedule(settings.train, optimizer),
            config=engine_config(settings),
        )
        self.attachable: Any = engine
        self._checkpoints = EngineCheckpoints(engine)

    def step(self, step: int) -> float:
        """Forward, backward and the engine's step for every micro-batch."""
        settings, ranks = self._workload.settings.train, self._workload.ranks
        seed_step(settings.seed, step, ranks.rank)
        losses = [
            self._micro_batch(step, index)
            for index in range(settings.num_micro_batches)
        ]
        own = float(torch.stack(losses).mean())
        return math.fsum(ranks.gather(own)) / ranks.world_size

    def _micro_batch(self, step: int, index: int) -> torch.Tensor:
        batch = self._workload.batches.batch(step, index, self._workload.ranks.rank)
        device = self.attachable.device
        tensors = [t.to(device) for t in (*batch.inputs, batch.labels)]
        loss: torch.Tensor = self.attachable(*tensors)
        self.attachable.backward(loss)
        self.attachable.step()
        return loss.detach()

    def save(self, directory: str, step: int) -> None:
        """See EngineCheckpoints."""
        self._checkpoints.save(directory, step)

    def load(self, directory: str) -> int:
        """See EngineCheckpoints."""
        return self._checkpoints.load(directory)

    def close(self) -> None:
        """Let DeepSpeed take back what it hung on modules and optimizer."""
        self.attachable.destroy()
