"""BERT, GPT and T5 at the evaluation's sizes: step time and activation peak, kept,
recomputed and offloaded (chapter 5.4.2, Figure 5.11), and one full model whose
vocabulary is large.

The stock `transformers` models in fp16 on random tokens, sequence 1024 (T5: on both
sides), head size 128, batch 16. A step is forward, backward and SGD. Peak is the most
bytes allocated in forward and backward above the level before the step (weights,
gradients and optimizer states excluded). All cells run in one process. Under ssdtrain
steps are measured once nothing settles any more, or `--settle-s` are over: the cell
says which.

    python -m recipes.bench models.evaluation --budget-s 200   # again to go on
"""

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recipes.bench.harness.blocks import SETTLE_S, Step, session_of, settling
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import Clock, Peak
from ssdtrain.train.models import model_of
from ssdtrain.train.models.base import IGNORED_LABEL
from ssdtrain.train.settings import Checkpointing, ModelSettings

HEAD_SIZE = 128
SIZES = ((8192, 4), (12288, 3), (16384, 2))
BYTES_VOCABULARY = 384
LOSS_SCALE = 256.0
DTYPE = torch.float16
WARMUP_STEPS = 4
"""Steps before the measured ones, behind those in which a session settles."""


@dataclass(frozen=True)
class Row:
    """One model and its batch."""

    family: str
    hidden: int
    num_layers: int
    vocabulary: int = BYTES_VOCABULARY
    batch: int = 16
    sequence: int = 1024

    @property
    def name(self) -> str:
        """Such as "bert 8192x4"; the vocabulary where it is not that of bytes."""
        more = "" if self.vocabulary == BYTES_VOCABULARY else f" v{self.vocabulary}"
        return f"{self.family} {self.hidden}x{self.num_layers}{more}"


FULL = Row("gpt", 4096, 32, vocabulary=50304, batch=8)
"""GPT-3 6.7B (Brown et al. 2020, table 2.1) with GPT-2's vocabulary."""


COLUMNS: dict[str, tuple[Checkpointing, dict[str, Any] | None]] = {
    "keep": (Checkpointing.NONE, None),
    "offloaded": (Checkpointing.NONE, {"target": "host"}),
    "recompute": (Checkpointing.NON_REENTRANT, None),
    "offloaded, no recipes": (
        Checkpointing.NONE,
        {"target": "host", "recompute": "off"},
    ),
}
"""Ways to place what autograd saves: settings of `ssdtrain.offload`; None: it stays
out."""


