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
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from typing import Any

import torch

import ssdtrain
from recipes.bench.harness.cli import Bench
from recipes.bench.models.real_row import trl_context
from tests.pitfalls import scenarios

Context = Callable[[], AbstractContextManager[Any]]
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


class Around(Plain):
    """A context around each forward, or around forward and backward."""

    def __init__(
        self, forward: Context = nullcontext, step: Context = nullcontext
    ) -> None:
        super().__init__()
        self.around_forward, self.around_step = forward, step


def trl() -> Around:
    """TRL's OffloadActivations: one for all steps, around the forward."""
    context = trl_context()()
    return Around(forward=lambda: context)


def deepspeed() -> Around:
    """CheckpointHiddenStatesOffload, around forward and backward: it clears its tracker
    at the exit."""
    module = importlib.import_module(
        "deepspeed.runtime.activation_checkpointing.offload_activations"
    )

    class Everything(module.CheckpointHiddenStatesOffload):  # type: ignore[misc]
        def _consume_mark(self, tensor: torch.Tensor) -> bool:
            return True

    context = Everything()
    return Around(step=lambda: context)


CONTENDERS: dict[str, Callable[[], Any]] = {
    "ssdtrain": partial(Ours, "off"),
    "ssdtrain + recipes": partial(Ours, "auto"),
    "save_on_cpu": partial(
        Around, partial(torch.autograd.graph.save_on_cpu, pin_memory=DEVICE == "cuda")
    ),
}
if DEVICE == "cuda":
    CONTENDERS["TRL OffloadActivations"] = trl
    CONTENDERS["DeepSpeed CheckpointHiddenStatesOffload"] = deepspeed


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
    for name, make in CONTENDERS.items():
        cells.run(name, judge, make)
