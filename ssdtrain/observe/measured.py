"""The steps behind an observed one that tell what it takes without ssdtrain.

They are told as they run: each `yield` is one step of training. Where everything fits
into device memory, steps run without hooks ([Note: the plain step] in
plan/calibrate.py), then one is timed mark by mark (paced.py). Else all regions run
again, as in the observed step ([Note: the step of regions] in plan/calibrate.py). Where
the host bounds them, some more are held (heldsteps.py).
(tests/ssdtrain/observe/test_measured.py, test_heldsteps.py)
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

from ssdtrain.cache.bypass import Bypass
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.course import Unobserved
from ssdtrain.cache.regions import REGION
from ssdtrain.observe.heldparts import room_ms
from ssdtrain.observe.heldsteps import HeldSteps
from ssdtrain.observe.heldtimes import HeldTimes
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.observer import prices
from ssdtrain.observe.paced import Paced
from ssdtrain.observe.plainsteps import PlainSteps, Steps, in_place_of_hooks
from ssdtrain.observe.regionsteps import (
    Backwards,
    RegionStep,
    Reruns,
    fastest,
    least_host_ms,
)
from ssdtrain.observe.room import Room
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.calibrate import (
    PLAIN_STEP,
    WITHOUT_RERUNS,
    Corrections,
    Pace,
    PlainTimes,
    without_readings,
)
from ssdtrain.plan.forwards import most_host_ms
from ssdtrain.plan.profile import HostCosts, Profile
from ssdtrain.plan.scaled import FIXED_SHARE, Growth

NUM_REGION_STEPS = 4
"""In which all regions run again. The first one starts on an idle device; the others
are measured."""
MOST_HELD = 2
"""Times that steps of regions are held. A graph has one shape; steps whose shapes
change are not captured."""
NUM_PACED = 3
"""Steps that are timed mark by mark at most: one that took several times a plain one
was disturbed, and would not be believed."""
LONGEST_HELD_MS = 600.0
"""A longer step is not held: all parts would take many seconds. The slowest host so far
made one of 259 ms out of 57."""
MOST_PACED_OF_RANKS = 1.05
"""Over a plain step, of ranks that wait for each other. That of a tensor parallel step
of 891 ms took 888 in one run, and 974 in another, in whose forward the host was never
ahead: nothing moved there."""


class Observed(NamedTuple):
    """The step that the others stand behind."""

    profile: Profile
    packs: list[int]
    """Calls of `pack` up to each mark."""
    saved_bytes: int


class Measured:
    """What was measured behind the observed step, and the steps that measure it."""

    def __init__(
        self, cache: TensorCache, host: HostPrices, room: Room, peers: Peers
    ) -> None:
        self.corrections = Corrections()
        """To be made to the observed step."""
        self.plain: PlainTimes | None = None
        """Of a step without ssdtrain; None: none was measured."""
        self.fixed_share = FIXED_SHARE
        """Part of the observed step's times that does not grow with its batch."""
        self._backwards = Backwards()
        self._cache = cache
        self._host = host
        self._room = room
        self._peers = peers
        self._steps: Steps | None = None
        """That are left."""
        self._step = -1
        self._held_before: dict[tuple[Any, ...], HeldTimes] = {}
        """What held steps of regions told, by the signature of the observed one: they
        take longer than others, and there are few of them."""
        self._idle_host_ms = float("inf")
        """Host time of the forward of regions that started on an idle device."""

    # -- what is known ------------------------------------------------------------

    def observed_anew(self, *, is_other: bool) -> None:
        """Forget what says nothing of the step that was observed now. is_other: the
        plan was made for a step that saves other tensors."""
        self.corrections = replace(self.corrections, host_costs=None)
        if is_other:
            self._backwards.clear()
            self.corrections = replace(
                self.corrections,
                pace=None,
                held_pace=None,
                held_regions={},
                held_head_ms=0.0,
            )

    def reprice(self, costs: HostCosts) -> None:
        """These are what hooks cost the host."""
        self.corrections = replace(self.corrections, host_costs=costs)

    def price_hooks(self, factor: float) -> None:
        """Hooks cost the host so many times what was known."""
        factor *= self.corrections.host_factor
        self.corrections = replace(self.corrections, host_factor=factor)

    def slow_copies(self, slowdown: float) -> None:
        """Copies slow compute down by this more than was known."""
        slowdown += self.corrections.copy_slowdown
        self.corrections = replace(self.corrections, copy_slowdown=slowdown)

    def slow_links(self, out: float, into: float) -> None:
        """Copies out and in take longer by these fractions than was known."""
        by = self.corrections
        self.corrections = replace(
            by,
            out_slowdown=(1.0 + by.out_slowdown) * (1.0 + out) - 1.0,
            in_slowdown=(1.0 + by.in_slowdown) * (1.0 + into) - 1.0,
        )

    @property
    def lacks_regions(self) -> bool:
        """Whether steps of regions would say more: none is behind the plain times, or
        they are those of such steps, and of before the steps drifted."""
        return self.plain is None or self.corrections.note == WITHOUT_RERUNS

    # -- the steps ----------------------------------------------------------------

    def begin(self, observed: Observed, *, without_hooks: bool) -> None:
        """Measure from the next step on. without_hooks: everything fits; else all
        regions run again."""
        steps = self._without_hooks if without_hooks else self._with_regions
        self._steps = steps(observed)

    def next_step(self, step: int) -> bool:
        """Take what the step that has ended told, and prepare the one that starts;
        False: all is measured, and it is none of these."""
        self._step = step
        for _ in self._steps or ():
            return True
        self._steps = None
        return False

    def stop(self) -> None:
        """Give up what is under way. Idempotent."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _without_hooks(self, observed: Observed) -> Steps:
        ledger, steps = self._cache.ledger, PlainSteps(self._cache.ledger.clock)
        plain: PlainTimes | None = None
        while plain is None:
            timer = steps.begin(ledger.closed)
            yield from in_place_of_hooks(self._cache, timer)
            steps.ended(timer, ledger.closed)
            if steps.round_is_over:
                # The slowest rank's, and the host that is the least ahead.
                found = self._peers.longest(steps.measured(), "plain times", self._step)
                plain = steps.believed(found)
        self._correct(plain, PLAIN_STEP)
        yield from self._paced(observed, plain)

    def _paced(self, observed: Observed, plain: PlainTimes) -> Steps:
        """One step is timed mark by mark; where the host bounds it, some are held."""
        ledger = self._cache.ledger
        found: list[tuple[Pace, float]] = []
        """With what the whole step took."""
        for _ in range(NUM_PACED):
            start = ledger.closed
            eager = Paced(
                self._cache,
                observed.profile,
                observed.packs,
                listens=self._host.is_on_gpu,
            )
            with closing(eager):
                yield from in_place_of_hooks(self._cache, eager)
            own_pace = eager.pace()
            if own_pace is not None:
                ms = ledger.clock.ms_between(start, ledger.closed)
                found.append((own_pace, ms))
            if not self.is_disturbed(own_pace, plain):
                break
        if not found:
            return
        pace, hooked_ms = min(found, key=lambda each: each[0].ms)
        self.corrections = replace(self.corrections, pace=pace)
        own = without_readings(plain, pace, observed.profile)
        if self.may_hold(is_hosted=own.is_hosted):
            yield from self._held(observed, pace, room_ms(plain.step_ms, hooked_ms))

    def is_disturbed(self, pace: Pace | None, plain: PlainTimes) -> bool:
        """Whether another step is to be timed; a CPU's may have more to do in hooks
        than besides. Several ranks are in the same one: each step that one of them
        would not believe is followed by another one of all.

        Args:
            pace: of the step that was timed; None: it was another one.
            plain: of the plain one.
        """
        if not self._host.is_on_gpu:
            return False
        if self._peers.is_alone:
            return pace is not None and not pace.is_like(plain)
        is_long = pace is not None and not pace.is_like(plain, MOST_PACED_OF_RANKS)
        found = self._peers.longest((float(is_long),), "paced again", self._step)
        return max(found) > 0.0

    def _held(self, observed: Observed, pace: Pace, most_ms: float) -> Steps:
        """Steps without hooks are held, and behind them rebuilds.

        Args:
            pace: of the step that was not held.
            most_ms: that the device may wait in a step.
        """
        held, profile = HeldSteps(self._cache, self._host), observed.profile
        own = yield from held.pace(profile, observed.packs, pace, most_ms)
        self.corrections = replace(self.corrections, held_pace=own)
        rebuild_ms = yield from held.rebuild_ms(profile, most_ms)
        self.corrections = replace(self.corrections, rebuild_ms=rebuild_ms)

    def _with_regions(self, observed: Observed) -> Steps:
        steps: list[RegionStep] = []
        for number in range(NUM_REGION_STEPS):
            yield from self._region_step(steps)
            if number < NUM_REGION_STEPS - 1:
                host_ms = steps[-1].timer.host_forward_ms
                self._idle_host_ms = min(self._idle_host_ms, host_ms)
        saved_bytes = observed.saved_bytes
        step = fastest(steps[1:], saved_bytes)
        for each in steps[1:]:
            self._backwards.note(each.backward(observed.profile.tail_ms))
        self.fixed_share = self._backwards.fixed_share(saved_bytes)
        growth = Growth(fixed_share=self.fixed_share)
        self._host.price_regions(step.meter)
        rerun_ms = self._rerun_ms(observed, step, growth)
        rerun_host_ms = self._rerun_host_ms(observed.profile, steps[1:])
        own = step.plain(saved_bytes, growth)
        host_ms = min(
            own.host_forward_ms,
            self._idle_host_ms,
            most_host_ms(observed.profile, rerun_host_ms),
        )
        tails_ms = [step.tail_host_ms for step in steps[1:]]
        tail_ms = min((ms for ms in tails_ms if ms is not None), default=math.inf)
        # The slowest rank's, and the host that is the least ahead.
        late_ms, behind_ms = -own.host_lead_ms, step.behind_ms(saved_bytes, growth)
        times = own.step_ms, own.forward_ms, host_ms, late_ms, tail_ms, behind_ms
        step_ms, forward_ms, host_ms, late_ms, tail_ms, behind_ms = self._peers.longest(
            times, "plain times", self._step
        )
        knows_tail = self._host.is_on_gpu and tail_ms < math.inf
        self._correct(
            PlainTimes(step_ms, forward_ms, host_ms, -late_ms), WITHOUT_RERUNS
        )
        self.corrections = replace(
            self.corrections,
            rerun_ms=rerun_ms,
            rerun_host_ms=rerun_host_ms,
            tail_host_ms=tail_ms if knows_tail else None,
            behind_ms=behind_ms if behind_ms < math.inf else None,
        )
        yield from self._held_regions(observed.profile)

    def _region_step(self, steps: list[RegionStep]) -> Steps:
        """One more of them is measured."""
        cache, ledger = self._cache, self._cache.ledger
        start = ledger.closed
        self._room.trim()  # see [Note: torn blocks]
        meter = self._host.listen()
        timer = cache.timer = Bypass(ledger.clock, lambda: meter.spent_ns)
        reruns = cache.course.observer = Reruns(ledger.clock.now)
        ledger.clock.keep_spans = True
        try:
            yield
        finally:
            tail_host_ms = reruns.host_behind_ms()
            cache.course.observer = Unobserved()
            ledger.clock.keep_spans = False
            cache.timer = None
            self._host.take()
        steps.append(
            RegionStep(
                timer=timer,
                start=start,
                end=ledger.closed,
                spans=ledger.clock.kept_spans(),
                stalls=ledger.stalls,
                meter=meter,
                num_bytes=ledger.saved_bytes,
                reruns=reruns,
                tail_host_ms=tail_host_ms,
            )
        )

    def _rerun_ms(
        self, observed: Observed, step: RegionStep, growth: Growth
    ) -> dict[str, tuple[float, ...]]:
        """Return what each region call took in this step, in the observed one's
        times."""
        factor = step.factor(observed.saved_bytes, growth)
        costs, places = prices(step.spans()), _places(observed.profile)
        own = [
            costs.get((kind, REGION, number), 0.0) * factor for kind, number in places
        ]
        found = self._peers.longest(own, "times of regions", self._step)
        return _by_kind(places, found)

    def _rerun_host_ms(
        self, profile: Profile, steps: Sequence[RegionStep]
    ) -> dict[str, tuple[float, ...]]:
        """Likewise for the host, in any of these steps; none where it is the device."""
        if not self._host.is_on_gpu:
            return {}
        spent = [step.reruns.spent_ns for step in steps if step.reruns is not None]
        places = _places(profile)
        own = [least_host_ms(spent, place) for place in places]
        found = self._peers.longest(own, "host times of regions", self._step)
        return _by_kind(places, found)

    def _held_regions(self, profile: Profile) -> Steps:
        """Some are held ([Note: a held step of regions]), where the host may bound
        them."""
        told = self._held_before.get(profile.signature())
        if told is None:
            may_hold = self.may_hold(is_hosted=self.corrections.may_be_hosted)
            if len(self._held_before) == MOST_HELD or not may_hold:
                return
            told = yield from HeldSteps(self._cache, self._host).regions()
            self._held_before[profile.signature()] = told
        self.corrections = replace(self.corrections, **told._asdict())

    def may_hold(self, *, is_hosted: bool) -> bool:
        """Whether held steps, which take longer, would show anything, and nobody waits
        for them.

        Args:
            is_hosted: whether the host may bound the step.
        """
        if self.plain is None or self.plain.step_ms > LONGEST_HELD_MS:
            return False
        return is_hosted and self._host.is_on_gpu and self._peers.is_alone

    def _correct(self, plain: PlainTimes, note: str) -> None:
        """Take these as the times of a step without ssdtrain."""
        self.plain = plain
        self.corrections = Corrections(
            plain=tuple(plain),
            note=note,
            host_costs=self._host.costs,
            host_factor=self.corrections.host_factor,
            copy_slowdown=self.corrections.copy_slowdown,
        )


def _places(profile: Profile) -> list[tuple[str, int]]:
    """Return all region calls: kind of lane, number."""
    return [
        (kind, number)
        for kind, runs in sorted(profile.regions.items())
        for number in range(len(runs))
    ]


def _by_kind(
    places: Sequence[tuple[str, int]], found: Sequence[float]
) -> dict[str, tuple[float, ...]]:
    kinds = dict.fromkeys(kind for kind, _ in places)
    return {
        kind: tuple(ms for (of, _), ms in zip(places, found, strict=True) if of == kind)
        for kind in kinds
    }