def build(row: Row, how: Checkpointing, device: torch.device) -> Any:
    """The seeded stock model and its loss in training mode, gradients allocated."""
    settings = ModelSettings(
        family=row.family,  # type: ignore[arg-type]
        hidden_size=row.hidden,
        num_layers=row.num_layers,
        num_heads=max(1, row.hidden // HEAD_SIZE),
        sequence_length=row.sequence,
        checkpointing=how,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(DTYPE)
    try:
        with device:
            whole = model_of(settings, row.vocabulary).whole().train()
    finally:
        torch.set_default_dtype(before)
    whole = whole.to(device, DTYPE)
    for parameter in whole.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return whole


def batch_of(row: Row, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Random inputs and labels, int64 [batch, sequence] each, in the model's order."""
    generator = torch.Generator().manual_seed(1)

    def ids() -> torch.Tensor:
        shape = (row.batch, row.sequence)
        return torch.randint(0, row.vocabulary, shape, generator=generator)

    inputs: tuple[torch.Tensor, ...] = (ids(),)
    labels = ids()
    if row.family == "bert":
        inputs = (*inputs, torch.ones_like(inputs[0]))
        asked = torch.rand(labels.shape, generator=generator) < 0.15
        labels = torch.where(asked, labels, IGNORED_LABEL)
    if row.family == "t5":
        inputs = (*inputs, ids())
    return tuple(tensor.to(device) for tensor in (*inputs, labels))


def measure(
    model: Any,
    row: Row,
    num_steps: int,
    settles: Callable[[], bool] = bool,
) -> dict[str, Any]:
    """Median times in ms, peaks in GB, losses.

    Args:
        settles: as `blocks.Steps.measured` says.
    """
    device = next(model.parameters()).device
    clock = Clock(device)
    batch = batch_of(row, device)
    optim = torch.optim.SGD(model.parameters(), lr=1e-4 / LOSS_SCALE)
    done: list[Step] = []
    torch.manual_seed(2)
    num_left = num_steps
    while num_left:
        num_left -= not settles()
        memory, begin = Peak(device), clock.mark()
        loss = model(*batch)
        middle, start = clock.mark(), memory.now
        (loss * LOSS_SCALE).backward()
        behind = clock.mark()
        peak = memory.most
        optim.step()
        optim.zero_grad(set_to_none=False)
        marks = (begin, middle, behind, clock.mark())
        done.append(Step(marks, start, peak, loss.detach(), 0.0))
        del loss
    first = len(done) - num_steps + WARMUP_STEPS
    return {
        **clock.times([step.marks for step in done[first:]]),
        "peak_gb": max(step.peak_bytes for step in done[first:]) / 1e9,
        "peak_of_first_steps_gb": max(step.peak_bytes for step in done[:first]) / 1e9,
        "backward_start_gb": max(step.start_bytes for step in done[first:]) / 1e9,
        "num_warm_up": first,
        "weights_gb": sum(p.nbytes for p in model.parameters()) / 1e9,
        # Of steps that every column has.
        "losses": [step.loss.item() for step in done[:num_steps]],
    }


def run_cell(
    row: Row, column: str, device: torch.device, steps: int, settle_s: float
) -> dict[str, Any]:
    """A fresh model under one column."""
    checkpointing, settings = COLUMNS[column]
    model = build(row, checkpointing, device)
    with session_of(model, settings) as session:
        found = measure(model, row, steps, settling(session, settle_s))
        if session is not None:
            found["settled"] = session.is_settled
        if session is not None and session.last_step is not None:
            found["report"] = session.last_step.as_dict()
    return found


def bits(losses: Sequence[float]) -> bytes:
    """Equal for equal losses, not-a-number included."""
    return struct.pack(f"<{len(losses)}d", *losses)


def summarize(cells: dict[str, Any]) -> None:
    """Ratios and losses against the row's `keep`."""
    for name, cell in cells.items():
        keep = cells.get(f"{name.split('/')[0]}/keep", {})
        if "step_ms" in cell and "step_ms" in keep:
            cell["step_ratio"] = cell["step_ms"] / keep["step_ms"]
            cell["peak_ratio"] = cell["peak_gb"] / (keep["peak_gb"] or 1)
            # Cells of an earlier run may have taken fewer steps.
            both = list(zip(cell["losses"], keep["losses"], strict=False))
            own, kept = zip(*both, strict=True)
            cell["losses_equal"] = bits(own) == bits(kept)


def rows(*, tiny: bool = False) -> list[Row]:
    """The smallest size of every family, the full model, then the other sizes."""
    if tiny:
        found = [Row(name, 128, 2, batch=2, sequence=64) for name in FAMILIES]
        return [*found, Row("gpt", 128, 3, vocabulary=1024, batch=2, sequence=64)]
    sizes = [[Row(name, *size) for name in FAMILIES] for size in SIZES]
    return [*sizes[0], FULL, *itertools.chain.from_iterable(sizes[1:])]


def main(
    bench: Bench,
    *,
    steps: int = 7,
    settle_s: float = SETTLE_S,
    tiny: bool = False,
) -> None:
    """Run the cells that are missing: first everything but the extra columns.

    Args:
        settle_s: at most
        tiny: try the paths on a CPU
    """
    own = {"precision": "fp16", "optimizer": "sgd", "steps": steps}
    cells = bench.cells({**own, "sequence": 1024})
    more, every = (bench.device, steps, settle_s), rows(tiny=tiny)
    for row, name in itertools.product(every, ("keep", "offloaded", "recompute")):
        cells.run(f"{row.name}/{name}", run_cell, row, name, *more)
    for number, row in enumerate(every):
        for name in COLUMNS:
            cells.run(f"{row.name}/{name}", run_cell, row, name, *more)
        if number < len(FAMILIES):
            # Twice: whether the kernels themselves are deterministic.
            cells.run(f"{row.name}/keep again", run_cell, row, "keep", *more)
    cells.revise(summarize)


FAMILIES = ("bert", "gpt", "t5")
