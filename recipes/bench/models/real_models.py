"""Stock transformers models as people train them, under every way to save memory.

Qwen3 1.7B, 4B, 8B and Mistral 7B shapes from their configurations and a mixture of
experts (12 layers of 2048, 32 experts, 8 a token), random weights, bf16, sdpa, Liger's
fused linear cross-entropy (and nothing else of Liger) for every column, fused AdamW,
full or LoRA. `gc` is transformers' non-reentrant gradient checkpointing; `gc + trl`
moves its inputs by TRL's OffloadActivations. Each row is a process of its own under a
limit; a rerun goes on. `peak` is the most that forward and backward need above the
level before the step, gradients allocated. With `--share` all GPUs are at work, a model
and way to run it on each; every row has its share of the cores.

    python -m recipes.bench models.real_models --names
    python -m recipes.bench models.real_models --only 'qwen3-4b/full/8k/eager/*'
    python -m recipes.bench models.real_models --rows qwen3-4b:24/full/8k/eager/gc
    python -m recipes.bench models.real_models --only '*/512/*'    # the host's time
    python -m recipes.bench models.real_models --only '*limit=*' '*/gc'  # does it fit?
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.harness.processes import Gpus, answer_of, visible_gpus
from recipes.bench.models.real_catalogue import (
    HOST_TOKENS,
    RELATIVE,
    Row,
    catalogue,
    relative_of,
    row_of,
)
from recipes.bench.models.real_row import Run, measure


@dataclass(frozen=True)
class Part:
    """What of the host a row has to itself."""

    gpus: tuple[str, ...] = ()
    """As `CUDA_VISIBLE_DEVICES` names them; none: all that there are."""
    cores: tuple[int, ...] = ()
    """None: all that this process may use."""


def parts_of(gpus: Sequence[str], cores: Sequence[int]) -> dict[str, Part]:
    """One GPU and as many neighbouring cores for each of them, by GPU."""
    share = max(1, len(cores) // len(gpus))
    return {
        gpu: Part((gpu,), tuple(cores[at * share : (at + 1) * share]))
        for at, gpu in enumerate(gpus)
    }


ALL = Part()


def in_process(row: Row, run: Run, limit_s: float, part: Part = ALL) -> dict[str, Any]:
    """Measure a row in fresh processes, one a rank; what goes wrong as `error`."""
    ranks = row.mode.num_ranks
    places = {"ranks": ranks, "gpus": part.gpus, "cores": part.cores}
    return answer_of(measure, (row, run), limit_s, PRELOAD, **places)


def given_bytes(row: Row, cells: dict[str, Any]) -> dict[str, int]:
    """The relative settings of a row in bytes, by field of `Run`.

    Raises:
        LookupError: the row that one is relative to has no figure; says which.
    """
    given: dict[str, int] = {}
    for name, (times, column) in relative_of(row.column).items():
        other = cells.get(f"{row.cell}/{column}", {})
        if RELATIVE[name] not in other:
            raise LookupError(f"{row.name} needs the row {row.cell}/{column}")
        given[f"{name}_bytes"] = int(times * other[RELATIVE[name]] * 1e9)
    return given


def started(
    row: Row, run: Run, given: dict[str, int], limit_s: float, part: Part = ALL
) -> dict[str, Any]:
    """Measure a row under what it was given."""
    return {**given, **in_process(row, replace(run, **given), limit_s, part)}


def over_baseline(cells: dict[str, Any]) -> None:
    """Add what a row costs and saves over `keep` of its cell, where that was run: by
    the middle of its steps, or by all of them where their lengths differ. One step of a
    few that was disturbed is no reason to call all others fast."""
    for name, cell in cells.items():
        row = row_of(name)
        plain = cells.get(row.baseline, {})
        if "step_ms" not in cell or "step_ms" not in plain:
            continue
        cell["step_ratio"] = cell["step_ms"] / plain["step_ms"]
        if len(set(cell.get("tokens", ()))) > 1:
            cell["step_ratio"] = plain["tokens_per_s"] / cell["tokens_per_s"]
        if plain["peak_gb"]:
            cell["peak_gone"] = 1 - cell["peak_gb"] / plain["peak_gb"]
        if "host_ms" not in cell or "host_ms" not in plain:
            continue
        cell["host_ratio"] = cell["host_ms"] / plain["host_ms"]
        if row.is_ours and "num_saved" in plain:
            excess_us = (cell["host_ms"] - plain["host_ms"]) * 1e3
            cell["host_us_per_saved"] = excess_us / sum(plain["num_saved"].values())


def by_cell(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that are relative to one another, in their order; those of most ranks first,
    as they wait for several GPUs."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.cell, []).append(row)
    return sorted(groups.values(), key=lambda group: -group[0].mode.num_ranks)


def run_rows(
    rows: Sequence[Row], run: Run, limit_s: float, cells: Cells, part: Part = ALL
) -> None:
    """Run those that are missing, one after another."""
    for row in rows:
        try:
            given = given_bytes(row, cells.data["cells"])
        except LookupError as missing:
            print(missing, flush=True)
            continue
        most_s = min(limit_s, cells.left_s())
        cells.run(row.name, started, row, run, given, most_s, part)
        cells.revise(over_baseline)


def run_shared(
    rows: Sequence[Row], run: Run, limit_s: float, cells: Cells, gpus: Sequence[str]
) -> None:
    """Run those that are missing, on all GPUs of the host.

    Raises:
        ValueError: a row has more ranks than there are GPUs.
    """
    parts = parts_of(gpus, sorted(os.sched_getaffinity(0)))
    shared = Gpus(gpus)

    def one(group: list[Row]) -> None:
        with shared.lent(group[0].mode.num_ranks) as taken:
            cores = [core for gpu in taken for core in parts[gpu].cores]
            run_rows(group, run, limit_s, cells, Part(tuple(taken), tuple(cores)))

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(one, by_cell(rows)))


def main(
    bench: Bench,
    *,
    names: bool = False,
    rows: tuple[str, ...] = (),
    limit_s: float = 90,
    steps: int = 5,
    host_steps: int = 5,
    warm_up_s: float = math.inf,
    share: bool = False,
    save: Path | None = None,
    lengths: Path | None = None,
) -> None:
    """Run the rows that are missing, of the catalogue those that `--only` names.

    Args:
        names: print the rows, run none
        rows: by name, any
        limit_s: for one row
        steps: timed ones of a row
        host_steps: 0: no host times
        warm_up_s: then steps are timed, settled or not
        share: rows of several models at a time, on all GPUs
        save: folder for the profiles and plans of ours (`ssdtrain plan --profile`)
        lengths: documents of the rows `text`
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
    run = Run(
        *(steps, host_steps, lengths, device),
        warm_up_s=warm_up_s,
        save=save,
    )
    cells = bench.cells({"device": device, "host_tokens": HOST_TOKENS})
    if share:
        gpus = visible_gpus() if device == "cuda" else ["0", "1"]
        run_shared(chosen, run, limit_s, cells, gpus)
    else:
        run_rows(chosen, run, limit_s, cells)


PRELOAD = (
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.mistral.modeling_mistral",
    "recipes.bench.models.real_row",
)
"""Imported once, in the process that every row is forked from. None is ssdtrain, and
none may touch CUDA (Liger does), which does not survive a fork."""
