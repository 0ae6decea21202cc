"""The gather against the link: row size x batch x table size.

    python recipes/bench/gather.py --budget-s 240

Every cell: the path that the chooser takes, each path by force, torch's index_select on
an alias (unsorted zero-copy) and CPU gather + DMA with all cores and with 4, as shares
of the DMA peak of the same run. Rows are checked in each. Most telling cells first.
Writes results/gather.json; `gather_table.py` prints it.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable

import torch
from gather_harness import Results, check_rows, dma_peak_gbps, fill, indices, time_ms

from pydirect import gather, memory
from pydirect.gather.front import front_of
from pydirect.gather.request import as_request

GIB = 1 << 30
ROWS = (64, 128, 256, 400, 512, 1024, 2052, 4096, 16384)
ROWS_PINNED = (64, 128, 256, 512, 2052, 4096)
BATCHES = (1_000_000, 200_000, 50_000, 4_000_000, 10_000)
TABLES_GIB = (16, 48, 4, 1)
LARGEST_OUT = 9 * GIB
CORES = os.cpu_count() or 1


class Sweep:
    """One host table of a kind of memory; smaller tables are slices of it."""

    def __init__(self, results: Results, flat: torch.Tensor, peak: float) -> None:
        self.results = results
        self.flat = flat
        self.peak = peak
        self.memory = memory.reach(flat).value

    def rows(self, row_bytes: int, table_gib: int) -> torch.Tensor:
        num = min(self.flat.numel(), table_gib * GIB) // row_bytes
        return self.flat[: num * row_bytes].view(num, row_bytes)

    def cell(self, row_bytes: int, batch: int, table_gib: int) -> None:
        """All methods on one combination; slow methods repeat less."""
        if row_bytes * batch > LARGEST_OUT:
            return
        table = self.rows(row_bytes, table_gib)
        sets = indices(batch, table.shape[0], 4)
        facts = {"row_bytes": row_bytes, "batch": batch, "table_gib": table_gib}
        facts["memory"] = self.memory
        choice = self.choice(table, sets[0])
        for method, work, repeats in self.methods(table):
            out = torch.full((batch, row_bytes), 255, dtype=torch.uint8, device="cuda")
            threads = 4 if method.endswith("4") else CORES
            torch.set_num_threads(threads)
            used: list[torch.Tensor] = []

            def once(k: int, work=work, out=out, used=used) -> None:
                used.append(sets[k % 4])
                work(used[-1], out)

            took = time_ms(once, repeats)
            check_rows(table, used[-1], out)
            gbps = batch * row_bytes / took / 1e6
            self.results.add(
                **facts, method=method, ms=took, gbps=gbps, share=gbps / self.peak
            )
        torch.set_num_threads(CORES)
        self.results.add(**facts, chosen=choice)

    def methods(self, table: torch.Tensor) -> list[tuple[str, Callable, int]]:
        def forced(path: gather.Path | None) -> Callable:
            def work(index: torch.Tensor, out: torch.Tensor) -> None:
                gather.index_select(table, index, out=out, path=path)

            return work

        found = [
            ("ours", forced(None), 5),
            ("direct", forced(gather.Path.DIRECT), 5),
            ("sorted", forced(gather.Path.SORTED), 5),
            ("cpu", forced(gather.Path.CPU), 3),
            ("index_select on alias", stock_alias(table), 2),
        ]
        if self.memory == "managed":  # the CPU's side is the same on both
            found += [
                ("stock cpu", stock_cpu(table), 2),
                ("ours 4", forced(None), 3),
                ("stock cpu 4", stock_cpu(table), 1),
            ]
        return found

    def choice(self, table: torch.Tensor, index: torch.Tensor) -> str:
        """Calibrates the size class if it is new; then the chooser's path."""
        gather.index_select(table, index[:64])
        before = gather.stats().calls
        gather.index_select(table, index)
        after = gather.stats().calls
        return next(p.value for p, n in after.items() if n > before.get(p, 0))


