"""The steps in which the device is held, so that its own times show.

Where the host bounds the step its launches are taken for the device's times; these
steps tell them apart ([Note: a step that is held] in paced.py). Each `yield` is one
step of training, and what they told is what the generators return. Each has a part of
the holds: [Note: held in parts] in heldparts.py.
(tests/ssdtrain/observe/test_heldsteps.py, test_heldregions.py)
"""

from collections.abc import Generator
from dataclasses import replace

from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.course import Unobserved
from ssdtrain.cache.regions import Choice
from ssdtrain.observe.heldparts import HeldLooks, dealt, room_ms, together
from ssdtrain.observe.heldregions import HeldRegions
from ssdtrain.observe.heldtimes import HeldTimes, held_times, middle_ms
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.paced import HOLD_FACTOR, HOLD_MS, Paced
from ssdtrain.observe.plainsteps import Steps, in_place_of_hooks
from ssdtrain.observe.samples import Sampling, samplings
from ssdtrain.plan.calibrate import Pace
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.rule import KEEP_ALL
from ssdtrain.remat.budget import Span

NUM_EMPTY = 5
"""Times that nothing is timed; the least counts."""


class HeldSteps:
    """Runs them."""

    def __init__(self, cache: TensorCache, host: HostPrices) -> None:
        self._cache = cache
        self._host = host

    def pace(
        self, profile: Profile, packs: list[int], before: Pace, most_ms: float
    ) -> Generator[None, None, Pace | None]:
        """Steps that keep everything. None: nothing is known.

        Args:
            profile: as for `Paced`.
            packs: likewise.
            before: of the step that was not held.
            most_ms: that the device may wait in a step.
        """
        holds_ms = {
            each.start: HOLD_MS + HOLD_FACTOR * each.host_ms for each in before.segments
        }
        told: list[HeldLooks] = []
        for part in dealt(holds_ms, most_ms):
            held = Paced(self._cache, profile, packs, listens=False, holds_ms=part)
            yield from in_place_of_hooks(self._cache, held)
            own = held.pace()
            if own is None:
                return None
            told.append(HeldLooks(part, own))
        return together(before, told)

    def rebuild_ms(
        self, profile: Profile, most_ms: float
    ) -> Generator[None, None, dict[str, float]]:
        """Steps that keep what they have, but for some tensors, which are rebuilt each
        by itself: [Note: captured steps] in replays.py.

        Args:
            profile: whose rebuilds these are.
            most_ms: that the device may wait in a step.
        """
        items = [item for every in profile.kinds.values() for item in every]
        longest_ms = max((item.recipe_ms for item in items), default=0.0)
        if not longest_ms:
            return {}
        # They may take as long as their launches: that is how far ahead to be.
        if self._host.costs is not None:
            longest_ms = max(longest_ms, self._host.costs.rebuild.use_ms)
        hold_ms = HOLD_MS + HOLD_FACTOR * longest_ms
        least_bytes = self._cache.limits.least_bytes
        spans: list[Span] = []
        most = int(most_ms / (hold_ms + longest_ms))
        for sampling in samplings(profile, least_bytes, most):
            yield from self._rebuilding(sampling, hold_ms)
            spans += self._cache.ledger.clock.last_spans()
        return middle_ms(spans, self._empty_ms())

    def _rebuilding(self, sampling: Sampling, hold_ms: float) -> Steps:
        cache, clock = self._cache, self._cache.ledger.clock
        rule = cache.course.rule
        cache.course.rule = replace(KEEP_ALL, few=sampling)
        cache.regions.choice = Choice.PLANNED  # there is no plan: none runs again
        clock.keep_spans = True
        clock.before_rebuild = lambda: cache.device.hold(hold_ms)
        try:
            yield
        finally:
            clock.keep_spans = False
            clock.before_rebuild = None
            cache.course.rule = rule

    def regions(self) -> Generator[None, None, HeldTimes]:
        """Steps in which all regions run again, behind one that is looked at."""
        ledger, device = self._cache.ledger, self._cache.device
        clock, start = ledger.clock, ledger.closed
        looking = HeldRegions(clock, device)
        yield from self._looked_at(looking)
        step_ms = clock.ms_between(start, ledger.closed)
        holds_ms = dict(enumerate(looking.holds_ms()))
        totals_ms = {number: sum(own.values()) for number, own in holds_ms.items()}
        empty_ms, told = self._empty_ms(), []
        for part in dealt(totals_ms, room_ms(step_ms, step_ms)):
            own = {look: ms for each in part for look, ms in holds_ms[each].items()}
            held = HeldRegions(clock, device, own)
            yield from self._looked_at(held)
            told.append(held.told(empty_ms))
        return held_times(told, empty_ms)

    def _looked_at(self, regions: HeldRegions) -> Steps:
        """One step of regions is looked at."""
        self._cache.course.observer = regions
        regions.start()
        try:
            yield
        finally:
            regions.stop()
            self._cache.course.observer = Unobserved()

    def _empty_ms(self) -> float:
        """Return what a clock finds between two moments that nothing is between."""
        device, clock = self._cache.device, self._cache.ledger.clock
        found = []
        for _ in range(NUM_EMPTY):
            device.hold(HOLD_MS)
            start = clock.now()
            found.append(clock.ms_between(start, clock.now()))
        return min(found)
