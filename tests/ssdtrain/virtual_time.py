"""Time that passes only where somebody sleeps, so that no test depends on the load.

[Note: virtual time]
Every thread has a time of its own: `sleep` moves it, and nothing else does, so that
four threads that sleep for a second each end one second later, however they were
scheduled. A thread that is new, or has slept less, starts at the time that the first
thread saw last; the first thread, which waits for the others, sees the latest of all.
With `tick_s` each look at the clock takes that long, for code that divides by times.
"""

import sys
import threading
import time
from types import ModuleType

import pytest

from ssdtrain.storage import Storage
from tests.ssdtrain.throttle import ThrottledStorage


class VirtualTime:
    """Stands in for the module `time`, whole or as a clock and a sleep."""

    # Dates stay those of the calendar.
    gmtime = staticmethod(time.gmtime)
    strftime = staticmethod(time.strftime)

    def __init__(self, tick_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._first = threading.get_ident()
        self._seen_s = 0.0
        self._latest_s = 0.0
        # Not by the thread's number: a new thread may get that of one that has ended.
        self._own = threading.local()
        self._tick_s = tick_s

    def monotonic(self) -> float:
        """Seconds of the calling thread."""
        with self._lock:
            if threading.get_ident() == self._first:
                self._latest_s += self._tick_s
                self._seen_s = self._latest_s
            now = max(getattr(self._own, "now_s", 0.0), self._seen_s)
            self._own.now_s = now
            return now

    def sleep(self, seconds: float) -> None:
        """Move the calling thread's time."""
        self._own.now_s = self.monotonic() + seconds
        with self._lock:
            self._latest_s = max(self._latest_s, self._own.now_s)

    def monotonic_ns(self) -> int:
        """Nanoseconds."""
        return round(self.monotonic() * 1e9)

    def throttled(self, storage: Storage, **rates: float) -> ThrottledStorage:
        """The storage at these rates and latencies, in this time."""
        return ThrottledStorage(
            storage, clock=self.monotonic, sleep=self.sleep, **rates
        )

    perf_counter = monotonic
    perf_counter_ns = monotonic_ns


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """All of ssdtrain, and its faulty storage, in virtual time: 10 us a look at the
    clock."""
    virtual = VirtualTime(tick_s=1e-5)
    for name, module in list(sys.modules.items()):
        ours = name.startswith("ssdtrain.") or name == "tests.ssdtrain.faulty"
        if ours and isinstance(module, ModuleType):
            if getattr(module, "time", None) is time:
                monkeypatch.setattr(module, "time", virtual)
    return virtual
