"""The steps after an observed one that tell what it takes without a plan.

They are told as they run: each `yield` is one step of training. Where everything fits,
steps run without hooks ([Note: the plain step] in plan/calibrate.py). Else all regions
run again ([Note: the step of regions] there): under the plan that does just that where
it fits, or as in the observed step. What these steps take is what every later plan is
compared with.

[Note: base steps]
In the first step under a plan its lanes are served by the general path, while their
tables are made: a region's call then takes the host five to ten times as long. So
nothing is measured in the first one (nor without a plan: ranks count the same). In the
next one the host's own time is measured, which takes it longer; the others tell how
long a step is, and one of them does where steps take a second and more.
(tests/ssdtrain/observe/test_measured.py)
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ssdtrain.cache.bypass import Bypass
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.cursor import Unobserved
from ssdtrain.cache.regioncall import REGION
from ssdtrain.observe.heldregions import HeldTimes, held_steps
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.observer import prices
from ssdtrain.observe.plainsteps import PlainSteps, Steps, in_place_of_hooks
from ssdtrain.observe.regionsteps import (
    Backwards,
    RegionStep,
    Reruns,
    fastest,
    least_host_ms,
)
from ssdtrain.observe.room import Room
from ssdtrain.observe.trials import LONG_MS
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.calibrate import (
    PLAIN_STEP,
    WITHOUT_RERUNS,
    Corrections,
    PlainTimes,
)
from ssdtrain.plan.forwards import most_host_ms
from ssdtrain.plan.plan import Plan, Prediction
from ssdtrain.plan.profile import HostCosts, Profile
from ssdtrain.plan.scaled import FIXED_SHARE, Growth
from ssdtrain.plan.simulate import Simulation
from ssdtrain.plan.timeline import Timeline

NUM_REGION_STEPS = 4
"""In which all regions run again: [Note: base steps]."""
HALF = 0.5
"""Of what a step took beyond its prediction: one is due to copies, the other to
hooks."""
MOST_FACTOR = 2.0
"""By which one step under a plan makes hooks more expensive at most."""


class Observed(NamedTuple):
    """The step that the others stand after."""

    profile: Profile
    saved_bytes: int


class Measured:
    """What was measured after the observed step, and the steps that measure it."""

    def __init__(
        self, cache: TensorCache, host: HostPrices, room: Room, peers: Peers
    ) -> None:
        self.corrections = Corrections()
        """To be made to the observed step."""
        self.plain: PlainTimes | None = None
        """Of a step without ssdtrain; None: none was measured."""
        self.regions_ms: float | None = None
        """Of a step in which all regions run again; as above."""
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
        self._held: tuple[Profile, HeldTimes] | None = None
        """What a held step told, and the observed one that it stands after."""

    # -- what is known ------------------------------------------------------------

    def observed_anew(self, *, is_other: bool) -> None:
        """Forget what says nothing of the step that was observed now. is_other: the
        plan was made for a step that saves other tensors."""
        self.corrections = replace(self.corrections, host_costs=None)
        self.regions_ms = None
        if is_other:
            self._backwards.clear()
            self.corrections = replace(
                self.corrections, held_regions={}, held_head_ms=0.0
            )

    def disappointed(self, prediction: Prediction, step_ms: float) -> None:
        """Steps of a plan took longer than it said: what it does is more expensive than
        it was believed to be. How much of it is due to copies and how much to the host
        nobody knows, so that both get more expensive; the next plan does less of
        either. Where region calls were believed to cost nothing, it is they."""
        lost_ms = step_ms - prediction.step_ms
        if lost_ms <= 0.0:
            return
        by, copies_ms, costs = self.corrections, 0.0, self._host.costs
        if by.host_costs is not None and not by.host_costs.region_ms:
            if costs is not None and costs.region_ms:
                self.corrections = replace(by, host_costs=costs)
                return
        for load in prediction.links.values():
            copies_ms += load.busy_ms
        slowdown = HALF * lost_ms / copies_ms if copies_ms else 0.0
        added_ms = max(prediction.step_ms - prediction.keep_ms, lost_ms / MOST_FACTOR)
        factor = min(MOST_FACTOR, 1.0 + HALF * lost_ms / added_ms)
        self.corrections = replace(
            by,
            copy_slowdown=min(1.0, by.copy_slowdown + slowdown),
            host_factor=by.host_factor * factor,
        )

    def match(self, profile: Profile, plan: Plan, step_ms: float) -> Profile:
        """Let region calls and kept tensors cost the host no more than what makes the
        steps of a plan that has nothing else as long as they were. By themselves they
        were timed in one step, in which the clock was looked at around each.

        Args:
            profile: the observed step, with the corrections so far.
            plan: the base.
            step_ms: what its steps took.

        Returns:
            The profile, with this one as well.
        """
        costs, own = self.corrections.host_costs, profile.host_costs
        if costs is None or not self._host.is_on_gpu:
            return profile

        def told_ms(part: float) -> float:
            timeline = Timeline(replace(profile, host_costs=_with_part(own, part)))
            return Simulation(timeline, plan.orders).run().step_ms

        whole_ms, least_ms, part = told_ms(1.0), told_ms(0.0), 0.0
        if whole_ms <= step_ms:
            return profile
        if least_ms < step_ms:
            part = (step_ms - least_ms) / (whole_ms - least_ms)
        costs = _with_part(costs, part)
        self.corrections = replace(self.corrections, host_costs=costs)
        return replace(profile, host_costs=_with_part(own, part))

    @property
    def lacks_regions(self) -> bool:
        """Whether steps of regions would say more: none is after the plain times, or
        they are those of such steps, and of before the steps drifted."""
        return self.plain is None or self.corrections.note == WITHOUT_RERUNS

    # -- the steps ----------------------------------------------------------------

    def begin(self, observed: Observed, *, without_hooks: bool) -> None:
        """Measure from the next step on. without_hooks: everything fits; else all
        regions run again."""
        steps = self._without_hooks if without_hooks else self._with_regions
        self._steps = steps(observed)

    def may_hold(self, profile: Profile) -> bool:
        """Whether held steps would tell the device's own times for a CUDA graph."""
        is_known = self._held is not None and self._held[0] is profile
        may = bool(profile.regions) and self._host.is_on_gpu and self._peers.is_alone
        return may and not is_known

    def begin_held(self, profile: Profile) -> None:
        """Have them measured from the next step on."""
        self._steps = self._hold(profile)

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

    def _with_regions(self, observed: Observed) -> Steps:
        steps: list[RegionStep] = []
        self._room.trim()  # see [Note: torn blocks]
        yield
        yield from self._region_step(steps, with_host=True)
        is_long = observed.profile.compute_ms >= LONG_MS
        for _ in range(1 if is_long else NUM_REGION_STEPS - 2):
            yield from self._region_step(steps, with_host=False)
        first, *own_steps = steps
        saved_bytes = observed.saved_bytes
        step = fastest(own_steps, saved_bytes)
        for each in own_steps:
            self._backwards.note(each.backward(observed.profile.tail_ms))
        self.fixed_share = self._backwards.fixed_share(saved_bytes)
        growth = Growth(fixed_share=self.fixed_share)
        self._host.price_regions(first.meter)
        rerun_ms = self._rerun_ms(observed, step, growth)
        rerun_host_ms = self._rerun_host_ms(observed.profile, own_steps)
        own = step.plain(saved_bytes, growth)
        host_ms = min(
            first.timer.host_forward_ms,
            most_host_ms(observed.profile, rerun_host_ms),
        )
        tails_ms = [step.tail_host_ms for step in own_steps]
        tail_ms = min((ms for ms in tails_ms if ms is not None), default=math.inf)
        # The slowest rank's, and the host that is the least ahead.
        late_ms, behind_ms = -own.host_lead_ms, step.behind_ms(saved_bytes, growth)
        regions_ms = step.times().step.step_ms * step.factor(saved_bytes, growth)
        times = own.step_ms, own.forward_ms, host_ms, late_ms
        found = self._peers.longest(
            (*times, tail_ms, behind_ms, regions_ms), "plain times", self._step
        )
        step_ms, forward_ms, host_ms, late_ms, tail_ms, behind_ms, regions_ms = found
        knows_tail = self._host.is_on_gpu and tail_ms < math.inf
        self._correct(
            PlainTimes(step_ms, forward_ms, host_ms, -late_ms), WITHOUT_RERUNS
        )
        self.regions_ms = regions_ms
        self.corrections = replace(
            self.corrections,
            rerun_ms=rerun_ms,
            rerun_host_ms=rerun_host_ms,
            tail_host_ms=tail_ms if knows_tail else None,
            behind_ms=behind_ms if behind_ms < math.inf else None,
        )

    def _region_step(self, steps: list[RegionStep], *, with_host: bool) -> Steps:
        """One more of them is measured. with_host: the host's time in hooks as well."""
        cache, ledger = self._cache, self._cache.ledger
        start = ledger.closed
        meter = self._host.listen() if with_host else None
        timer = cache.timer = Bypass(
            ledger.clock, lambda: 0 if meter is None else meter.spent_ns
        )
        reruns = cache.cursor.observer = Reruns(ledger.clock.now)
        ledger.clock.keep_spans = True
        try:
            yield
        finally:
            tail_host_ms = reruns.host_behind_ms()
            cache.cursor.observer = Unobserved()
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
        """The same for the host, in any of these steps; none where it is the device."""
        if not self._host.is_on_gpu:
            return {}
        spent = [step.reruns.spent_ns for step in steps if step.reruns is not None]
        places = _places(profile)
        own = [least_host_ms(spent, place) for place in places]
        found = self._peers.longest(own, "host times of regions", self._step)
        return _by_kind(places, found)

    def _hold(self, profile: Profile) -> Steps:
        told = yield from held_steps(self._cache)
        self._held = profile, told
        self.corrections = replace(self.corrections, **told._asdict())

    def _correct(self, plain: PlainTimes, note: str) -> None:
        """Take these as the times of a step without ssdtrain."""
        self.plain = plain
        self.corrections = Corrections(
            plain=tuple(plain),
            note=note,
            host_costs=self._host.costs,
            host_factor=self.corrections.host_factor,
            copy_slowdown=self.corrections.copy_slowdown,
            rebuild_ms=self.corrections.rebuild_ms,
            held_regions=self.corrections.held_regions,
            held_head_ms=self.corrections.held_head_ms,
        )


def _with_part(costs: HostCosts, part: float) -> HostCosts:
    """Return these costs, of what a plan has that moves nothing so many times."""
    keep = costs.keep.times(part)
    return replace(costs, keep=keep, region_ms=costs.region_ms * part)


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
