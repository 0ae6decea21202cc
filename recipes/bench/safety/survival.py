"""Who survives what: the pitfalls' scenarios under ssdtrain and under its peers.

The programs are `tests/pitfalls/scenarios.py`; the judge compares gradients with plain
autograd's, byte for byte. TRL and DeepSpeed move GPU tensors only, so their columns say
something on a GPU alone, and are left out elsewhere. DeepSpeed's hook moves marked
checkpoint inputs; here every saved tensor is marked, which is its own engine on all of
the programs. A program that plain autograd refuses must be refused.

    python -m recipes.bench safety.survival --budget-s 60
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import Any

import torch

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.models.real_row import trl_context
from tests.pitfalls import scenarios

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Plain(scenarios.Runner):  # type: ignore[misc,name-defined]
    """Plain autograd."""

    def __init__(self) -> None:
        super().__init__(DEVICE)

    def close(self) -> None:
        """Give everything back."""


class Ours(Plain):
    """ssdtrain, everything moved at once, or made again by recipes."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        moves = {"plan": "offload-all", "min_bytes": 0, "window_bytes": 1}
        memory = {"target": "host", "host_bytes": 256 << 20}
        self.session = ssdtrain.offload(
            self.holder, recompute=recompute, **moves, **memory
        )

    def close(self) -> None:
        """Give the host memory back."""
        self.session.close()


class SaveOnCpu(Plain):
    """torch.autograd.graph.save_on_cpu."""

    def around_forward(self) -> AbstractContextManager[Any]:
        """Its documented use."""
        return torch.autograd.graph.save_on_cpu(pin_memory=DEVICE == "cuda")


class Trl(Plain):
    """TRL's OffloadActivations: one for all steps, around the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.context = trl_context()()

    def around_forward(self) -> AbstractContextManager[Any]:
        """As its trainer does."""
        return self.context  # type: ignore[no-any-return]


class DeepSpeed(Plain):
    """CheckpointHiddenStatesOffload, around forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        module = importlib.import_module(
            "deepspeed.runtime.activation_checkpointing.offload_activations"
        )

        class Everything(module.CheckpointHiddenStatesOffload):  # type: ignore[misc]
            def _consume_mark(self, tensor: torch.Tensor) -> bool:
                return True

        self.context = Everything()

    def around_step(self) -> AbstractContextManager[Any]:
        """Its tracker is cleared at the exit."""
        return self.context  # type: ignore[no-any-return]


CONTENDERS: dict[str, Callable[[], Any]] = {
    "ssdtrain": partial(Ours, "off"),
    "ssdtrain + recipes": partial(Ours, "auto"),
    "save_on_cpu": SaveOnCpu,
}
GPU_CONTENDERS: dict[str, Callable[[], Any]] = {
    "TRL OffloadActivations": Trl,
    "DeepSpeed CheckpointHiddenStatesOffload": DeepSpeed,
}


def judge(make: Callable[[], Any]) -> dict[str, Any]:
    """All scenarios for one contender.

    Raises:
        ImportError: it is not installed, which says nothing about any scenario.
    """
    make().close()
    verdicts = {}
    for row in scenarios.ROWS:
        with ExitStack() as stack:

            def fresh(stack: ExitStack = stack) -> Any:
                return stack.enter_context(closing(make()))

            name = row.scenario.__name__
            verdicts[name] = scenarios.verdict(row, Plain(), fresh)
    return {"verdicts": verdicts}


def main(bench: Bench) -> None:
    """Run the contenders that are missing."""
    evidence = {row.scenario.__name__: row.evidence for row in scenarios.ROWS}
    cells = bench.cells({"evidence": evidence})
    contenders = dict(CONTENDERS)
    if DEVICE == "cuda":
        contenders |= GPU_CONTENDERS
    for name, make in contenders.items():
        cells.run(name, judge, make)
