"""DeepSpeed's PipelineEngine: the model's chain of layers cut into stages."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ssdtrain.errors import ConfigError
from ssdtrain.train.engine import EngineRunner, import_deepspeed, join_deepspeed, quiet
from ssdtrain.train.models.base import Layer, token_loss
from ssdtrain.train.runner import Workload, seed_step

_BALANCED = "type:.*Block"
"""Stages get equally many transformer blocks."""


def choose_stages(asked: int | None, world_size: int) -> int:
    """Return the pipeline stages for `world_size` ranks; 0 means no pipeline. Raises
    ConfigError: the stages asked for do not divide the ranks."""
    if asked is None:
        return 1 if world_size % 2 else 2
    if asked and world_size % asked:
        raise ConfigError(
            f"engine.num_stages={asked} must divide the number of ranks, got "
            f"{world_size}; start a multiple of {asked} ranks."
        )
    return asked


class PipelineRunner(EngineRunner):
    """A PipelineEngine over freshly built layers."""

    def __init__(self, workload: Workload) -> None:
        deepspeed = import_deepspeed()
        join_deepspeed(deepspeed)
        super().__init__(deepspeed, _module(deepspeed, workload), workload.settings)
        self._workload = workload
        self._data_rank = int(self.attachable.grid.get_data_parallel_rank())

    def step(self, step: int) -> float:
        """Run one `train_batch`; the loss is broadcast from the last stage."""
        seed_step(self._workload.settings.train.seed, step, self._workload.ranks.rank)
        return float(self.attachable.train_batch(self._micro_batches(step)))

    def _micro_batches(self, step: int) -> Iterator[tuple[Any, Tensor]]:
        for index in range(self._workload.settings.train.num_micro_batches):
            batch = self._workload.batches.batch(step, index, self._data_rank)
            alone = len(batch.inputs) == 1
            yield (batch.inputs[0] if alone else batch.inputs), batch.labels


def _module(deepspeed: Any, workload: Workload) -> Any:
    settings, ranks = workload.settings, workload.ranks
    with quiet():
        return deepspeed.pipe.PipelineModule(
            layers=[_spec(deepspeed, layer) for layer in workload.model.layers()],
            num_stages=choose_stages(settings.engine.num_stages, ranks.world_size),
            loss_fn=token_loss,
            seed_layers=True,
            # It counts layers in numpy integers, which its own default refuses.
            seed_fn=lambda seed: torch.manual_seed(int(seed)),
            base_seed=settings.train.seed,
            partition_method=_BALANCED,
        )


def _spec(deepspeed: Any, layer: Layer) -> Any:
    if layer.tied is None:
        return deepspeed.pipe.LayerSpec(layer.kind, *layer.arguments)
    return deepspeed.pipe.TiedLayerSpec(
        layer.tied, layer.kind, *layer.arguments, forward_fn=layer.forward
    )
