"""Link rates: the one place where bytes and times become bytes a second.

On the ground floor, because `machine`, `storage` and the planner's observation all
measure links.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from ssdtrain.curves import Curve

STARTUP_S = 1e-5
"""What one transfer costs besides its bytes, where no curve was fitted."""
WINDOW_BYTES = 256 * 1024 * 1024
"""A `RateMeter` takes a new reading from at least this many bytes."""
FIRST_GUESS = 1.0
"""GB/s of a `RateMeter` before its first reading."""
FLOOR = 0.05
"""No reading falls below this share of the one before: a link that gets too little to
be measured would never come back."""


class Timed(NamedTuple):
    """Results of jobs that ran side by side, and the time until the last had ended."""

    results: list[int]
    seconds: float

    @property
    def per_second(self) -> float:
        """The sum of the results over the time."""
        return sum(self.results) / max(self.seconds, 1e-9)


def side_by_side(jobs: Sequence[Callable[[], int]]) -> Timed:
    """Run each job on a thread of its own; a job returns what it moved.

    Raises:
        Exception: the first one that a job raised, when all have ended.
    """
    with ThreadPoolExecutor(len(jobs)) as pool:
        began = time.perf_counter()
        futures = [pool.submit(job) for job in jobs]
        results = [future.result() for future in futures]
        return Timed(results, time.perf_counter() - began)


def middle_rate(
    transfers: Iterable[tuple[int, float]],
) -> float | None:
    """Bytes a second at which the middle byte moved; None without any byte.

    A mean would count the transfers next to the opposite direction, whose slowdown the
    simulator adds itself.

    Args:
        transfers: (bytes, seconds) of each.
    """
    rates = sorted(
        (num_bytes / max(seconds - STARTUP_S, 1e-9), num_bytes)
        for num_bytes, seconds in transfers
        if num_bytes
    )
    left = sum(num_bytes for _, num_bytes in rates) / 2
    for rate, num_bytes in rates:
        left -= num_bytes
        if left <= 0:
            return rate
    return None


def busy_rate(intervals: Iterable[tuple[int, int, int]]) -> float | None:
    """Bytes over the time in which at least one transfer was running.

    Args:
        intervals: (start in ns, end in ns, bytes) of each transfer.
    """
    busy_ns, until, total = 0, 0, 0
    for start, end, num_bytes in sorted(intervals):
        busy_ns += max(0, end - max(start, until))
        until = max(until, end)
        total += num_bytes
    return total / (busy_ns / 1e9) if busy_ns else None


def round_trip(write: float, read: float) -> float:
    """The rate of bytes that are written once and read once, in the rates' unit."""
    return 1 / (1 / write + 1 / read)


def shared_fraction(alone_s: Sequence[float], together_s: float) -> float:
    """How much of the shorter of two transfers the longer one did not hide.

    0: both directions are independent; 1: they share one bandwidth; above 1: mixing
    them is slower than one after the other.
    """
    return max(0.0, (together_s - max(alone_s)) / min(alone_s))


def straight(bytes_per_second: float) -> Curve:
    """The curve of a link of which only the rate is known."""
    return Curve.straight(STARTUP_S, max(bytes_per_second, 1.0))


class RateMeter:
    """The rate of one direction while at least one transfer of it is under way."""

    def __init__(self) -> None:
        self.gb_per_s = FIRST_GUESS
        self._lock = threading.Lock()
        self._active = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0

    @contextmanager
    def transfer(self, num_bytes: int) -> Iterator[None]:
        """Around a transfer; a failed one counts time and no bytes."""
        with self._lock:
            if self._active == 0:
                self._since_s = time.perf_counter()
            self._active += 1
        moved = 0
        try:
            yield
            moved = num_bytes
        finally:
            with self._lock:
                self._active -= 1
                self._bytes += moved
                now = time.perf_counter()
                self._busy_s += now - self._since_s
                self._since_s = now
                self._take_reading()

    def _take_reading(self) -> None:
        if self._bytes < WINDOW_BYTES or self._busy_s <= 0:
            return
        reading = self._bytes / self._busy_s / 1e9
        self.gb_per_s = max((self.gb_per_s + reading) / 2, FLOOR * self.gb_per_s)
        self._bytes, self._busy_s = 0, 0.0
