"""The ways to gather that `gather.sweep` compares, on one table of bytes.

A method is ``work(index, out)``: ``out = table[index]`` on the GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pydirect import gather, memory
from pydirect.gather.front import front_of
from pydirect.gather.request import as_request
from pydirect.kernels.gather import Start
from recipes.bench.gather.timing import DEVICE
from recipes.bench.harness.timing import wait

Work = Callable[[torch.Tensor, torch.Tensor], None]
STAGING_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Method:
    """One column of a table."""

    name: str
    work: Work
    gbps: float
    """About what it reaches, to choose the number of repeats."""

    on_cpu: bool = False
    """Whether it wants the index on the CPU (where a sampler leaves it)."""

    threads: int | None = None
    """CPU threads; None for all."""


def ours(table: torch.Tensor, path: gather.Path | None = None) -> Work:
    """pydirect; ``path`` None lets the chooser decide."""

    def work(index: torch.Tensor, out: torch.Tensor) -> None:
        gather.index_select(table, index, out=out, path=path)

    return work


def stock_alias(table: torch.Tensor) -> Work:
    """PyTorch's own kernel on the host memory: unsorted zero-copy."""
    alias = memory.device_alias(table.view(torch.float32), DEVICE)

    def work(index: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(alias, 0, index, out=out.view(torch.float32))

    return work


def crude_sorted(table: torch.Tensor) -> Work:
    """Sort all indices, read in that order, scatter: a probe without our kernels."""
    alias = memory.device_alias(table.view(torch.float32), DEVICE)

    def work(index: torch.Tensor, out: torch.Tensor) -> None:
        ordered, position = index.sort()
        rows = alias.index_select(0, ordered)
        out.view(torch.float32).index_copy_(0, position, rows)

    return work


class StockCpu:
    """What a training script does today: CPU index_select into a pinned buffer that is
    kept between calls, then one copy (in pieces of 4 GiB at most)."""

    def __init__(self) -> None:
        self._staging = torch.empty(0, dtype=torch.uint8)

    def on(self, table: torch.Tensor) -> Work:
        """The method on one table."""
        row_bytes = table.shape[1]
        word = torch.int64 if row_bytes % 8 == 0 else torch.float32

        def work(index: torch.Tensor, out: torch.Tensor) -> None:
            rows = max(1, min(index.numel(), STAGING_BYTES // row_bytes))
            staged = self._buffer(rows * row_bytes).view(rows, row_bytes)
            for start in range(0, index.numel(), rows):
                if start:
                    wait()  # the copy of the piece before
                part = index[start : start + rows]
                there = staged[: part.numel()]
                torch.index_select(table.view(word), 0, part, out=there.view(word))
                out[start : start + rows].copy_(there, non_blocking=True)

        return work

    def reserve(self, num_bytes: int) -> None:
        """Pin so much now: pinning is no part of what a call takes."""
        self._buffer(num_bytes)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(0, dtype=torch.uint8)
            self._staging = memory.empty_pinned((num_bytes,), torch.uint8)
        return self._staging[:num_bytes]


def sweep_methods(
    table: torch.Tensor, stock: StockCpu, *, cpu: bool, few_cores: bool
) -> list[Method]:
    """The columns of the sweep; ``cpu``: CPU gather + DMA too, and ``few_cores``: that
    with 4 cores."""
    path = gather.Path
    found = [
        Method(name="ours", work=ours(table), gbps=48),
        Method(name="direct", work=ours(table, path.DIRECT), gbps=48),
        Method(name="sorted", work=ours(table, path.SORTED), gbps=48),
        Method(name="cpu", work=ours(table, path.CPU), gbps=15),
        Method(name="alias", work=stock_alias(table), gbps=10),
    ]
    if table.shape[1] <= 1024:
        found.append(Method(name="crude sorted", work=crude_sorted(table), gbps=10))
    if cpu:
        work = stock.on(table)
        found.append(Method(name="stock cpu", work=work, gbps=15, on_cpu=True))
    if few_cores:
        few = Method(name="stock cpu 4", work=work, gbps=6, on_cpu=True, threads=4)
        found.append(few)
    return found


def cores_methods(table: torch.Tensor) -> list[Method]:
    """Ours with all cores and with 4: figure 4.6's point is that they are equal."""
    few = Method(name="ours 4", work=ours(table), gbps=48, threads=4)
    return [Method(name="ours", work=ours(table), gbps=48), few]


def shifted_methods(table: torch.Tensor, stock: StockCpu) -> list[Method]:
    """Figure 4.7: aligned starts on and off."""
    found = [
        Method(name="ours", work=ours(table), gbps=48),
        Method(name="alias", work=stock_alias(table), gbps=20),
        Method(name="stock cpu", work=stock.on(table), gbps=15, on_cpu=True),
    ]
    if DEVICE == "cpu":
        return found  # the kernels' layout needs a GPU
    engine = front_of(torch.device("cuda", 0)).engine
    for start in Start:

        def work(index: torch.Tensor, out: torch.Tensor, start: Start = start) -> None:
            request = as_request(table, index, out)
            engine.direct(request, engine.tuning.direct_sms, start)

        found.append(Method(name=f"start at {start.name.lower()}", work=work, gbps=25))
    return found
