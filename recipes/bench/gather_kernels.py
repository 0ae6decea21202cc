"""Which kernel, which order, which memory: the variants behind the gather.

    python recipes/bench/gather_kernels.py --budget-s 200

Most telling cells first. Writes results/gather_kernels.json (or under $OUT).
"""

import argparse
import ctypes
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
from gather_harness import Results, check_rows, dma_peak_gbps, fill, indices, time_ms

from pydirect import memory
from pydirect.kernels import gather as kernels
from pydirect.kernels.driver import driver
from pydirect.memory.region import shaped, tensor_over
from pydirect.memory.vmm import empty_large_pages

GIB = 1 << 30
SMS = 132
_UNROLLS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 4), (2, 2), (4, 2), (2, 4))


class Bench:
    """One table and the gathers over it; rows are views of the same bytes."""

    def __init__(self, results: Results, flat: torch.Tensor, kind: str) -> None:
        self.results = results
        self.flat = flat
        self.kind = kind
        self.device = torch.device("cuda", 0)
        self.error = torch.zeros(2, dtype=torch.int64, device="cuda")

    def rows(self, row_bytes: int) -> torch.Tensor:
        num = self.flat.numel() // row_bytes
        return self.flat[: num * row_bytes].view(num, row_bytes)

    def arguments(
        self,
        table: torch.Tensor,
        index: torch.Tensor,
        out: torch.Tensor,
        position: torch.Tensor | None = None,
    ) -> kernels.GatherArgs:
        wide = 1 if position is None or position.dtype == torch.int32 else 2
        return kernels.GatherArgs(
            table=table.data_ptr(),
            out=out.data_ptr(),
            index=index.data_ptr(),
            position=None if position is None else position.data_ptr(),
            error=self.error.data_ptr(),
            num_indices=index.numel(),
            num_rows=table.shape[0],
            row_bytes=table.shape[1],
            position_stride=wide,
        )

    def gather(
        self,
        table: torch.Tensor,
        order: tuple[torch.Tensor, torch.Tensor | None],
        out: torch.Tensor,
        shape: kernels.Shape,
        options: tuple[str, ...] = (),
    ) -> None:
        module = kernels.gather_module(self.device, options)
        arguments = self.arguments(table, order[0], out, order[1])
        stream = torch.cuda.current_stream().cuda_stream
        kernels.launch_gather(module, arguments, order[0].dtype, shape, stream)

    def bucketed(
        self, table: torch.Tensor, index: torch.Tensor, shift: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num = index.numel()
        buckets = (table.numel() >> shift) + 1
        counts = torch.zeros(buckets + 1, dtype=torch.int32, device="cuda")
        rank = torch.empty(num, dtype=torch.int32, device="cuda")
        order = torch.empty(num, dtype=torch.int64, device="cuda")
        position = torch.empty(num, dtype=torch.int32, device="cuda")
        arguments = kernels.BucketArgs(
            index=index.data_ptr(),
            counts=counts.data_ptr(),
            rank=rank.data_ptr(),
            order=order.data_ptr(),
            position=position.data_ptr(),
            error=self.error.data_ptr(),
            num_indices=num,
            num_rows=table.shape[0],
            row_bytes=table.shape[1],
            num_buckets=buckets,
            shift=shift,
        )
        module = kernels.gather_module(self.device)
        stream = torch.cuda.current_stream().cuda_stream
        kernels.launch_bucket_count(module, arguments, index.dtype, stream)
        sums = torch.cumsum(counts, 0, dtype=torch.int32)
        arguments.counts = sums.data_ptr()
        kernels.launch_bucket_place(module, arguments, index.dtype, stream)
        return order, position

    def cell(
        self,
        work: Callable[[torch.Tensor, torch.Tensor], object],
        row_bytes: int,
        num: int,
        **facts: object,
    ) -> None:
        """Time ``work(index, out)`` on fresh indices; check its rows."""
        table = self.rows(row_bytes)
        sets = indices(num, table.shape[0])
        out = torch.full((num, row_bytes), 255, dtype=torch.uint8, device="cuda")
        took = time_ms(lambda k: work(sets[k % 6], out), repeats=3)
        work(sets[0], out)
        check_rows(table, sets[0], out)
        self.results.add(
            memory=self.kind,
            table_gib=self.flat.numel() / GIB,
            row_bytes=row_bytes,
            num=num,
            ms=took,
            gbps=num * row_bytes / took / 1e6,
            mrows_s=num / took / 1e3,
            **facts,
        )


def shape(
    sms: int = SMS, share: kernels.Share = kernels.Share.INTERLEAVED
) -> kernels.Shape:
    return kernels.Shape(num_blocks=sms, share=share)


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
    for log2 in (12, 14, 15, 16, 17, 18, 20, 21, 22):
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


def budgets(bench: Bench) -> None:
    """How many SMs fill the link."""
    for row_bytes, sms in itertools.product((128, 1024), (2, 4, 8, 16, 33, 66, 132)):
        table = bench.rows(row_bytes)
        sets = [i.sort() for i in indices(1 << 20, table.shape[0], 2)]
        out = torch.empty(1 << 20, row_bytes, dtype=torch.uint8, device="cuda")
        for share in kernels.Share:
            form = shape(sms, share)

            def work(k: int, sets=sets, out=out, table=table, form=form) -> None:
                one = sets[k % 2]
                bench.gather(table, (one.values, one.indices), out, form)

            took = time_ms(work, repeats=3)
            gbps = out.numel() / took / 1e6
            bench.results.add(
                sms=sms, row_bytes=row_bytes, share=share.name, ms=took, gbps=gbps
            )


def sort_alone(bench: Bench, table, sets, shift: int, k: int) -> None:
    bench.bucketed(table, sets[k % 6], shift)


def sorts(bench: Bench, row_bytes: int) -> None:
    """Order and gather, end to end: bucket sizes against a full sort."""
    table = bench.rows(row_bytes)

    def full(index: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        ordered = index.to(dtype).sort()
        bench.gather(table, tuple(ordered), out, shape())

    def bucket(index: torch.Tensor, out: torch.Tensor, shift: int, share) -> None:
        order = bench.bucketed(table, index, shift)
        bench.gather(table, order, out, shape(share=share))

    for num in (50_000, 200_000, 1_000_000, 4_000_000):
        if num * row_bytes > 3 * GIB:
            continue
        for shift, share in itertools.product((15, 16, 18, 21), kernels.Share):
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
    from gather_triton import gather

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


def managed(num_bytes: int) -> torch.Tensor:
    """Managed memory that stays on the host and is mapped on the GPU (the thesis's
    first way to zero-copy); far smaller than the GPU's memory."""
    address = ctypes.c_uint64()
    size = ctypes.c_size_t(num_bytes)
    call = driver().call
    call("cuMemAllocManaged", ctypes.byref(address), size, ctypes.c_uint(1))
    for advice, device in ((3, -1), (5, 0)):  # preferred: CPU; accessed by: GPU 0
        call("cuMemAdvise", address, size, ctypes.c_int(advice), ctypes.c_int(device))
    flat = tensor_over(int(address.value), num_bytes, lambda: None)
    flat.zero_()
    return shaped(flat, (num_bytes,), torch.uint8)


def allocate(
    results: Results, kind: str, make: Callable[[int], torch.Tensor], gib: int
) -> Bench:
    began = time.perf_counter()
    flat = make(gib * GIB)
    middle = time.perf_counter()
    fill(flat)
    results.add(
        memory=kind,
        table_gib=gib,
        allocate_s=middle - began,
        fill_s=time.perf_counter() - middle,
        is_pinned=memory.is_pinned(flat),
    )
    return Bench(results, flat, kind)


def translation(results: Results, kind: str, make, gib: int) -> None:
    """All cells that tell what translation costs on one kind of memory."""
    bench = allocate(results, kind, make, gib)
    random_and_sorted(bench, 128, 1 << 20)
    strides(bench)
    random_and_sorted(bench, 512, 1 << 20)
    random_and_sorted(bench, 128, 200_000)
    random_and_sorted(bench, 128, 50_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--table-gib", type=int, default=16)
    given = parser.parse_args()
    results = Results("gather_kernels", given.budget_s)
    results.add(dma_peak_gbps=dma_peak_gbps())

    def pooled(size: int) -> torch.Tensor:
        return memory.empty_pinned((size,), torch.uint8)

    def large(size: int) -> torch.Tensor:
        return empty_large_pages((size,), torch.uint8)

    gib = given.table_gib
    run = results.attempt
    run("large pages", lambda: translation(results, "vmm", large, gib), 30)
    run("registered", lambda: translation(results, "registered", pooled, gib), 30)
    run("main", lambda: variants(results, pooled, gib), 30)
    run("large 48", lambda: translation(results, "vmm", large, 3 * gib), 40)
    run("managed", lambda: translation(results, "managed", managed, gib), 40)
    results.add(done=True, left_s=results.left_s())


def variants(results: Results, make, gib: int) -> None:
    """Kernel variants on registered memory."""
    bench = allocate(results, "registered", make, gib)
    run = results.attempt
    run("sorts 128", lambda: sorts(bench, 128))
    run("budgets", lambda: budgets(bench))
    run("triton", lambda: triton(bench))
    run("alignments", lambda: alignments(bench))
    run("cpu", lambda: cpu_gather(bench))
    run("unrolls", lambda: unrolls(bench), 15)
    run("sorts 512", lambda: sorts(bench, 512))


if __name__ == "__main__":
    main()
