#!/usr/bin/env python
"""Which layout of the gather's kernels wins, in half a minute of GPU.

    python -m recipes.bench.gather.probe --budget-s 30

Words in flight and multiprocessors for rows of 2052, 512, 128 and 4096 bytes, a million
and 50,000 of them, on managed and on pinned memory, as shares of the DMA peak; then
what one call costs the CPU. 512 rows are checked in each cell.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pydirect import gather, memory
from pydirect.kernels import gather as kernels
from pydirect.kernels.nvrtc import compile_cubin
from recipes.bench.common.cells import Cells, arguments
from recipes.bench.gather.allocations import Bench
from recipes.bench.gather.timing import (
    DEVICE,
    check_rows,
    dma_peak_gbps,
    fill,
    indices,
    once_ms,
    synchronize,
)

GIB = 1 << 30
Options = tuple[str, ...]
Work = Callable[[torch.Tensor, torch.Tensor], None]


def _options(short: int, long: tuple[int, int]) -> Options:
    """Rows in flight of short rows; rows and words in flight of long ones."""
    return (
        f"-DROWS_SHORT={short}",
        "-DWORDS_SHORT=1",
        f"-DROWS_LONG={long[0]}",
        f"-DWORDS_LONG={long[1]}",
    )


def _options_4(rows: int, words: int, *more: str) -> Options:
    """The same for long rows at multiples of 4 bytes."""
    return (f"-DROWS_LONG_4={rows}", f"-DWORDS_LONG_4={words}", *more)


VARIANTS: dict[int, dict[str, Options]] = {
    2052: {
        "2 rows, 9 words": (),
        "1 row, 18 words": _options_4(1, 18),
        "4 rows, 5 words": _options_4(4, 5),
        "2 rows, 5 loads of 16 bytes": _options_4(2, 5, "-DWORD_4=u128"),
    },
    512: {"8 rows": (), "4 rows": _options(4, (2, 4))},
    128: {"8 rows": (), "4 rows": _options(4, (2, 4))},
    4096: {"2 rows, 4 words": (), "1 row, 8 words": _options(8, (1, 8))},
}
BATCHES = (1_000_000, 50_000)
SMS = (8, 16, 32, 64)
SMS_PINNED = (8, 16, 32)


class Probe:
    """Cells over one table."""

    def __init__(self, cells: Cells, bench: Bench, peak: float) -> None:
        self.cells = cells
        self.bench = bench
        self.peak = peak

    def variants(self, row_bytes: int) -> None:
        """Random order: every variant by multiprocessors and batch."""
        chosen = itertools.product(BATCHES, VARIANTS[row_bytes].items(), SMS)
        for num, (name, options), sms in chosen:
            work = functools.partial(self.direct, row_bytes, sms, options)
            self.run(f"{row_bytes}/{num}/{name}/{sms} SMs", row_bytes, num, work)

    def orders(self, row_bytes: int) -> None:
        """Random order and page order (with the ordering), by multiprocessors."""
        orders = {"direct": self.direct, "bucketed": self.bucketed}
        chosen = itertools.product(BATCHES, SMS_PINNED, orders.items())
        for num, sms, (name, order) in chosen:
            work = functools.partial(order, row_bytes, sms, ())
            self.run(f"{row_bytes}/{num}/{name}/{sms} SMs", row_bytes, num, work)

    def run(self, name: str, row_bytes: int, num: int, work: Work) -> None:
        """One cell."""
        table = self.bench.rows(row_bytes)
        cell = functools.partial(self.cell, table, num, work)
        self.cells.run(f"{self.bench.kind}/{name}", cell)

    def repeats(self, row_bytes: int) -> None:
        """A million rows of 1 GiB by the product's own sorted path: many repeat."""
        table = self.bench.rows(row_bytes)[: GIB // row_bytes]

        def work(index: torch.Tensor, out: torch.Tensor) -> None:
            gather.index_select(table, index, out=out, path="sorted")

        cell = functools.partial(self.cell, table, BATCHES[0], work)
        self.cells.run(f"repeats/{row_bytes}", cell)

    def direct(
        self,
        row_bytes: int,
        sms: int,
        options: Options,
        index: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Our kernel in the order of the index."""
        table = self.bench.rows(row_bytes)
        shape = kernels.Shape(num_blocks=sms)
        self.bench.gather(table, (index, None), out, shape, options)

    def bucketed(
        self,
        row_bytes: int,
        sms: int,
        options: Options,
        index: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Our kernel in page order, ordering included."""
        table = self.bench.rows(row_bytes)
        shape = kernels.Shape(num_blocks=sms, share=kernels.Share.CONTIGUOUS)
        order = self.bench.bucketed(table, index, 16)
        self.bench.gather(table, order, out, shape, options)

    def cell(self, table: torch.Tensor, num: int, work: Work) -> dict[str, Any]:
        """Median of bursts, 2 ms or more each, on fresh indices; the call before them
        lets a survey arrive."""
        row_bytes = table.shape[1]
        burst = max(1, 100_000_000 // (num * row_bytes))
        sets = indices(num, table.shape[0], min(8, 2 + burst))
        out = torch.full((num, row_bytes), 255, dtype=torch.uint8, device=DEVICE)
        work(sets[0], out)
        synchronize()
        check_rows(table, sets[0], out)

        def run() -> None:
            for k in range(burst):
                work(sets[k % len(sets)], out)

        bursts = 3 if burst > 1 else 2
        ms = statistics.median(once_ms(run) for _ in range(bursts)) / burst
        share = num * row_bytes / ms / 1e6 / self.peak
        return {"ms": round(ms, 4), "share": round(share, 4), "burst": burst}


def calls(bench: Bench) -> dict[str, Any]:
    """Microseconds of a call: until it returns, and until its work is done."""
    found: dict[str, Any] = {}
    table = bench.rows(256)
    alias = memory.device_alias(table.view(torch.float32), 0)
    for num in (64, 10_000):
        (index,) = indices(num, table.shape[0], 1)
        out = torch.empty(num, 256, dtype=torch.uint8, device=DEVICE)
        ours = functools.partial(gather.index_select, table, index, out=out)
        words = out.view(torch.float32)
        stock = functools.partial(torch.index_select, alias, 0, index, out=words)
        ways = {"direct": functools.partial(ours, path="direct"), "ours": ours}
        ways |= {"sorted": functools.partial(ours, path="sorted"), "alias": stock}
        for name, call in ways.items():
            call()
            synchronize()
            began = time.perf_counter()
            for _ in range(100):
                call()
            issued = time.perf_counter() - began
            synchronize()
            done = time.perf_counter() - began
            found[f"{name}, {num} rows"] = {
                "issue_us": round(issued * 1e4, 2),
                "done_us": round(done * 1e4, 2),
            }
    return found


def compile_all() -> dict[str, Any]:
    """Every variant at once: the compiler leaves the interpreter free."""
    major, minor = torch.cuda.get_device_capability(0)
    source = Path(kernels.__file__).with_name("gather.cu")
    every = {options for found in VARIANTS.values() for options in found.values()}
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        sizes = pool.map(
            lambda options: len(compile_cubin(source, f"sm_{major}{minor}", options)),
            sorted(every),
        )
        return {"cubins": list(sizes), "s": round(time.monotonic() - began, 2)}


def main() -> None:
    parser = arguments(__doc__, 30.0, "gather/gather_probe")
    parser.add_argument("--table-gib", type=int, default=8)
    given = parser.parse_args()
    gib = given.table_gib
    cells = Cells(given.out, given.budget_s, {"table_gib": gib})
    peak = round(dma_peak_gbps(), 2)
    cells.run("link", lambda: {"dma_peak_gb_s": peak})
    cells.run("compile", compile_all)
    made = {"managed": memory.empty_table, "pinned": memory.empty_pinned}
    for kind, make in made.items():
        flat = make((gib * GIB,), torch.uint8)
        fill(flat)
        bench = Bench(None, flat, memory.reach(flat).value)
        probe = Probe(cells, bench, peak)
        if kind == "managed":
            cells.run("calls", functools.partial(calls, bench))
            for row_bytes in VARIANTS:
                probe.variants(row_bytes)
            for row_bytes in (512, 4096):
                probe.repeats(row_bytes)
        for row_bytes in (2052, 512) if kind == "managed" else VARIANTS:
            probe.orders(row_bytes)


if __name__ == "__main__":
    main()
