"""What copies cost compute, and one another: measured between two steps.

[Note: contention]
Runs of matrix products are timed alone and beside copies in one direction, in turns:
each run beside copies is compared with the runs alone before and after it, so that a
drift of the clock rate cancels, and the median of these ratios counts. The first
products of a run are not timed: the device never waits for a launch meanwhile. A run
whose copies ended before it did proves nothing and is left out. At most 0.4 s, once a
plan.

[Note: noise]
At its power limit a device's runs differ by percents, while a few tenths of a percent
are sought, and by luck four ratios may agree on a wrong one. So no limit decides
whether a measurement is believed: it is weighed against what is known of such devices
(`COPY_SLOWDOWN`, give or take `COPY_SLOWDOWN_ERROR`), each by the inverse of its
variance. The variance of few ratios is itself uncertain; it is taken as that of
Student's distribution. A quiet device is measured, a noisy one is assumed, and
nothing jumps between.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ssdtrain.curves import COPY_SLOWDOWN, COPY_SLOWDOWN_ERROR
from ssdtrain.rebuild.clock import Clock
from ssdtrain.transfer.device import Copy, Device
from ssdtrain.transfer.pinned import Buffer, PinnedPool

PROBE_BYTES = 16 * 1024 * 1024
SIDE = 4096
"""Of the square matrices (fp16): 100 MB in all."""
RUN_MS = 10.0
"""Of products: the jitter of one event is 0.1 % of it."""
NUM_UNTIMED = 4
"""Products that run while the timed ones are launched."""
MOST_PRODUCTS = 256
NUM_ROUNDS = 6
LEAST_ROUNDS = 4
"""Fewer have no variance to speak of: Student's needs more than three."""
COVER = 1.25
"""Copies beside a run last this much longer than it, and `LEAD_MS`."""
LEAD_MS = 3.0
MOST_PROBE_MS = 160.0
"""Of one direction; a slower device gets fewer rounds, or none."""
NUM_DUPLEX = 8
NUM_EVENT_ROUNDS = 3
NUM_EVENTS = 40
"""In a run that has some."""
MOST_EVENT_MS = 0.02
"""More was no event's cost (H200: 0.005)."""
LEAST_MOVED_BYTES = 1 << 30
"""A step that moves less is not worth the probe, nor its memory."""
MEDIAN_VARIANCE = math.pi / 2.0
"""Of a median of normal noise, in that of a mean."""
SHARED_RUNS = 4.0 / 3.0
"""By which ratios are surer alone than together: neighbours share a run."""


class Estimate(NamedTuple):
    """A fraction, and its standard error."""

    value: float
    error: float


ASSUMED = Estimate(COPY_SLOWDOWN, COPY_SLOWDOWN_ERROR)


class Contention(NamedTuple):
    """By which fractions copies slow down compute and one another."""

    copy_slowdown: float = ASSUMED.value
    """By which copies in one direction slow compute down meanwhile."""
    duplex_slowdown: float | None = None
    """By which copies in both directions slow one another down; None: unknown."""
    copy_slowdown_error: float = ASSUMED.error
    event_ms: float = 0.0
    """What an event on the compute stream costs compute."""

    @property
    def how(self) -> str:
        """Whether the measurement or the assumption counts for more."""
        told = self.copy_slowdown_error**2 < ASSUMED.error**2 / 2.0
        return "measured" if told else "assumed"


def measure(
    device: Device, pool: PinnedPool, clock: Clock, copies: Sequence[Copy]
) -> Contention:
    """Probe the device, if it has its own copy engines and memory to spare.

    Args:
        copies: of the observed step; they say whether the probe is worth it.
    """
    moved = sum(copy.num_bytes for copy in copies)
    if device.memory() is None or moved < LEAST_MOVED_BYTES:
        return Contention()
    buffers = [pool.take(PROBE_BYTES, for_load=True) for _ in range(2)]
    taken = [buffer for buffer in buffers if buffer is not None]
    try:
        if len(taken) < 2:
            return Contention()
        return _Probe(device, clock, taken).run()
    except torch.OutOfMemoryError:
        return Contention()
    finally:
        for buffer in taken:
            buffer.settle()
            pool.give(buffer)


