"""Other ways to place the activations of the same blocks; see `offload.placement`.

`transformers` and DeepSpeed place only what crosses a checkpointed layer of a
`transformers` model, so the blocks are dressed as such layers: the code of the model,
its weights and its seeds stay the same.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recipes.bench.harness.blocks import Blocks, Forward


def dress(model: Blocks, offload: bool) -> None:
    """Turn every block into a checkpointed layer of `transformers`.

    offload: `transformers` itself holds the inputs of the layers in host memory.
    """
    from transformers import GradientCheckpointingLayer, PreTrainedConfig
    from transformers import PreTrainedModel as Stock

    class Layer(GradientCheckpointingLayer):  # type: ignore[misc]
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x)  # type: ignore[no-any-return]

    class Dressed(Stock):  # type: ignore[misc]
        config_class = PreTrainedConfig
        main_input_name = "x"
        supports_gradient_checkpointing = True

        def __init__(self, inner: nn.Module) -> None:
            super().__init__(PreTrainedConfig())
            self.inner = inner

    model.blocks = nn.ModuleList(Layer(block) for block in model.blocks)
    dressed = Dressed(model).train()
    old = dressed.gradient_checkpointing_enable
    enable = getattr(dressed, "activation_checkpointing_enable", old)
    enable({"use_reentrant": False}, offload=offload)


@contextlib.contextmanager
def transformers_offload(model: Blocks) -> Iterator[Forward]:
    """`gradient_checkpointing_enable(offload=True)` of transformers 5.17 and later:
    full recomputation, the layers' inputs in pinned host memory."""
    dress(model, offload=True)
    yield model


class HiddenStates:
    """DeepSpeed's `CheckpointHiddenStatesOffload`, its defaults.

    Its context has to span backward and has to be left after every step: what it
    reloads it keeps until then.
    """

    def __init__(self, model: Blocks) -> None:
        from deepspeed.runtime.activation_checkpointing import offload_activations

        self.around = offload_activations.CheckpointHiddenStatesOffload()
        self._model = model

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._model(x)  # type: ignore[no-any-return]


@contextlib.contextmanager
def deepspeed_offload(model: Blocks) -> Iterator[Forward]:
    """Full recomputation, the layers' inputs in host memory on a side stream."""
    dress(model, offload=False)
    yield HiddenStates(model)


COLUMNS: dict[str, Callable[[Blocks], Any]] = {
    "transformers offload=True": transformers_offload,
    "deepspeed hidden states": deepspeed_offload,
}
