"""Timing and memory of one step."""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from recipes.bench.harness.timing import times_ms, wait

NUM_TIMED = ((5.0, 100), (80.0, 20), (200.0, 10), (float("inf"), 5))
"""Timed steps by the ms that one takes, at most. Steps that the host bounds scatter:
the same program differed by 1.25 in medians of 20. Ten are Wu's minimum; the slowest
are baselines on large graphs."""
FAST_MS = NUM_TIMED[0][0]
NUM_TIMED_LOST = 3
LOST = 8.0
"""A contender this many times slower than a known other is timed NUM_TIMED_LOST times:
it will not be the one that we are compared with."""
CARD_BYTES = 24 * 2**30
"""Memory of Wu's card."""


class OutOfTimeError(BaseException):
    """A measurement took longer than it may. No subclass of Exception: compilers
    swallow those and go on in another mode."""


def cap_memory(device: torch.device) -> None:
    """Make the caching allocator refuse more than Wu's card holds."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CARD_BYTES / total))


def release(device: torch.device) -> None:
    """Give everything unreferenced back, so that the next contender starts clean."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _num_timed(guess_ms: float, other_ms: float | None) -> int:
    if other_ms is not None and guess_ms > LOST * other_ms:
        return NUM_TIMED_LOST
    return next(count for most_ms, count in NUM_TIMED if guess_ms <= most_ms)


def measure(
    step: Callable[[], object],
    clear: Callable[[], None],
    device: torch.device,
    other_ms: float | None = None,
) -> dict[str, Any]:
    """Median time of a step and its peak memory; `other_ms` is the best time that
    another baseline had.

    Returns `ms`, `ms_least`, `ms_most`, `num_timed`, `first_ms` (the first call, with
    compilation and tuning), `peak_bytes` and `resident_bytes` (allocated between steps
    once `clear` dropped the gradients: graph, maps, parameters, input), the last two
    None on a CPU.
    """
    cuda = device.type == "cuda"
    began = time.perf_counter()
    step()
    wait(device)
    first_ms = 1e3 * (time.perf_counter() - began)
    step()
    clear()
    resident = torch.cuda.memory_allocated(device) if cuda else None
    # A third run tells how slow the step is once it is warm.
    guess_ms = times_ms(step, device, 1)[0]
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    num_timed = _num_timed(guess_ms, other_ms)
    times = times_ms(step, device, num_timed)
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    return {
        "status": "ok",
        "ms": median(times),
        "ms_least": min(times),
        "ms_most": max(times),
        "num_timed": num_timed,
        "first_ms": first_ms,
        "peak_bytes": peak,
        "resident_bytes": resident,
    }
