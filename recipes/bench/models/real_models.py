"""Stock transformers models as people train them, under every way to save memory.

Qwen3 1.7B, 4B, 8B and Mistral 7B shapes from their configurations and a mixture of
experts (12 layers of 2048, 32 experts, 8 a token), random weights, bf16, sdpa, Liger's
fused linear cross-entropy (and nothing else of Liger) for every column, fused AdamW,
full or LoRA. `gc` is transformers' non-reentrant gradient checkpointing; `gc + trl`
moves its inputs by TRL's OffloadActivations. Each row is a process of its own under a
limit; a rerun goes on. `peak` is the most that forward and backward need above the
level before the step, gradients allocated.
    python -m recipes.bench models.real_models --names
    python -m recipes.bench models.real_models --only 'qwen3-4b/full/8k/eager/*'
    python -m recipes.bench models.real_models --rows qwen3-4b:24/full/8k/eager/gc
"""

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.harness.processes import answer_of
from recipes.bench.models.real_catalogue import (
    Row,
    budget_of,
    catalogue,
    row_of,
)
from recipes.bench.models.real_row import Run, measure


def in_process(row: Row, run: Run, limit_s: float) -> dict[str, Any]:
    """Measure a row in fresh processes, one a rank; what goes wrong as `error`."""
    ranks = row.mode.num_ranks
    return answer_of(measure, (row, run), limit_s, PRELOAD, ranks=ranks)


def budget_bytes(row: Row, cells: dict[str, Any]) -> int | None:
    """The row's relative budget in bytes; None: it has none.

    Raises:
        LookupError: the row that it is relative to has no figure; says which.
    """
    if (budget := budget_of(row.column)) is None:
        return None
    times, column = budget
    other = cells.get(f"{row.cell}/{column}", {})
    if "peak_gb" not in other:
        raise LookupError(f"{row.name} needs the row {row.cell}/{column}")
    return int(times * other["peak_gb"] * 1e9)


def over_baseline(cells: dict[str, Any]) -> None:
    """Add what a row costs and saves over `keep` of its cell, where that was run."""
    for name, cell in cells.items():
        row = row_of(name)
        plain = cells.get(row.baseline, {})
        if "step_ms" not in cell or "step_ms" not in plain:
            continue
        cell["step_ratio"] = cell["step_ms"] / plain["step_ms"]
        if plain["peak_gb"]:
            cell["peak_gone"] = 1 - cell["peak_gb"] / plain["peak_gb"]


def main(
    bench: Bench,
    *,
    names: bool = False,
    rows: tuple[str, ...] = (),
    limit_s: float = 90,
    steps: int = 5,
    warm_up_s: float = math.inf,
) -> None:
    """Run the rows that are missing, of the catalogue those that `--only` names.

    Args:
        names: print the rows, run none
        rows: by name, any
        limit_s: for one row
        steps: timed ones of a row
        warm_up_s: then steps are timed, settled or not
    """
    try:
        chosen = [row_of(name) for name in rows]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if bench.only or not rows:
        wanted = bench.only or ("*",)
        chosen += [
            row
            for row in catalogue()
            if any(fnmatchcase(row.name, pattern) for pattern in wanted)
        ]
    bench.only = ()
    if names:
        print(*(row.name for row in chosen), sep="\n")
        return
    device = bench.device.type
    run = Run(steps, device, warm_up_s=warm_up_s)
    cells = bench.cells({"device": device})
    for row in chosen:
        try:
            budget = budget_bytes(row, cells.data["cells"])
        except LookupError as missing:
            print(missing, flush=True)
            continue
        own = replace(run, budget_bytes=budget)
        cells.run(row.name, in_process, row, own, min(limit_s, cells.left_s()))
        cells.revise(over_baseline)


PRELOAD = (
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.mistral.modeling_mistral",
    "recipes.bench.models.real_row",
)
"""Imported once, in the process that every row is forked from. None is ssdtrain, and
none may touch CUDA (Liger does), which does not survive a fork."""
