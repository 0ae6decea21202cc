"""What copies cost compute, and one another: measured between two steps.

[Note: contention]
Matrix products are timed alone and beside copies in one direction, in turns, so that a
change of the clock rate meets both; the fastest of each counts, because interference of
copies is always there and that of anything else is not. Where products alone differ by
more than what is sought, nothing is concluded. A few tens of milliseconds, once a plan.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ssdtrain.remat.clock import Clock
from ssdtrain.transfer.device import Copy, Device
from ssdtrain.transfer.pinned import Buffer, PinnedPool

PROBE_BYTES = 16 * 1024 * 1024
SIDE = 4096
"""Of the square matrices (fp16): 100 MB in all."""
NUM_PRODUCTS = 8
NUM_ROUNDS = 8
NUM_DUPLEX = 8
LEAST_MOVED_BYTES = 1 << 30
"""A step that moves less is not worth the probe, nor its memory."""
MOST_NOISE = 0.01
"""Spread of the products alone above which their slowdown says nothing."""


class Contention(NamedTuple):
    """Fractions; None: could not be told."""

    copy_slowdown: float | None = None
    """By which copies in one direction slow compute down meanwhile."""
    duplex_slowdown: float | None = None
    """By which copies in both directions slow one another down."""


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
        for buffer in buffers:
            buffer.settle()
        self._out(1)  # the first copies touch the pages
        self._last.synchronize()
        self._into(1)
        self._last.synchronize()

    def run(self) -> Contention:
        """Both fractions."""
        self._products()
        slowdowns = [self._slowdown(issue) for issue in (self._out, self._into)]
        known = [found for found in slowdowns if found is not None]
        return Contention(
            statistics.fmean(known) if known else None,
            self._duplex(),
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

    def _products(self) -> float:
        """ms of a run of products."""
        start = self._clock.now()
        for _ in range(NUM_PRODUCTS):
            torch.mm(self._factors[0], self._factors[1], out=self._product)
        return self._clock.ms_between(start, self._clock.now())

    def _slowdown(self, issue: Callable[[int], None]) -> float | None:
        copy_ms = self._copy_ms(issue)
        alone, beside = [], []
        for _ in range(NUM_ROUNDS):
            alone.append(self._products())
            # One more millisecond: the copies begin while products are launched.
            issue(math.ceil((alone[-1] + 1.0) / copy_ms) + 1)
            beside.append(self._products())
            self._last.synchronize()
        return slowdown_of(alone, beside)

    def _copy_ms(self, *issues: Callable[[int], None]) -> float:
        """Middle time of one copy of those that the calls issue at once."""
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


def slowdown_of(alone: Sequence[float], beside: Sequence[float]) -> float | None:
    """The fraction by which the second are slower; None if the first are too noisy."""
    best = min(alone)
    if best <= 0.0 or statistics.median(alone) / best - 1.0 > MOST_NOISE:
        return None
    return max(0.0, min(beside) / best - 1.0)
