"""A storage slowed down to a given bandwidth and latency, for experiments."""

import threading
import time
from collections.abc import Callable

import torch

from ssdtrain.storage.base import ForwardingStorage, Slot, Storage


class Link:
    """One direction of a device: transfers queue after one another on it.

    Each transfer books the next free interval of the device's time, so the sum over
    all threads never exceeds the bandwidth. Bookings follow one another without a
    gap as long as the next one comes within `SLACK_S`: that makes up for the time a
    thread needs to wake, which would otherwise lower the rate of a single thread.
    """

    SLACK_S = 4e-3

    def __init__(
        self,
        gb_per_s: float | None,
        latency_ms: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if gb_per_s is not None and gb_per_s <= 0:
            raise ValueError(f"bandwidth expects GB/s above 0, got {gb_per_s}")
        if latency_ms < 0:
            raise ValueError(f"latency_ms expects 0 or more, got {latency_ms}")
        self._seconds_a_byte = 0.0 if gb_per_s is None else 1e-9 / gb_per_s
        self._latency_s = latency_ms / 1e3
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def book(self, num_bytes: int) -> float:
        """Take device time for a transfer; returns when it is over (s)."""
        now = self._clock()
        with self._lock:
            start = max(self._free_at_s, now - self.SLACK_S)
            self._free_at_s = start + num_bytes * self._seconds_a_byte
            return max(self._free_at_s, now) + self._latency_s


class ThrottledStorage(ForwardingStorage):
    """`inner` at no more than the given rates.

    The real transfer counts towards the time: a storage that is slower by itself is
    not slowed further. Concurrent transfers of one direction share its bandwidth in
    the order they arrive; the two directions are independent.

    Args:
        inner: the storage that holds the bytes.
        write_gb_per_s: 1e9 bytes a second; None: no limit.
        read_gb_per_s: the same, of reads.
        latency_ms: added to every transfer, on top of the bandwidth's share.
        clock: seconds that never fall.
        sleep: lets that many seconds of the clock pass for the calling thread.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        write_gb_per_s: float | None = None,
        read_gb_per_s: float | None = None,
        latency_ms: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._clock, self._sleep = clock, sleep
        self._write = Link(write_gb_per_s, latency_ms, clock)
        self._read = Link(read_gb_per_s, latency_ms, clock)
        self._rates = (write_gb_per_s, read_gb_per_s)

    def describe(self) -> str:
        """Return the wrapped storage and the limits."""
        limits = ["unlimited" if r is None else f"{r:g} GB/s" for r in self._rates]
        return f"{self.inner.describe()} (write {limits[0]}, read {limits[1]})"

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write, then wait until the limited device would have been done."""
        done_at = self._write.book(buffer.numel())
        self.inner.write(slot, buffer)
        self._sleep_until(done_at)

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Read, then wait until the limited device would have been done."""
        done_at = self._read.book(buffer.numel())
        self.inner.read(slot, buffer)
        self._sleep_until(done_at)

    def _sleep_until(self, moment_s: float) -> None:
        while (left := moment_s - self._clock()) > 0:
            self._sleep(left)
