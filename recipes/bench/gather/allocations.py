"""One host table and raw launches of the gather kernels over it."""

import time
from collections.abc import Callable

import torch

from pydirect import memory
from pydirect.kernels import gather as kernels
from recipes.bench.common.cells import Cells
from recipes.bench.gather.timing import check_rows, fill, indices, time_ms

GIB = 1 << 30
SMS = 132


class Bench:
    """One table and the gathers over it; rows are views of the same bytes."""

    def __init__(self, results: Cells, flat: torch.Tensor, kind: str) -> None:
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
        return kernels.GatherArgs(
            table=table.data_ptr(),
            out=out.data_ptr(),
            index=index.data_ptr(),
            position=None if position is None else position.data_ptr(),
            error=self.error.data_ptr(),
            num_indices=index.numel(),
            num_rows=table.shape[0],
            row_bytes=table.shape[1],
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
        position = None if order[1] is None else order[1].to(torch.int32)
        arguments = self.arguments(table, order[0], out, position)
        stream = torch.cuda.current_stream().cuda_stream
        kernels.launch_gather(module, arguments, order[0].dtype, shape, stream)

    def bucketed(
        self, table: torch.Tensor, index: torch.Tensor, shift: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num = index.numel()
        buckets = (table.numel() >> shift) + 1
        counts = torch.empty(buckets + 2, dtype=torch.int32, device="cuda")
        num_sums = kernels.num_sums(buckets)
        sums = torch.empty(num_sums, dtype=torch.int32, device="cuda")
        rank = torch.empty(num, dtype=torch.int32, device="cuda")
        order = torch.empty(num, dtype=torch.int64, device="cuda")
        position = torch.empty(num, dtype=torch.int32, device="cuda")
        arguments = kernels.BucketArgs(
            index=index.data_ptr(),
            counts=counts.data_ptr(),
            sums=sums.data_ptr(),
            num_sums=num_sums,
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
        kernels.launch_order(
            kernels.gather_module(self.device),
            arguments,
            index.dtype,
            num_blocks=4 * SMS,
            stream=torch.cuda.current_stream().cuda_stream,
        )
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


def allocate(
    results: Cells, kind: str, make: Callable[[int], torch.Tensor], gib: int
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
