"""The ways to gather that `gather.sweep` compares, and how they are timed.

A method is ``work(index, out)``: ``out = table[index]`` on the GPU, in bytes.
A machine drifts, and a gather of 0.1 ms is near what launching it takes. So the ways
take turns, round after round; a turn is a burst of calls back to back, as in training,
of 2 ms or more; and what counts is the median of the turns.
"""

import functools
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pydirect import gather, memory
from pydirect.gather.front import front_of
from pydirect.gather.request import as_request
from pydirect.kernels.gather import Start
from recipes.bench.harness.timing import Clock, wait

Work = Callable[[torch.Tensor, torch.Tensor], None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
once_ms = Clock(torch.device(DEVICE)).once
STAGING_BYTES = 4 << 30
# Those that this process may use: more threads than that would be slow.
CORES = len(os.sched_getaffinity(0))
# Turns, by the most seconds that a call is expected to take.
TURNS = ((0.005, 7), (0.025, 3), (0.1, 2))
BURST_S = 0.002
MOST_CALLS = 8
WARM_ROWS = 1000


@dataclass(kw_only=True)
class Method:
    """One column of a table, and what it took so far."""

    name: str
    work: Work
    gbps: float
    """About what it reaches, to choose the number of repeats."""

    on_cpu: bool = False
    """Whether it wants the index on the CPU (where a sampler leaves it)."""
    turns: int = 0
    calls: int = 0
    """Of a turn."""
    ms: list[float] = field(default_factory=list)
    error: str = ""

    def repeat(self, num_bytes: int) -> None:
        """Choose how many turns of how many calls of so many bytes it gets."""
        expected_s = max(1e-5, num_bytes / self.gbps / 1e9)
        self.turns = next((turns for most, turns in TURNS if expected_s <= most), 1)
        self.calls = max(1, min(MOST_CALLS, int(BURST_S / expected_s)))


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


def sweep_methods(table: torch.Tensor, stock: StockCpu, *, cpu: bool) -> list[Method]:
    """The columns of the sweep; ``cpu``: CPU gather + DMA too."""
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
    return found


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


def fill(table: torch.Tensor) -> None:
    """Random bytes, fast: one random block from the GPU, offset for every place."""
    words = table.flatten().view(torch.uint8)
    size = min(words.numel(), 256 << 20)
    block = torch.randint(0, 1 << 30, (size // 8,), device=DEVICE).view(torch.uint8)
    for k, start in enumerate(range(0, words.numel(), size)):
        part = words[start : start + size]
        part.copy_((block + k)[: part.numel()], non_blocking=True)
    wait()


def indices(num: int, num_rows: int, count: int = 6) -> list[torch.Tensor]:
    """Fresh random indices for each repeat, so that no cache remembers the rows."""
    return [torch.randint(0, num_rows, (num,), device=DEVICE) for _ in range(count)]


def check_rows(table: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Compare 512 random places of ``out`` with the table, byte by byte."""
    picked = torch.randint(0, index.numel(), (512,), device=index.device)
    expected = table[index[picked].cpu().long()]
    if not torch.equal(out[picked].cpu(), expected):
        raise RuntimeError("the gather returned wrong rows")


class Rounds:
    """The ways on one table and batch. Indices are fresh for every call of a way, so
    that no cache remembers the rows."""

    def __init__(self, table: torch.Tensor, batch: int, methods: list[Method]) -> None:
        self.table = table
        self.out = torch.empty(batch, table.shape[1], dtype=torch.uint8, device=DEVICE)
        self.methods = methods
        for method in methods:
            method.repeat(self.out.numel())
        most = max(m.turns * m.calls for m in methods)
        self.sets = indices(batch, table.shape[0], max(2, most))
        most = max((m.turns * m.calls for m in methods if m.on_cpu), default=0)
        self.cpu_sets = [index.cpu() for index in self.sets[: max(1, most)]]

    def run(self) -> tuple[dict[str, float], dict[str, str]]:
        """Milliseconds of a call, and why a way has none."""
        for method in self.methods:
            self._attempt(method, self._first)
        for turn in range(TURNS[0][1]):
            for method in self.methods:
                if turn < method.turns and not method.error:
                    self._attempt(method, functools.partial(self._turn, turn))
        good = (m for m in self.methods if not m.error)
        ms = {m.name: round(statistics.median(m.ms), 4) for m in good}
        return ms, {m.name: m.error for m in self.methods if m.error}

    def _attempt(self, method: Method, part: "functools.partial[None]") -> None:
        try:
            part(method)
        except Exception as error:  # the other ways still count
            method.error = f"{type(error).__name__}: {error}"[:300]

    def _first(self, method: Method) -> None:
        """Whether the rows are right; the only turn of a way that takes long."""
        work, index = method.work, self._sets(method)[0]
        self.out.fill_(255)
        wait()
        if method.turns > 1:
            work(index, self.out)
        else:
            work(index[:WARM_ROWS], self.out[:WARM_ROWS])
            wait()
            method.ms.append(once_ms(functools.partial(work, index, self.out)))
            method.turns = 0
        check_rows(self.table, index.to(DEVICE), self.out)

    def _turn(self, turn: int, method: Method) -> None:
        work, sets = method.work, self._sets(method)
        # Threads of the CPU and caches of the interpreter wake up outside the time.
        work(sets[0][:WARM_ROWS], self.out[:WARM_ROWS])
        wait()

        def burst() -> None:
            for k in range(method.calls):
                work(sets[(turn * method.calls + k) % len(sets)], self.out)

        method.ms.append(once_ms(burst) / method.calls)

    def _sets(self, method: Method) -> list[torch.Tensor]:
        return self.cpu_sets if method.on_cpu else self.sets
