#!/usr/bin/env python
"""One call of the gather, waited for, as a user makes it: ``unified_table[index]``.

    python -m recipes.bench gather.one_call --budget-s 60

Each cell, over `pydirect.unify(x)` (the user's pages) and ``x.to("unified")`` (large
pages): wall time of one call and one wait, of a call in a burst, what the host takes
to issue it, the path that was chosen, and the time of each path by force. Shares are of
the DMA peak of the same run; *regret* is the chosen path's time over the best path's.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import pydirect
from pydirect import gather, memory
from recipes.bench.gather.timing import DEVICE, dma_peak_gbps
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait

GIB = 1 << 30
CELLS = (
    (128, 1_000_000),
    (400, 300_000),
    (512, 1_000_000),
    (3072, 100_000),
    (4096, 250_000),
    (256, 1_000_000),
    (1024, 300_000),
    (2052, 200_000),
    (128, 200_000),
    (512, 100_000),
    (400, 50_000),
    (64, 1_000_000),
)
"""Bytes of a row, rows of a call; the first five are the ones that others clocked."""
SETTLING, CALLS, BURST = 24, 21, 8
FORCED = (gather.Path.DIRECT, gather.Path.SORTED, gather.Path.CPU)
Call = Callable[[int], torch.Tensor]


def waited_ms(call: Call, repeats: int) -> tuple[float, float]:
    """Median milliseconds of a call and its wait, and of issuing it."""
    took, issued = [], []
    for turn in range(repeats):
        began = wait()
        call(turn)
        middle = time.perf_counter()
        took.append((wait() - began) * 1e3)
        issued.append((middle - began) * 1e3)
    return statistics.median(took), statistics.median(issued)


def burst_ms(call: Call) -> float:
    """Median milliseconds of a call among `BURST` that are waited for together."""
    took = []
    for _ in range(3):
        began = wait()
        for turn in range(BURST):
            call(turn)
        took.append((wait() - began) * 1e3 / BURST)
    return statistics.median(took)


class Table:
    """One host table as a user's unified tensor and as what the gather is given."""

    def __init__(self, name: str, flat: torch.Tensor, peak: float) -> None:
        """``flat``: uint8, shape (num_bytes,), host memory."""
        self.name = name
        self._host = memory.pin(flat)
        self._unified = pydirect.unify(flat)
        self._peak = peak

    def cell(self, row_bytes: int, num: int) -> dict[str, Any]:
        """One row size and batch."""
        num_rows = self._host.numel() // row_bytes
        shape = (num_rows, row_bytes)
        host = self._host[: num_rows * row_bytes].view(shape)
        table = self._unified[: num_rows * row_bytes].view(shape)
        sets = [torch.randint(0, num_rows, (num,), device=DEVICE) for _ in range(4)]

        def call(turn: int) -> torch.Tensor:
            return table[sets[turn % 4]]

        def share(ms: float) -> float:
            return round(num * row_bytes / ms / 1e6 / self._peak, 3)

        for turn in range(SETTLING):
            call(turn)
            wait()
        ms, issued = waited_ms(call, CALLS)
        among = burst_ms(call)
        told = pydirect.explain(host, sets[0])
        if not torch.equal(call(0)[:512].cpu(), host[sets[0][:512].cpu()]):
            raise RuntimeError(f"wrong rows: {row_bytes} bytes, {num} rows")
        forced = {
            path.value: round(self._forced(host, sets, path), 4) for path in FORCED
        }
        best = min(forced.values())
        return {
            "ms": round(ms, 4),
            "share": share(ms),
            "burst_ms": round(among, 4),
            "burst_share": share(among),
            "issue_ms": round(issued, 4),
            "path": told.path.value,
            "measured": told.settled,
            "forced_ms": forced,
            "regret": round(forced.get(told.path.value, best) / best, 3),
        }

    def _forced(
        self, host: torch.Tensor, sets: list[torch.Tensor], path: gather.Path
    ) -> float:
        def call(turn: int) -> torch.Tensor:
            return gather.index_select(host, sets[turn % 4], path=path)

        call(0)
        return waited_ms(call, 9 if path is not gather.Path.CPU else 4)[0]


def main(bench: Bench, *, table_bytes: int = 15 * GIB // 2, divide: int = 1) -> None:
    """Run it.

    Args:
        divide: rows of a call by this
    """
    pydirect.enable()
    cells = bench.cells({"table_bytes": table_bytes})
    peak = round(dma_peak_gbps(min(GIB, table_bytes)), 2)
    cells.run("link", lambda: {"dma_peak_gb_s": peak})
    flat = torch.empty(table_bytes, dtype=torch.uint8)
    flat.view(torch.int64).copy_(torch.arange(table_bytes // 8))
    # Not `.to` of a tensor twice: both tables would be there three times.
    tables = [Table("unify", flat, peak), Table("to", memory.to_table(flat), peak)]
    for row_bytes, num in CELLS:
        for table in tables:
            name = f"{table.name}/{row_bytes}/{num}"
            run = functools.partial(table.cell, row_bytes, num // divide)
            cells.run(name, run)
