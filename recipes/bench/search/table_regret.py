"""Embedding tables on two GPUs: what the chosen placement loses to the best measured.

    python -m recipes.bench search.table_regret --budget-s 580

Tasks are those of Lin 2023, Table 5.4, scaled to two H100s: 13 tables a GPU times 0.7
to 1.3, half of the tasks heavy, four times the batch. The small DLRM trains them under
every rule's placement and under random ones; rows are drawn by Zipf's law. Beside the
choice: always by index, and the mean of the rules. Two processes start for each task; a
rerun goes on with the next one. On a CPU (gloo): `--device cpu --small`.
"""

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from recipes.bench.harness.cli import Bench
from recipes.bench.harness.processes import answer_of, join_ranks
from recipes.bench.harness.timing import wait
from ssdtrain.tools.foresight.bodies import draw_indices
from ssdtrain.tools.foresight.collectives import load_fabric
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.foresight.dlrm import (
    DENSE_FEATURES,
    Dlrm,
    PlacedTables,
    Samples,
    train_step,
)
from ssdtrain.tools.foresight.reuse import reuse_factors
from ssdtrain.tools.foresight.sharding import (
    EmbeddingTable,
    Lookups,
    Sharding,
    candidates,
    random_sharding,
)
from ssdtrain.tools.foresight.table_plan import table_plan

BATCHES = (2048, 4096, 8192, 16384)
"""Samples of a step, over all ranks."""
MOST_ROWS = 4_000_000
"""Larger tables are cut: drawing them would take most of the time."""
ROUNDS, WARM, STEPS = 9, 3, 8
"""Of each placement: rounds in an order of their own, steps of each."""
LIMIT_S = 180.0
TABLES_A_GPU, WIDTHS, HEAVY_LOOKUPS = 13, (32, 64, 128, 256), 20.0
MEMORY_SHARE, WITHIN = 0.8, 0.1
PRELOAD = (
    "torch.distributed.tensor",
    "ssdtrain.tools.foresight.device",
    "ssdtrain.tools.foresight.dlrm",
)


def tables_of(rng: random.Random, num_ranks: int, heavy: bool) -> list[EmbeddingTable]:
    """One task's tables.

    Rows are log-normal with a median of 1e5 and a long tail to 14 millions, lookups
    log-normal with a median of 3 (of 20 and more where heavy), and the share of
    different rows falls with the lookups of a table and with the skew of its draws.
    """
    number = round(rng.uniform(0.7, 1.3) * num_ranks * TABLES_A_GPU)
    tables = []
    for _ in range(number):
        rows = round(min(1.4e7, max(100.0, rng.lognormvariate(11.5, 2.0))))
        lookups = max(1.0, rng.lognormvariate(1.1, 1.0))
        if heavy:
            lookups += HEAVY_LOOKUPS
        tables.append(
            EmbeddingTable(
                rows=rows,
                width=rng.choice(WIDTHS),
                lookups=lookups,
                distinct_share=rng.betavariate(1.5, 3.0),
            )
        )
    return tables


def task_of(
    number: int, num_ranks: int, small: bool
) -> tuple[list[EmbeddingTable], int]:
    """A task's tables and its batch."""
    rng = random.Random(f"regret/{number}")
    tables = tables_of(rng, num_ranks, heavy=number % 2 == 0)
    batch = rng.choice(BATCHES)
    if small:
        tables, batch = tables[: 3 * num_ranks], 16 * num_ranks
    most = 200 if small else MOST_ROWS
    return [
        replace(t, rows=min(most, t.rows), lookups=float(round(t.lookups)))
        for t in tables
    ], batch


def placements(
    tables: Sequence[EmbeddingTable], num_ranks: int, others: int, room: float
) -> dict[str, Sharding]:
    """Those of all rules, and random ones, that every rank has room for."""
    found = candidates(tables, num_ranks)
    for seed in range(1, others + 1):
        found[f"random {seed}"] = random_sharding(tables, num_ranks, seed)

    def largest(sharding: Sharding) -> float:
        held = [0.0] * num_ranks
        for table, rank in zip(tables, sharding, strict=True):
            held[rank] += 4.0 * table.rows * table.width
        return max(held)

    return {name: each for name, each in found.items() if largest(each) <= room}


def samples_of(
    tables: Sequence[EmbeddingTable], number: int, seed: int, device: torch.device
) -> Samples:
    """One rank's samples; the skew of a table's rows is the same on every rank."""
    torch.manual_seed(seed)
    sparse = []
    for at, table in enumerate(tables):
        skew = random.Random(f"skew/{at}").choice((0.0, 0.7, 1.05, 1.3))
        count = number * int(table.lookups)
        rows = draw_indices(count, table.rows, skew, device)
        sparse.append(rows.view(number, -1))
    dense = torch.randn(number, DENSE_FEATURES, device=device)
    labels = torch.randint(2, (number,), device=device).float()
    return Samples(dense=dense, sparse=sparse, labels=labels)


