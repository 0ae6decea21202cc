"""Where activations live: step time and activation peak of every way to place them.

GPT blocks in bf16; a step is forward, backward and SGD. All columns run in one
process on one device with the same model code and seeds. Peak is the most bytes
allocated in forward and backward above the level before the step (weights and
gradients excluded). Where ssdtrain plans, steps are timed once nothing settles any
more, or `--settle-s` are over: the cell says which.

    python -m recipes.bench offload.placement --sizes 8192x4 12288x3 --budget-s 400
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

import ssdtrain
from recipes.bench.harness.blocks import (
    SETTLE_S,
    Blocks,
    Forward,
    Size,
    Steps,
    settling,
)
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import link_gb_per_s
from recipes.bench.models.real_row import trl_context

Column = Callable[[Blocks], AbstractContextManager[tuple[Forward, Any]]]
"""Gives what is run in the place of the model, and the session, if there is one."""


@contextlib.contextmanager
def plain(model: Blocks) -> Iterator[tuple[Forward, None]]:
    """No placement at all."""
    yield model, None


@contextlib.contextmanager
def recompute(model: Blocks) -> Iterator[tuple[Forward, None]]:
    """Every block checkpointed, of a model that is not used again."""
    model.recompute = True
    yield model, None


def around(context: Callable[[], Any]) -> Column:
    """The forward in a context."""

    @contextlib.contextmanager
    def column(model: Blocks) -> Iterator[tuple[Forward, None]]:
        within = context()

        def forward(x: torch.Tensor) -> torch.Tensor:
            with within():
                return model(x)

        yield forward, None

    return column


def ours(**settings: Any) -> Column:
    """ssdtrain with these settings."""

    @contextlib.contextmanager
    def column(model: Blocks) -> Iterator[tuple[Forward, Any]]:
        with ssdtrain.offload(model, **settings) as session:
            yield model, session

    return column


def columns() -> dict[str, Column]:
    """Every way to place activations, the baseline first, the slowest last."""
    host = {"target": "host", "recompute": "off"}
    return {
        "keep": plain,
        "ours keep-all": ours(**host, plan="keep-all"),
        "ours offload-all": ours(**host, plan="offload-all"),
        "full recompute": recompute,
        "trl": around(trl_context),  # its defaults
        "ours auto": ours(**host, plan="auto"),
        "ours recipes": ours(target="host", plan="keep-all"),
        "ours recipes + offload-all": ours(target="host", plan="offload-all"),
        "ours recipes + auto": ours(target="host", plan="auto"),
        "save_on_cpu": around(
            lambda: partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
        ),
    }


def link(device: torch.device, num_bytes: int) -> dict[str, Any]:
    """Pinned copies of `num_bytes` in both directions."""
    return {
        "d2h_gb_per_s": link_gb_per_s(num_bytes, device, back=True),
        "h2d_gb_per_s": link_gb_per_s(num_bytes, device),
    }


def run_column(
    size: Size,
    column: Column,
    device: torch.device,
    num_steps: int,
    settle_s: float = SETTLE_S,
) -> dict[str, Any]:
    """One cell: a fresh model under one column."""
    steps = Steps(size, device)
    with column(steps.model) as (forward, session):
        result = steps.measured(num_steps, settling(session, settle_s), forward)
        if session is not None:
            result["settled"] = session.is_settled
            report = session.last_step
            result["report"] = None if report is None else report.as_dict()
    return result


def summarize(cells: dict[str, Any]) -> None:
    """Ratios to keep."""
    for name, cell in cells.items():
        keep = cells.get(f"{name.split('/')[0]}/keep", {})
        if "step_ms" in cell and "step_ms" in keep:
            cell["step_ratio"] = cell["step_ms"] / keep["step_ms"]
            cell["losses_equal"] = cell["losses"] == keep["losses"]


def main(
    bench: Bench,
    *,
    sizes: tuple[str, ...] = ("8192x4", "12288x3", "16384x2"),
    batch: int = 16,
    sequence: int = 1024,
    steps: int = 7,
    settle_s: float = SETTLE_S,
) -> None:
    """Run the cells that are missing.

    Args:
        settle_s: at most
    """
    device = bench.device
    cells = bench.cells({"batch": batch, "sequence": sequence, "dtype": "bf16"})
    cells.run("link", link, device, 2**30 if device.type == "cuda" else 2**24)
    for text in sizes:
        size = Size(*map(int, text.split("x")), batch, sequence)
        for name, column in columns().items():
            own = size, column, device, steps, settle_s
            cells.run(f"{size.name}/{name}", run_column, *own)
    cells.revise(summarize)
