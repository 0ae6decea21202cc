"""A step of regions in which the device is held, for the plan of a CUDA graph.

A replay has no host, and where the host bounds eager steps their times are not the
device's: [Note: a held step of regions] in heldregions.py. Two steps tell them apart,
which run when somebody asks whether a graph may be captured. Each `yield` is one step
of training, and what they told is what the generator returns.
(tests/ssdtrain/observe/test_heldregions.py)
"""

from collections.abc import Generator

from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.cursor import Unobserved
from ssdtrain.observe.heldregions import HOLD_MS, HeldRegions, HeldTimes
from ssdtrain.observe.plainsteps import Steps
from ssdtrain.rebuild.clock import Clock
from ssdtrain.transfer.device import Device

NUM_EMPTY = 5
"""Times that nothing is timed; the least counts."""


def held_steps(cache: TensorCache) -> Generator[None, None, HeldTimes]:
    """Run one step that is looked at, and one that is held; all regions run again in
    both."""
    clock, device = cache.ledger.clock, cache.device
    looking = HeldRegions(clock, device)
    yield from _looked_at(cache, looking)
    holds_ms = looking.holds_ms()
    empty_ms = _empty_ms(clock, device)
    held = HeldRegions(clock, device, holds_ms)
    yield from _looked_at(cache, held)
    return held.told(empty_ms)


def _looked_at(cache: TensorCache, regions: HeldRegions) -> Steps:
    cache.cursor.observer = regions
    regions.start()
    try:
        yield
    finally:
        regions.stop()
        cache.cursor.observer = Unobserved()


def _empty_ms(clock: Clock, device: Device) -> float:
    """Return what a clock finds between two moments that nothing is between."""
    found = []
    for _ in range(NUM_EMPTY):
        device.hold(HOLD_MS)
        start = clock.now()
        found.append(clock.ms_between(start, clock.now()))
    return min(found)
