"""DeepSpeed's data-parallel engine: ZeRO stages 0 to 3 over the stock model."""

import math

import torch

from ssdtrain.train.engine import EngineRunner, import_deepspeed, join_deepspeed
from ssdtrain.train.runner import Workload, seed_step


class ZeroRunner(EngineRunner):
    """A DeepSpeedEngine over the stock model, one micro-batch after the other."""

    def __init__(self, workload: Workload) -> None:
        deepspeed = import_deepspeed()
        join_deepspeed(deepspeed)
        torch.manual_seed(workload.settings.train.seed)  # the same weights everywhere
        module = workload.model.whole().train()
        super().__init__(deepspeed, module, workload.settings)
        self._workload = workload

    def step(self, step: int) -> float:
        """Run forward, backward and the engine's step for every micro-batch."""
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
