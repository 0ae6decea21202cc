#!/usr/bin/env python
"""The gather against the link: row size x batch x table size.

    python -m recipes.bench gather.sweep --budget-s 200
    python -m recipes.bench gather.sweep --budget-s 20 --small  # its paths, no GPU

Every cell: the path that the chooser takes, each path by force, torch's index_select on
an alias (unsorted zero-copy), a crude sorted probe, and CPU gather + DMA, as shares of
the DMA peak of the same run, timed in rounds; 512 rows are checked in each.
Tables are `memory.empty_table` (managed, up to 48 GiB), then pinned memory of 16 GiB.
Most telling cells first. A rerun goes on; `gather.tables` prints the file.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from pydirect import gather, memory
from pydirect.gather import explain
from recipes.bench.gather.methods import (
    CORES,
    DEVICE,
    Method,
    Rounds,
    StockCpu,
    fill,
    indices,
    shifted_methods,
    sweep_methods,
)
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import link_gb_per_s, wait

GIB = 1 << 30
ROWS = (128, 256, 512, 1024, 2052, 4096, 400, 64, 16384)
ROWS_SHIFTED = tuple(range(2048, 2080, 4))
ROWS_PINNED = (128, 256, 400, 512, 2052, 4096)
BATCHES = (1_000_000, 200_000, 50_000, 10_000, 4_000_000)
TABLES_GIB = (16, 48, 4, 1)
# Of one result. A million rows of 16 KiB are more: 200,000 tell the same.
LARGEST_OUT = 5 * GIB
# Of one cell: four paths, three times each, and a survey.
MOST_TRIALS = 16


class Sweep:
    """One host table of a kind of memory; smaller tables are slices of it."""

    def __init__(self, flat: torch.Tensor, peak: float, unit: int) -> None:
        self.flat = flat
        self.peak = peak
        self.unit = unit
        self.memory = memory.reach(flat).value
        self.stock = StockCpu()

    def rows(self, row_bytes: int, table_gib: int) -> torch.Tensor:
        num = min(self.flat.numel(), table_gib * self.unit) // row_bytes
        return self.flat[: num * row_bytes].view(num, row_bytes)

    def cell(self, row_bytes: int, batch: int, table_gib: int) -> dict[str, Any]:
        """All methods on one combination."""
        table = self.rows(row_bytes, table_gib)
        every = self.memory != "pinned"
        chosen = chosen_path(table, batch)
        methods = sweep_methods(table, self.stock, cpu=every)
        facts: dict[str, Any] = {"row_bytes": row_bytes, "batch": batch}
        facts["distinct_share"] = round(distinct_share(batch, table.shape[0]), 4)
        facts |= {"table_gib": table_gib, "memory": self.memory, "chosen": chosen}
        return facts | self.measure(table, batch, methods)

    def shifted(self, row_bytes: int, batch: int, table_gib: int) -> dict[str, Any]:
        """Figure 4.7."""
        table = self.rows(row_bytes, table_gib)
        methods = shifted_methods(table, self.stock)
        facts = {"row_bytes": row_bytes, "batch": batch, "table_gib": table_gib}
        return facts | self.measure(table, batch, methods)

    def measure(
        self, table: torch.Tensor, batch: int, methods: list[Method]
    ) -> dict[str, Any]:
        """Milliseconds and shares of the DMA peak; a method that fails says why."""
        ms, errors = Rounds(table, batch, methods).run()
        gb = batch * table.shape[1] / 1e6
        shares = {name: round(gb / took / self.peak, 4) for name, took in ms.items()}
        found: dict[str, Any] = {"peak_gb_s": self.peak, "ms": ms, "share": shares}
        return found | ({"errors": errors} if errors else {})


def distinct_share(batch: int, num_rows: int) -> float:
    """Distinct rows over rows of a batch drawn at random: what must cross the link."""
    return -num_rows / batch * math.expm1(-batch / num_rows)


def chosen_path(table: torch.Tensor, batch: int) -> str:
    """The chooser's path, once its trials are over and a survey has arrived."""
    for turn in range(MOST_TRIALS if DEVICE == "cuda" else 1):
        (index,) = indices(batch, table.shape[0], 1)
        before = gather.stats().calls
        gather.index_select(table, index)
        wait()
        if turn >= 2 and DEVICE == "cuda" and explain(table, index).settled:
            break
    after = gather.stats().calls
    return next((p.value for p, n in after.items() if n > before.get(p, 0)), "none")


class Run:
    """The order of the cells, and whether there is time for the next."""

    def __init__(self, cells: Cells, *, small: bool) -> None:
        """The DMA peak is of every run: the cells' shares are of it."""
        self.small = small
        self.unit = (1 << 20) if small else GIB
        self.divide = 1000 if small else 1
        self.cells = cells
        self.peak = round(
            link_gb_per_s((1 << 30) // self.divide, torch.device(DEVICE)), 2
        )
        facts = {"dma_peak_gb_s": self.peak, "cpu_cores": CORES}
        self.cells.run("link", lambda: facts)

    def table(self, kind: str, gib: int) -> Sweep:
        """Allocate and fill."""
        make = memory.empty_table if kind == "table" else memory.empty_pinned
        flat = make((gib * self.unit,), torch.uint8)
        fill(flat)
        return Sweep(flat, self.peak, self.unit)

    def sweep(self, on: Sweep, batches: tuple[int, ...], rows: tuple[int, ...]) -> None:
        """Cells of the sweep on one table, batch by batch."""
        gib = on.flat.numel() // self.unit
        sizes = [size for size in TABLES_GIB if size <= gib]
        for batch, table_gib, row in itertools.product(batches, sizes, rows):
            name = f"{on.memory}/{table_gib}/{batch}/{row}"
            self.cell(name, on.cell, row, batch, table_gib)

    def shifted(self, on: Sweep) -> None:
        """Figure 4.7's rows."""
        for row in ROWS_SHIFTED:
            self.cell(f"shifted/{row}", on.shifted, row, 1_000_000, TABLES_GIB[0])

    def cell(
        self, name: str, work: Callable[..., Any], row: int, batch: int, gib: int
    ) -> None:
        """One, if its output is not too large and it would end inside the budget."""
        num = batch // self.divide
        if row * num <= LARGEST_OUT and self.has_time(row * num):
            self.cells.run(name, work, row, num, gib)

    def has_time(self, num_bytes: int) -> bool:
        """Whether a cell of so many bytes would end inside the budget."""
        return self.cells.left_s() > 1 + num_bytes * 1.2e-9


def main(
    bench: Bench, *, largest_gib: int = 48, pinned_gib: int = 16, small: bool = False
) -> None:
    """Run the cells that are missing.

    Args:
        small: toy sizes, for a CPU
    """
    cells = bench.cells({"small": small, "largest_gib": largest_gib})
    run = Run(cells, small=small)
    # What `empty_table` and `.to("unified")` give, then what `pin` gives: small pages.
    large = run.table("table", largest_gib)
    large.stock.reserve(4 * run.unit)
    run.sweep(large, BATCHES[:1], ROWS[:-1])
    run.shifted(large)
    run.sweep(large, BATCHES[1:], ROWS)
    if run.has_time(10 * GIB):
        run.sweep(run.table("pinned", pinned_gib), BATCHES[:3], ROWS_PINNED)
