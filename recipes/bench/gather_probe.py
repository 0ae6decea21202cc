#!/usr/bin/env python
"""Which layout of the gather's kernels wins, in half a minute of GPU.

    recipes/bench/gather_probe.py --budget-s 30

Words in flight and multiprocessors for rows of 2052, 512, 128 and 4096 bytes, a million
and 50,000 of them, on managed and on pinned memory, as shares of the DMA peak; then
what one call costs the CPU. 512 rows are checked in each cell.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gather_bench import Bench
from gather_harness import (
    DEVICE,
    RESULTS,
    check_rows,
    dma_peak_gbps,
    fill,
    indices,
    once_ms,
    synchronize,
)
from harness import Cells

from pydirect import gather, memory
from pydirect.kernels import gather as kernels
from pydirect.kernels.nvrtc import compile_cubin

GIB = 1 << 30
Options = tuple[str, ...]


def _long_4(rows: int, words: int, *more: str) -> Options:
    return (f"-DROWS_LONG_4={rows}", f"-DWORDS_LONG_4={words}", *more)


def _long(rows: int, words: int) -> Options:
    return ("-DROWS_SHORT=8", "-DWORDS_SHORT=1") + (
        f"-DROWS_LONG={rows}",
        f"-DWORDS_LONG={words}",
    )


def _short(rows: int) -> Options:
    return (f"-DROWS_SHORT={rows}", "-DWORDS_SHORT=1") + (
        "-DROWS_LONG=2",
        "-DWORDS_LONG=4",
    )


VARIANTS: dict[int, dict[str, Options]] = {
    2052: {
        "2 rows, 9 words": (),
        "1 row, 18 words": _long_4(1, 18),
        "4 rows, 5 words": _long_4(4, 5),
        "2 rows, 5 loads of 16 bytes": _long_4(2, 5, "-DWORD_4=u128"),
    },
    512: {"8 rows": (), "4 rows": _short(4)},
    128: {"8 rows": (), "4 rows": _short(4)},
    4096: {"2 rows, 4 words": (), "1 row, 8 words": _long(1, 8)},
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
            label = f"{self.bench.kind}/{row_bytes}/{num}/{name}/{sms} SMs"
            self.cells.run(
                label, functools.partial(self.cell, row_bytes, num, True, work)
            )

    def orders(self, row_bytes: int) -> None:
        """Random order and page order (with the ordering), by multiprocessors."""
        for num, sms in itertools.product(BATCHES, SMS_PINNED):
            for name in ("direct", "bucketed"):
                order = self.direct if name == "direct" else self.bucketed
                work = functools.partial(order, row_bytes, sms, ())
                label = f"{self.bench.kind}/{row_bytes}/{num}/{name}/{sms} SMs"
                self.cells.run(
                    label, functools.partial(self.cell, row_bytes, num, True, work)
                )

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

    def api(self, path: str | None, row_bytes: int, gib: int) -> Callable[..., None]:
        """The product's own call, on the first ``gib`` of the table."""
        part = self.bench.flat[: min(self.bench.flat.numel(), gib * GIB)]
        table = part[: part.numel() // row_bytes * row_bytes].view(-1, row_bytes)

        def work(index: torch.Tensor, out: torch.Tensor) -> None:
            gather.index_select(table, index % table.shape[0], out=out, path=path)

        return work

    def cell(
        self,
        row_bytes: int,
        num: int,
        check: bool,
        work: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> dict[str, Any]:
        """Median of three bursts, a millisecond or more each, on fresh indices."""
        table = self.bench.rows(row_bytes)
        burst = max(1, 100_000_000 // (num * row_bytes))
        sets = indices(num, table.shape[0], min(8, 2 + burst))
        out = torch.full((num, row_bytes), 255, dtype=torch.uint8, device=DEVICE)
        work(sets[0], out)
        synchronize()
        if check:
            check_rows(table, sets[0], out)

        def run() -> None:
            for k in range(burst):
                work(sets[k % len(sets)], out)

        ms = statistics.median(once_ms(run) for _ in range(3)) / burst
        share = num * row_bytes / ms / 1e6 / self.peak
        return {"ms": round(ms, 4), "share": round(share, 4), "burst": burst}


def calls(bench: Bench) -> dict[str, Any]:
    """Microseconds of CPU for one call, by row bytes and batch, GPU work beside it."""
    found: dict[str, Any] = {}
    for num in (64, 10_000):
        table = bench.rows(256)
        alias = memory.device_alias(table.view(torch.float32), 0)
        (index,) = indices(num, table.shape[0], 1)
        out = torch.empty(num, 256, dtype=torch.uint8, device=DEVICE)
        words = out.view(torch.float32)
        for name, call in (
            (
                "direct",
                lambda: gather.index_select(table, index, out=out, path="direct"),
            ),
            (
                "sorted",
                lambda: gather.index_select(table, index, out=out, path="sorted"),
            ),
            ("ours", lambda: gather.index_select(table, index, out=out)),
            ("alias", lambda: torch.index_select(alias, 0, index, out=words)),
        ):
            call()
            synchronize()
            began = time.perf_counter()
            for _ in range(100):
                call()
            issued = time.perf_counter() - began
            synchronize()
            found[f"{name}, {num} rows"] = {
                "issue_us": round(issued * 1e4, 2),
                "done_us": round((time.perf_counter() - began) * 1e4, 2),
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=30.0)
    parser.add_argument("--table-gib", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS / "gather_probe.json")
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
                work = probe.api("sorted", row_bytes, 1)
                label = f"repeats/{row_bytes}"
                cells.run(
                    label,
                    functools.partial(probe.cell, row_bytes, 1_000_000, False, work),
                )
        for row_bytes in VARIANTS:
            probe.orders(row_bytes)


if __name__ == "__main__":
    main()