def whole(rows: Tensor) -> Tensor:
    """The rows of all ranks' samples."""
    found = [torch.empty_like(rows) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, rows)
    return torch.cat(found)


def step_us(model: Dlrm, own: Samples, device: torch.device) -> float:
    """Microseconds of a step: the mean of some in a row, of the slowest rank."""
    for _ in range(WARM):
        train_step(model, own)
    distributed.barrier()
    began = wait(device)
    for _ in range(STEPS):
        train_step(model, own)  # returns a number: the device has ended
    us = torch.tensor((time.perf_counter() - began) / STEPS * 1e6, device=device)
    distributed.all_reduce(us, distributed.ReduceOp.MAX)
    return float(us)


def measured(number: int, others: int, on: str, small: bool) -> dict[str, Any]:
    """One task, on every rank."""
    device = join_ranks(on)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    tables, batch = task_of(number, ranks, small)
    own = samples_of(tables, batch // ranks, rank, device)
    name = torch.cuda.get_device_name(device) if on == "cuda" else ""
    gpu = load_device("h200" if "H200" in name else "h100")
    seen = [
        replace(table, reuse_factors=reuse_factors(whole(rows)))
        for table, rows in zip(tables, own.sparse, strict=True)
    ]
    lookups = Lookups(device=gpu, fabric=load_fabric("nvlink"), batch=batch)
    room = MEMORY_SHARE * gpu.spec.memory_bytes
    found = placements(seen, ranks, others, room)
    times: dict[str, list[float]] = {name: [] for name in found}
    where: dict[str, Any] = {"device": on, "dtype": torch.float32}
    width = sum(table.width for table in tables)
    for turn in range(ROUNDS):
        order = sorted(found)
        random.Random(turn).shuffle(order)  # the same one on every rank
        for name in order:
            plan = table_plan(name, tables, found[name], ranks, on)
            placed = PlacedTables(plan, **where)
            _fill(placed)
            times[name].append(step_us(Dlrm(placed, width, **where), own, device))
            del placed
            if on == "cuda":
                torch.cuda.empty_cache()
    row = summary(
        {name: statistics.median(us) for name, us in times.items()},
        {name: lookups.step_us(seen, each, ranks) for name, each in found.items()},
    )
    heavy = number % 2 == 0
    return {"tables": len(tables), "heavy": heavy, "batch": batch, **row}


def _fill(tables: PlacedTables) -> None:
    with torch.no_grad():
        for weight in tables.parameters():
            local: Tensor = weight.to_local()  # type: ignore[attr-defined]
            local.normal_(std=0.01)


def summary(actual: dict[str, float], predicted: dict[str, float]) -> dict[str, Any]:
    """What was chosen, and what it loses. The choice is among the rules alone."""
    rules = [name for name in actual if not name.startswith("random ")]
    chosen = min(rules, key=predicted.__getitem__)
    best = min(actual, key=actual.__getitem__)
    regrets = {name: actual[name] / actual[best] - 1.0 for name in rules}
    return {
        "chosen": chosen,
        "best": best,
        "regret": regrets[chosen],
        "regret_naive": regrets.get("naive"),
        "regret_of_rules": statistics.fmean(regrets.values()),
        "us": {name: [actual[name], predicted[name]] for name in actual},
    }


def main(
    bench: Bench,
    *,
    tasks: int = 24,
    ranks: int = 2,
    others: int = 12,
    small: bool = False,
) -> int:
    """Measure the tasks; 1 if one failed, or too few are within the bound.

    Args:
        others: random placements beside those of the rules
        small: a few small tables
    """
    started = partial(answer_of, ranks=ranks)
    cells = bench.cells({"ranks": ranks, "others": others, "small": small})
    names = [f"task {number}" for number in range(tasks)]
    for number, name in enumerate(names):
        given = number, others, bench.device.type, small
        cells.run(name, started, measured, given, LIMIT_S, PRELOAD)
    done = [cells[name] for name in names if name in cells]
    good = [row for row in done if "error" not in row]
    within = sum(row["regret"] <= WITHIN for row in good)
    cells.fact("within_10_percent", {"tasks": len(good), "within": within})
    share = within / len(good) if good else math.nan
    print(f"{within} of {len(good)} tasks within 10 %: {100 * share:.0f} %")
    return 0 if len(good) == tasks and (small or share >= 0.85) else 1
