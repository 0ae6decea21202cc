"""What the gather benchmarks share: timing, tables, indices, checks."""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from recipes.bench.harness.timing import Clock, wait

SLOW_S = 0.02
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
once_ms = Clock(torch.device(DEVICE)).once


def time_ms(work: Callable[[int], object], repeats: int = 5) -> float:
    """Median milliseconds of ``work(k)`` by device events, k = 1, 2, ... after one
    warm-up (k = 0); the time includes what the CPU needs to launch it. Slow work
    repeats less."""
    began = time.perf_counter()
    work(0)
    if wait() - began > SLOW_S:
        repeats = min(repeats, 2)
    return statistics.median(
        once_ms(functools.partial(work, k + 1)) for k in range(repeats)
    )


def dma_peak_gbps(num_bytes: int = 1 << 30) -> float:
    """Pinned host-to-device copy of this machine, GB/s; the best of five."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    device = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    host.fill_(1)
    device.copy_(host)
    took = min(once_ms(lambda: device.copy_(host, non_blocking=True)) for _ in range(5))
    return num_bytes / took / 1e6


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