def stock_alias(table: torch.Tensor) -> Callable:
    """PyTorch's own kernel on the host memory: unsorted zero-copy."""
    alias = memory.device_alias(table.view(torch.float32), 0)

    def work(index: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(alias, 0, index, out=out.view(torch.float32))

    return work


def stock_cpu(table: torch.Tensor) -> Callable:
    """What a training script does today: CPU index_select into a pinned buffer that is
    kept between calls, then one copy. (Our CPU path does the same in pieces.)"""
    word = torch.float32 if table.shape[1] % 4 == 0 else torch.uint8
    buffers: dict[int, torch.Tensor] = {}

    def work(index: torch.Tensor, out: torch.Tensor) -> None:
        num = index.numel()
        if num not in buffers:
            buffers.clear()
            staged = memory.empty_pinned((num, table.shape[1]), torch.uint8)
            buffers[num] = staged.view(word)
        torch.index_select(table.view(word), 0, index.cpu(), out=buffers[num])
        out.view(word).copy_(buffers[num], non_blocking=True)

    return work


def misaligned(sweep: Sweep) -> None:
    """Figure 4.7: rows of 2048 to 2076 bytes by 4, aligned starts on and off."""
    from pydirect.kernels import gather as kernels

    engine = front_of(torch.device("cuda", 0)).engine
    for row_bytes in range(2048, 2080, 4):
        table = sweep.rows(row_bytes, 4)
        sets = indices(1_000_000, table.shape[0], 3)
        out = torch.empty(1_000_000, row_bytes, dtype=torch.uint8, device="cuda")
        works = {"stock cpu": stock_cpu(table), "alias": stock_alias(table)}
        works["ours"] = lambda i, o, t=table: gather.index_select(t, i, out=o)
        for start in kernels.Start:

            def direct(i, o, t=table, start=start) -> None:
                request = as_request(t, i, o)
                engine.direct(request, engine.tuning.direct_sms, start)

            works[f"direct, start at {start.name.lower()}"] = direct
        for method, work in works.items():
            took = time_ms(lambda k, w=work, o=out, s=sets: w(s[k % 3], o), 3)
            check_rows(table, sets[0], (work(sets[0], out), out)[1])
            gbps = out.numel() / took / 1e6
            sweep.results.add(
                figure="4.7", row_bytes=row_bytes, method=method, gbps=gbps,
                share=gbps / sweep.peak,
            )  # fmt: skip


def repeats_and_runs(sweep: Sweep) -> None:
    """Indices that repeat (power law) and that run on (slices)."""
    table = sweep.rows(512, 16)
    num = 1_000_000
    uniform = torch.rand(num, device="cuda").clamp_min(1e-7)
    hot = ((uniform**-2.0).clamp_max(1e12).long() * 7919) % table.shape[0]
    starts = torch.randint(0, table.shape[0] - 20_000, (50, 1), device="cuda")
    slices = (starts + torch.arange(20_000, device="cuda")).flatten()
    out = torch.empty(num, 512, dtype=torch.uint8, device="cuda")
    for name, index in (("power law", hot), ("slices", slices)):
        distinct = index.unique().numel() / num
        for path in (None, *gather.Path):
            if path is gather.Path.DMA and name != "slices":
                continue  # a copy for each row: seconds

            def work(_: int, path=path, index=index) -> None:
                gather.index_select(table, index, out=out, path=path)

            for _ in range(17):  # a survey has to arrive
                gather.index_select(table, index, out=out)
            took = time_ms(work, 3)
            check_rows(table, index, out)
            sweep.results.add(
                indices=name,
                memory=sweep.memory,
                distinct=distinct,
                path=str(path and path.value),
                ms=took,
            )


def budget(sweep: Sweep) -> None:
    """Gather beside matrix products: what each costs the other, by SM budget."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    table = sweep.rows(512, 16)
    sets = indices(1_000_000, table.shape[0], 4)
    out = torch.empty(1_000_000, 512, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()

    def products(_: int = 0) -> None:
        for _ in range(12):
            torch.mm(a, a)

    alone = time_ms(products)
    for sms in (4, 8, 16, 32):

        def fetch(k: int, sms=sms) -> None:
            gather.index_select(
                table, sets[k % 4], out=out, path="direct", max_sms=sms, stream=side
            )

        def both(k: int) -> None:
            fetch(k)
            products()
            torch.cuda.current_stream().wait_stream(side)

        def only(k: int) -> None:
            fetch(k)
            torch.cuda.current_stream().wait_stream(side)

        sweep.results.add(
            sms=sms, gather_ms=time_ms(only), products_ms=alone, both_ms=time_ms(both)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--largest-gib", type=int, default=48)
    given = parser.parse_args()
    results = Results("gather", given.budget_s)
    peak = dma_peak_gbps()
    results.add(dma_peak_gbps=peak)
    shape = (given.largest_gib * GIB,)
    sweeps = []
    for make in (memory.empty_table, memory.empty_pinned):
        began = time.perf_counter()
        flat = make(shape, torch.uint8)
        fill(flat)
        took = time.perf_counter() - began
        results.add(memory=memory.reach(flat).value, allocate_s=took)
        sweeps.append(Sweep(results, flat, peak))
    run = results.attempt
    for k, batch in enumerate(BATCHES):
        for sweep, table, row in itertools.product(sweeps, TABLES_GIB, ROWS):
            if sweep.memory == "pinned" and row not in ROWS_PINNED:
                continue
            run(
                f"{row} x {batch} x {table} {sweep.memory}",
                lambda s=sweep, r=row, b=batch, t=table: s.cell(r, b, t),
                1 + 2 * row * batch / 1e9,
            )
        if k == 0:
            run("misaligned", lambda: misaligned(sweeps[0]), 10)
            run("budget", lambda: budget(sweeps[0]), 5)
            for sweep in sweeps:
                run("repeats", lambda s=sweep: repeats_and_runs(s), 5)
    rates = front_of(torch.device("cuda", 0)).chooser.known()
    results.add(rates={str(key): vars(value) for key, value in rates.items()})
    results.add(done=True, left_s=results.left_s())


if __name__ == "__main__":
    main()
