"""Which kernel, which order, which memory: the variants behind the gather.

    python -m recipes.bench.gather.kernels --budget-s 200

Most telling cells first. Writes results/gather_kernels.json (or under $OUT).
"""

import argparse
import ctypes
import functools
import itertools
import time
from functools import partial
from pathlib import Path

import torch

from pydirect import memory
from pydirect.kernels import gather as kernels
from pydirect.kernels.nvrtc import load
from recipes.bench.common.cells import RESULTS, Cells
from recipes.bench.gather.allocations import GIB, SMS, Bench, allocate, shape
from recipes.bench.gather.timing import dma_peak_gbps, indices, time_ms

_UNROLLS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 4), (2, 2), (4, 2), (2, 4))


def random_and_sorted(bench: Bench, row_bytes: int, num: int) -> None:
    """Address translation: random order, sorted order beforehand (the sort not timed),
    interleaved and contiguous shares."""
    table = bench.rows(row_bytes)

    def direct(index: torch.Tensor, out: torch.Tensor) -> None:
        bench.gather(table, (index, None), out, shape())

    bench.cell(direct, row_bytes, num, order="random")
    for share in kernels.Share:
        sets = [i.sort() for i in indices(num, table.shape[0], 4)]
        out = torch.empty(num, row_bytes, dtype=torch.uint8, device="cuda")

        def presorted(k: int, sets=sets, out=out, share=share) -> None:
            one = sets[k % 4]
            bench.gather(table, (one.values, one.indices), out, shape(share=share))

        took = time_ms(presorted, repeats=3)
        bench.results.add(
            memory=bench.kind,
            table_gib=bench.flat.numel() / GIB,
            row_bytes=row_bytes,
            num=num,
            order="presorted",
            share=share.name,
            ms=took,
            gbps=num * row_bytes / took / 1e6,
            mrows_s=num / took / 1e3,
        )


def strides(bench: Bench) -> None:
    """One 128-byte row every ``stride`` bytes, in address order: what a page costs."""
    table = bench.rows(128)
    for log2 in (12, 14, 16, 18, 20, 21, 22):
        step = (1 << log2) // 128
        index = torch.arange(0, table.shape[0], step, device="cuda")[: 1 << 20]
        out = torch.empty(index.numel(), 128, dtype=torch.uint8, device="cuda")
        for share in kernels.Share:
            work = partial(bench.gather, table, (index, None), out, shape(share=share))
            took = time_ms(lambda _, work=work: work(), repeats=3)
            bench.results.add(
                memory=bench.kind,
                stride=1 << log2,
                share=share.name,
                num=index.numel(),
                ms=took,
                ns_a_row=took * 1e6 / index.numel(),
            )


def random_budgets(bench: Bench) -> None:
    """How many SMs fill the link from large pages, in random order."""
    for row_bytes, sms in itertools.product(
        (128, 512, 4096), (4, 8, 16, 24, 32, 66, 132)
    ):
        table = bench.rows(row_bytes)

        def direct(index, out, table=table, sms=sms) -> None:
            bench.gather(table, (index, None), out, shape(sms))

        for num in (50_000, 1 << 19):
            bench.cell(direct, row_bytes, num, sms=sms)


def hints(bench: Bench) -> None:
    """Cache hints on the loads: do larger requests cross the link?"""
    for hint, row_bytes in itertools.product(
        ("", ".L2::64B", ".L2::128B", ".L2::256B"), (512, 1024, 2052, 4096)
    ):
        options = (f'-DLOAD_HINT="{hint}"',)
        table = bench.rows(row_bytes)

        def direct(index, out, table=table, options=options) -> None:
            bench.gather(table, (index, None), out, shape(32), options)

        bench.cell(direct, row_bytes, 1 << 19, hint=hint)


