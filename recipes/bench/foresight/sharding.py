"""Embedding tables over ranks: what choosing by prediction loses to the best rule.

    python -m recipes.bench foresight.sharding --tasks 400

Tasks are drawn with the statistics of the published production sets (Lin 2023, 5.6, and
Meta's dlrm_datasets of 2021 and 2022): 13 tables a GPU times 0.7 to 1.3, heavy tasks of
tables with 20 or more lookups a sample, batches of 512 to 4096, rows drawn by Zipf's
law, at most 80 % of the memory. Machines differ from what the predictor believes: each
table costs by another law of cache and launch, and every time is off at random. Beside
the choice: always one rule, and a rule at random. Pure Python, nothing is measured.
"""

import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.bench.harness.cells import environment
from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight.collectives import Fabric, load_fabric
from ssdtrain.tools.foresight.device import Device, load_device
from ssdtrain.tools.foresight.sharding import Lookups, Table, candidates

TABLES_A_GPU = 13
GPUS = (2, 4, 8)
BATCHES = (512, 1024, 2048, 4096)
WIDTHS = (32, 64, 128, 256)
HEAVY_LOOKUPS = 20.0
WITHIN = 0.1
MEMORY_SHARE = 0.8
NOISES = (0.04, 0.08, 0.16)
"""Standard deviations of a table's time around its law."""


def tables_of(rng: random.Random, num_ranks: int, heavy: bool) -> list[Table]:
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
            Table(
                rows=rows,
                width=rng.choice(WIDTHS),
                lookups=lookups,
                distinct_share=rng.betavariate(1.5, 3.0),
            )
        )
    return tables


@dataclass(frozen=True, kw_only=True)
class Machine(Lookups):
    """A machine with a law of its own: what it really takes."""

    seed: int
    noise: float
    """Standard deviation of a table's time around the law."""

    def table_us(self, table: Table, variant: str) -> float:
        """The predictor's time, dearer where rows miss the cache, plus a launch."""
        rng = random.Random(f"{self.seed}/{table}/{variant}")
        touched = min(table.rows, self.batch * table.lookups * table.distinct_share)
        is_cold = 4 * touched * table.width > 0.5 * self.device.spec.l2_bytes
        factor = max(0.3, rng.gauss(1.0, self.noise)) * (1.2 if is_cold else 0.9)
        return 4.0 + factor * super().table_us(table, variant)


def task(
    number: int, noise: float, device: Device, fabric: Fabric
) -> dict[str, Any] | None:
    """Regrets of one task; None where its tables do not fit."""
    rng = random.Random(f"task/{number}")
    num_ranks, heavy = rng.choice(GPUS), number % 2 == 0
    tables = tables_of(rng, num_ranks, heavy)
    room = MEMORY_SHARE * num_ranks * device.spec.memory_bytes
    if sum(4.0 * t.rows * t.width for t in tables) > room:
        return None
    known: dict[str, Any] = {
        "device": device,
        "fabric": fabric,
        "batch": rng.choice(BATCHES),
        "dense_us": rng.uniform(300.0, 3000.0),
    }
    found = candidates(tables, num_ranks, seed=number)
    machine = Machine(seed=number, noise=noise, **known)
    actual = {n: machine.step_us(tables, s, num_ranks) for n, s in found.items()}
    best = min(actual.values())
    chosen, _, predicted = Lookups(**known).choose(tables, num_ranks, seed=number)
    regrets = {name: us / best - 1.0 for name, us in actual.items()}
    return {
        "heavy": heavy,
        "ranks": num_ranks,
        "tables": len(tables),
        "chosen": chosen,
        "regret": regrets[chosen],
        "always": regrets,
        "any": rng.choice(sorted(regrets.values())),
        "error": abs(predicted / actual[chosen] - 1.0),
    }


def summary(regrets: list[float]) -> dict[str, float]:
    """How many are within the bound, and how large they are."""
    return {
        "within_10_percent": sum(r < WITHIN for r in regrets) / len(regrets),
        "mean": statistics.fmean(regrets),
        "worst": max(regrets),
    }


def main(
    *,
    tasks: int = 400,
    device: str = "h100",
    fabric: str = "nvlink",
    out: Path = Path("sharding.json"),
) -> None:
    """Draw the tasks and choose."""
    gpu, curves = load_device(device), load_fabric(fabric)
    found: dict[str, Any] = {"environment": environment(), "by_noise": {}}
    for noise in NOISES:
        drawn = [task(number, noise, gpu, curves) for number in range(tasks)]
        rows = [row for row in drawn if row is not None]
        picks = {
            "chosen": [row["regret"] for row in rows],
            "any_rule": [row["any"] for row in rows],
        }
        for name in rows[0]["always"]:
            picks[f"always {name}"] = [row["always"][name] for row in rows]
        found["by_noise"][str(noise)] = {
            "tasks": len(rows),
            "prediction_error": statistics.fmean(row["error"] for row in rows),
            "regret": {name: summary(values) for name, values in picks.items()},
        }
        print(noise, json.dumps(found["by_noise"][str(noise)], indent=1))
    path = RESULTS / "foresight" / out
    path.write_text(json.dumps(found, indent=1) + "\n")