class _Probe:
    """Two device buffers, two pinned ones, three matrices."""

    def __init__(self, device: Device, clock: Clock, buffers: list[Buffer]) -> None:
        self._device = device
        self._clock = clock
        self._buffers = buffers
        where = device.torch_device
        self._there = torch.zeros(2, PROBE_BYTES, dtype=torch.uint8, device=where)
        self._factors = torch.ones(2, SIDE, SIDE, dtype=torch.float16, device=where)
        self._product = torch.empty(SIDE, SIDE, dtype=torch.float16, device=where)
        self._num_products = 1
        for buffer in buffers:
            buffer.settle()
        self._out(1)  # the first copies touch the pages
        self._last.synchronize()
        self._into(1)
        self._last.synchronize()

    def run(self) -> Contention:
        """Measure both fractions."""
        self._products()  # the first one chooses a kernel
        wanted = RUN_MS / max(self._products(), 1e-3)
        self._num_products = min(MOST_PRODUCTS, max(1, round(wanted)))
        found = believed([self._ratios(issue) for issue in (self._out, self._into)])
        return Contention(
            found.value, self._duplex(), found.error, event_ms(self._products)
        )

    def _out(self, num: int) -> None:
        for _ in range(num):
            host = self._buffers[0].memory[:PROBE_BYTES]
            now = self._device.now()
            self._last = self._device.copy_out(self._there[0], host, [now])
            self._buffers[0].busy[:] = [self._last]

    def _into(self, num: int) -> None:
        for _ in range(num):
            host = self._buffers[1].memory[:PROBE_BYTES]
            now = self._device.now()
            self._last = self._device.copy_in(host, self._there[1], [now])
            self._buffers[1].busy[:] = [self._last]

    def _products(self, num_events: int = 0) -> float:
        """Time a run of products, in ms, with so many events between them."""
        for _ in range(NUM_UNTIMED):
            self._multiply()
        start = self._clock.now()
        for product in range(self._num_products):
            self._multiply()
            left = self._num_products - product
            for _ in range(-(-num_events // left)):
                self._device.now()
                num_events -= 1
        return self._clock.ms_between(start, self._clock.now())

    def _multiply(self) -> None:
        torch.mm(self._factors[0], self._factors[1], out=self._product)

    def _ratios(self, issue: Callable[[int], None]) -> list[float]:
        """Return each round's ratio of the time beside copies to the time alone."""
        began = time.monotonic()
        copy_ms = max(self._copy_ms(issue), 1e-3)
        alone_ms, ratios = self._products(), []
        for _ in range(NUM_ROUNDS):
            if (time.monotonic() - began) * 1e3 > MOST_PROBE_MS:
                break
            issue(math.ceil((COVER * alone_ms + LEAD_MS) / copy_ms))
            beside_ms = self._products()
            covered = not self._last.query()
            self._last.synchronize()
            before_ms, alone_ms = alone_ms, self._products()
            if covered:
                ratios.append(2.0 * beside_ms / (before_ms + alone_ms))
        return ratios

    def _copy_ms(self, *issues: Callable[[int], None]) -> float:
        """Return the median ms of the copies that `issues` start side by side."""
        self._device.watch_copies()
        for _ in range(NUM_DUPLEX):
            for issue in issues:
                issue(1)
        for buffer in self._buffers:
            buffer.settle()
        return statistics.median(copy.ms for copy in self._device.watched_copies())

    def _duplex(self) -> float:
        alone = statistics.fmean(
            self._copy_ms(issue) for issue in (self._out, self._into)
        )
        both = self._copy_ms(self._out, self._into)
        return max(0.0, both / alone - 1.0)


def event_ms(run: Callable[[int], float]) -> float:
    """Return the median cost of an event: each run with events is compared with those
    without before and after it.

    Args:
        run: times a run with so many events, in ms.
    """
    found = []
    alone_ms = run(0)
    for _ in range(NUM_EVENT_ROUNDS):
        with_ms = run(NUM_EVENTS)
        before_ms, alone_ms = alone_ms, run(0)
        found.append((with_ms - (before_ms + alone_ms) / 2.0) / NUM_EVENTS)
    return min(MOST_EVENT_MS, max(0.0, statistics.median(found)))


def measured(ratios: Sequence[float]) -> Estimate | None:
    """Return the median slowdown of these ratios, which may be negative; None if they
    are too few for a variance."""
    num = len(ratios)
    if num < LEAST_ROUNDS:
        return None
    variance = statistics.variance(ratios) / num * (num - 1) / (num - 3)
    error = math.sqrt(variance * MEDIAN_VARIANCE * SHARED_RUNS)
    return Estimate(statistics.median(ratios) - 1.0, error)


def believed(directions: Sequence[Sequence[float]]) -> Estimate:
    """Return the fraction to plan with; see [Note: noise].

    Args:
        directions: ratios of each direction; their mean slowdown is sought.
    """
    found = [one for one in map(measured, directions) if one is not None]
    if not found:
        return ASSUMED
    value = statistics.fmean(one.value for one in found)
    variance = sum(one.error**2 for one in found) / len(found) ** 2
    trust = ASSUMED.error**2 / (ASSUMED.error**2 + variance)
    mean = ASSUMED.value + trust * (value - ASSUMED.value)
    return Estimate(max(0.0, mean), ASSUMED.error * math.sqrt(1.0 - trust))