class BulkArgs(ctypes.Structure):
    """Mirrors the struct of the same name in bulk.cu."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("num_indices", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("slots", ctypes.c_int),
    )


def bulk(bench: Bench) -> None:
    """The bulk copy engine instead of loads."""
    module = load(Path(__file__).with_name("bulk.cu"), bench.device)
    for row_bytes, blocks in itertools.product((128, 512, 1024, 4096), (16, 132, 528)):
        table = bench.rows(row_bytes)

        def engine(index, out, table=table, blocks=blocks) -> None:
            arguments = BulkArgs(
                table=table.data_ptr(),
                out=out.data_ptr(),
                index=index.data_ptr(),
                num_indices=index.numel(),
                row_bytes=table.shape[1],
                slots=min(128, 45056 // table.shape[1]),
            )
            stream = torch.cuda.current_stream().cuda_stream
            kernel = module.kernel("bulk")
            kernel.launch(grid=blocks, block=128, arguments=arguments, stream=stream)

        bench.cell(engine, row_bytes, 1 << 19, bulk_blocks=blocks)


def budgets(bench: Bench) -> None:
    """How many SMs fill the link."""
    for num, sms in itertools.product(
        (50_000, 200_000, 1 << 20), (4, 8, 12, 16, 24, 132)
    ):
        row_bytes = 128
        table = bench.rows(row_bytes)
        sets = [i.sort() for i in indices(num, table.shape[0], 4)]
        out = torch.empty(num, row_bytes, dtype=torch.uint8, device="cuda")
        for share in kernels.Share:
            form = shape(sms, share)

            def work(k: int, sets=sets, out=out, table=table, form=form) -> None:
                one = sets[k % 4]
                bench.gather(table, (one.values, one.indices), out, form)

            took = time_ms(work, repeats=3)
            gbps = out.numel() / took / 1e6
            bench.results.add(sms=sms, num=num, share=share.name, ms=took, gbps=gbps)


def sort_alone(bench: Bench, table, sets, shift: int, k: int) -> None:
    bench.bucketed(table, sets[k % 6], shift)


def sorts(bench: Bench, row_bytes: int) -> None:
    """Order and gather, end to end: bucket sizes against a full sort."""
    table = bench.rows(row_bytes)

    def full(index: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        ordered = index.to(dtype).sort()
        bench.gather(table, tuple(ordered), out, shape(16))

    def bucket(index: torch.Tensor, out: torch.Tensor, shift: int, share) -> None:
        order = bench.bucketed(table, index, shift)
        bench.gather(table, order, out, shape(16, share))

    for num in (50_000, 200_000, 1_000_000, 4_000_000):
        if num * row_bytes > 3 * GIB:
            continue
        for shift, share in itertools.product((16, 18), kernels.Share):
            work = partial(bucket, shift=shift, share=share)
            bench.cell(work, row_bytes, num, sort=f"2^{shift}", share=share.name)
            sets = indices(num, table.shape[0])
            took = time_ms(
                lambda k, s=sets, b=shift: bench.bucketed(table, s[k % 6], b)
            )
            bench.results.add(num=num, sort_alone=f"2^{shift}", ms=took)
        for dtype in (torch.int32, torch.int64):
            bench.cell(partial(full, dtype=dtype), row_bytes, num, sort=str(dtype))


def alignments(bench: Bench) -> None:
    """Rows by 4 bytes past 2 KiB, aligned starts on and off (Figure 4.7)."""
    for row_bytes in (2048, 2052, 2060, 2064, 400, 100, 1030):
        table = bench.rows(row_bytes)
        for start in kernels.Start:

            def direct(index, out, table=table, start=start) -> None:
                form = kernels.Shape(num_blocks=SMS, start=start)
                bench.gather(table, (index, None), out, form)

            bench.cell(direct, row_bytes, 400_000, start=start.name)
        if row_bytes % 4 == 0:
            alias = memory.device_alias(table.view(torch.float32), 0)

            def stock(index, out, alias=alias) -> None:
                torch.index_select(alias, 0, index, out=out.view(torch.float32))

            bench.cell(stock, row_bytes, 400_000, start="torch.index_select")


def unrolls(bench: Bench) -> None:
    """Rows and words in flight per lane."""
    for rows, words in _UNROLLS:
        options = tuple(
            f"-D{name}_{size}={value}"
            for size in ("SHORT", "LONG")
            for name, value in (("ROWS", rows), ("WORDS", words))
        )
        for row_bytes, sms in itertools.product((128, 512, 4096), (16, 132)):
            table = bench.rows(row_bytes)

            def direct(index, out, table=table, sms=sms, options=options) -> None:
                bench.gather(table, (index, None), out, shape(sms), options)

            bench.cell(direct, row_bytes, 262_144, rows=rows, words=words, sms=sms)


def triton(bench: Bench) -> None:
    """The same gather from Triton, in random and in sorted order."""
    from recipes.bench.gather.triton_copy import gather

    for row_bytes in (128, 512, 2048):
        table = bench.rows(row_bytes).view(torch.int32)
        alias = memory.device_alias(table, 0)

        def direct(index, out, alias=alias) -> None:
            gather(alias, index, out.view(torch.int32))

        bench.cell(direct, row_bytes, 1 << 20, order="random", kernel="triton")


def cpu_gather(bench: Bench) -> None:
    """Threads gather into pinned memory; the copy alone by size."""
    for threads, row_bytes in itertools.product((16, 4, 1), (128, 512, 4096)):
        torch.set_num_threads(threads)
        num = (256 << 20) // row_bytes
        table = bench.rows(row_bytes)
        staging = torch.empty(num, row_bytes, dtype=torch.uint8, pin_memory=True)
        index = torch.randint(0, table.shape[0], (num,))
        for word in (torch.uint8, torch.int64):
            source, target = table.view(word), staging.view(word)
            torch.index_select(source, 0, index[:1000])
            began = time.perf_counter()
            torch.index_select(source, 0, index, out=target)
            took = (time.perf_counter() - began) * 1e3
            gbps = staging.numel() / took / 1e6
            bench.results.add(
                cpu_gather=str(word), threads=threads, row_bytes=row_bytes, gbps=gbps
            )
    for log2 in range(12, 29, 2):
        size = 1 << log2
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        part = bench.flat[:size]
        took = time_ms(lambda _, d=device, p=part: d.copy_(p, non_blocking=True), 20)
        bench.results.add(dma_bytes=size, ms=took, gbps=size / took / 1e6)


def translation(bench: Bench) -> None:
    """All cells that tell what translation costs on one kind of memory."""
    for num, row_bytes in (
        (1 << 20, 128),
        (200_000, 128),
        (50_000, 128),
        (1 << 20, 512),
    ):
        random_and_sorted(bench, row_bytes, num)
    strides(bench)


def on_managed(results: Cells, gib: int) -> None:
    """Managed memory: translation, SM budgets, hints, alignment, peers."""
    flat = functools.partial(memory.empty_table, dtype=torch.uint8)
    bench = allocate(results, "managed", lambda size: flat((size,)), gib)
    run = results.attempt
    run("translation", lambda: translation(bench))
    run("budgets", lambda: random_budgets(bench))
    run("hints", lambda: hints(bench))
    run("bulk", lambda: bulk(bench))
    run("alignments", lambda: alignments(bench))
    run("triton", lambda: triton(bench))
    run("cpu", lambda: cpu_gather(bench))
    run("unrolls", lambda: unrolls(bench), 15)


def on_registered(results: Cells, gib: int) -> None:
    """Pinned memory: what orders and SM budgets win back."""
    flat = functools.partial(memory.empty_pinned, dtype=torch.uint8)
    bench = allocate(results, "registered", lambda size: flat((size,)), gib)
    run = results.attempt
    run("translation", lambda: translation(bench))
    run("budgets", lambda: budgets(bench))
    run("sorts 128", lambda: sorts(bench, 128))
    run("sorts 512", lambda: sorts(bench, 512))
    run("cpu", lambda: cpu_gather(bench))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--table-gib", type=int, default=48)
    default = RESULTS / "gather" / "gather_kernels.json"
    parser.add_argument("--out", type=Path, default=default)
    given = parser.parse_args()
    results = Cells(given.out, given.budget_s, anew=True)
    results.add(dma_peak_gbps=dma_peak_gbps())
    gib = given.table_gib
    results.attempt("managed", lambda: on_managed(results, gib), 30)
    memory.default_pool(memory.Backing.MANAGED).trim()
    results.attempt("registered", lambda: on_registered(results, gib // 3), 20)
    results.add(done=True, left_s=results.left_s())


if __name__ == "__main__":
    main()
