"""Times the design's calls on a device and appends them to a file, resumably.

[Note: a kernel alone]
A kernel shorter than its launch cannot be timed by events around launches: the device
would wait for the host. So the stream first sleeps while the host enqueues all
repetitions, and the events bracket what then runs back to back, as in a step whose
device is after its host. Where the host took longer than the sleep, it is repeated
with a longer one. A CPU is timed by the clock; where it runs one thread, by the clock
of that thread, which stands still while others have the core.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ssdtrain.tools.foresight.bodies import Body, Pool, bodies_of
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.design import LIMITS, draw
from ssdtrain.tools.foresight.spec import LEAST_US, Kind
from ssdtrain.tools.foresight.tracing import cpu_clock

# Of device time for one measurement, and bounds of the repetitions in it.
TARGET_US = 1200.0
MIN_REPEATS, MAX_REPEATS = 3, 16
# Nothing is gained by more runs of what takes so long.
LONG_US = 4000.0
FIRST_SLEEP_US, LONGEST_SLEEP_US = 400.0, 20_000.0
CYCLES_PER_US = 1980.0

Clock = Callable[[Sequence[Body], int], float]
"""Microseconds of `repeats` runs over the bodies in turn, divided by `repeats`."""


def device_clock(bodies: Sequence[Body], repeats: int) -> float:
    """By CUDA events. See [Note: a kernel alone]."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    sleep_us = FIRST_SLEEP_US
    while True:
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(int(sleep_us * CYCLES_PER_US))
        start.record()
        for i in range(repeats):
            bodies[i % len(bodies)]()
        end.record()
        host_us = (time.perf_counter() - began) * 1e6
        torch.cuda.synchronize()
        took_us: float = start.elapsed_time(end) * 1e3
        behind = host_us < 0.95 * sleep_us or took_us > 1.5 * host_us
        if behind or sleep_us >= LONGEST_SLEEP_US:
            return took_us / repeats
        sleep_us = min(LONGEST_SLEEP_US, 1.5 * host_us + 100.0)


def host_clock(bodies: Sequence[Body], repeats: int) -> float:
    """By the host's clock, for CPUs. See [Note: a kernel alone]."""
    now = cpu_clock()
    began = now()
    for i in range(repeats):
        bodies[i % len(bodies)]()
    return (now() - began) * 1e6 / repeats


def time_call(call: Call, pool: Pool) -> tuple[Call, float]:
    """The call as it was drawn and its time in microseconds: the least of two runs."""
    clock = device_clock if pool.device.type == "cuda" else host_clock
    with torch.no_grad():
        drawn, bodies = bodies_of(call, pool)
        for body in bodies[:2]:
            body()
        rough_us = clock(bodies, 2)
        if rough_us > LONG_US:
            return drawn, min(rough_us, clock(bodies, 2))
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(TARGET_US / rough_us)))
        return drawn, min(clock(bodies, repeats) for _ in range(2))


def gather(
    counts: dict[KernelFamily, int],
    path: Path,
    device: torch.device,
    *,
    seed: int = 0,
    budget_s: float = float("inf"),
) -> int:
    """Time what is missing of the first `counts` draws of every family, one JSON line a
    call, flushed at once; families take turns, so that a budget cuts all the same.
    Returns how many."""
    done = {(row["family"], row["index"]) for row in _rows(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    pool, timed = Pool(device), 0
    end, limits = time.monotonic() + budget_s, LIMITS[Kind(device.type)]
    with path.open("a", encoding="utf-8") as file:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            file.write("\n")  # an interrupted run's torn line stays a line of its own
        for family, index in _turns(counts):
            if (family.value, index) in done:
                continue
            if time.monotonic() > end:
                break
            row = {"index": index, **_timed(draw(family, index, seed, limits), pool)}
            file.write(json.dumps(row) + "\n")
            file.flush()
            timed += 1
    return timed


def _timed(call: Call, pool: Pool) -> dict[str, Any]:
    """A call that cannot run is written with its error: it is not tried again."""
    try:
        drawn, us = time_call(call, pool)
        if pool.device.type == "cuda" and us < LEAST_US / 2:
            raise RuntimeError(f"{us:.3f} us: no kernel ran")
    except (RuntimeError, NotImplementedError) as error:
        if pool.device.type == "cuda":
            torch.cuda.empty_cache()
        text = f"{type(error).__name__}: {error}"[:120]
        return {**call.as_dict(), "us": None, "error": text}
    return {**drawn.as_dict(), "us": round(us, 3)}


def _turns(counts: dict[KernelFamily, int]) -> Iterator[tuple[KernelFamily, int]]:
    most = max(counts.values(), default=0)
    given = dict.fromkeys(counts, 0)
    for turn in range(1, most + 1):
        for family, count in counts.items():
            while given[family] < count * turn // most:
                yield family, given[family]
                given[family] += 1


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: the last one may have been cut off."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def read_times(path: Path) -> list[tuple[Call, float]]:
    """The calls of a file and their microseconds; those that failed are left out."""
    found = []
    for row in _rows(path):
        us = row.pop("us")
        row.pop("index")
        row.pop("error", None)
        if us is not None:
            found.append((Call.from_dict(row), float(us)))
    return found
