"""`plan="auto"`: observe a step, try plans, follow the best, look again now and then.

The first steps move everything that can move and wait where they must, so they fit
wherever full offloading fits. Plans change at step boundaries only.

[Note: the safe start]
Where device memory is limited, all regions run again in the steps before the first plan
([Note: regions] in regioncall.py). A region's tensors are then alive only while its
forward runs, the first time or again, and what is seen of them there is the
observation: their sizes and recipes in forward, the times of forward and backward, and
what the re-run takes and needs. So these steps need what checkpointing with moved
inputs needs, and no host memory for all activations.
(tests/ssdtrain/regions/test_planned.py)

[Note: the base]
After the observed step comes what plans are compared with. Where everything fits it is
the step without hooks; under a memory limit nothing else is looked for then. Else it is
the step in which all regions run again and the rest stays, which needs what
checkpointing needs and takes what it takes: the first plan in force, and the one that
comes back where none is faster. Where that is too much for the limit, the first of what
regions read leaves, as much as must: copies of so little are over long before backward.
An observed step holds what backward asked for until its operator's gradients are
summed, a re-run does not: so that base may need less than was told, and where all
regions again fit by as much, they are the base after all. Where the limit leaves room
for some regions, they stay while a plan is searched for (`fewest_again`): that needs no
price, as it does nothing but leave out re-runs.
(tests/ssdtrain/observe/test_tries.py)
"""

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from torch import nn

from ssdtrain.cache.bypass import Unhooked
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.regions import Choice
from ssdtrain.counters import Trace
from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import dumps
from ssdtrain.observe.adoption import Adoption
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.largest import LargestBatch
from ssdtrain.observe.measured import Measured, Observed
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.observation import Observation
from ssdtrain.observe.room import Room
from ssdtrain.observe.searching import Searching
from ssdtrain.observe.smaller import SmallerPlans
from ssdtrain.observe.start import SafeStart
from ssdtrain.observe.steptimes import StepTimes
from ssdtrain.observe.strays import Strays
from ssdtrain.observe.tightened import Tightened
from ssdtrain.observe.trials import (
    MOST_TRIES,
    Stopwatch,
    Trials,
    Tried,
    Verdict,
    most_ms,
    noise_of,
    steps_of_a_try,
    typical,
)
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.calibrate import Corrections, corrected
from ssdtrain.plan.choose import QUICK_MARKS, SEARCH_MARKS, choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.replays import UNHELD, captured
from ssdtrain.plan.rule import Rule
from ssdtrain.plan.scaled import Growth, scaled
from ssdtrain.plan.search import Answer, Request
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.plan.unsearched import (
    ALL_AGAIN,
    RegionBytes,
    all_again,
    all_again_moving,
    fewest_again,
    keeping_all,
    left_free,
    region_bytes,
    runs_always,
    staying,
)
from ssdtrain.transfer.direct import DirectOffloader

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 1
"""Steps before the first observation: kernels are chosen and pools are filled."""
MAX_ATTEMPTS = 3
"""Observations in a row that may fail before the policy is left alone."""
TOLERANCE = 0.01
"""By which the plan that runs all regions again may seem to need more than the budget:
what is next to its saved tensors was measured in a step that held more of them."""
HANDLES = 0.009
"""The same, of its steps: what checkpointing needs may be the budget, and it needs a
little more."""
MOST_DOUBT = 0.1
"""The same, where no other plan fits: then it is measured before it is refused."""
MOST_OTHERS = 2
"""Plans in a row that may serve no steps."""
FIRST_LOOK = 100
"""Steps under the best plan before the next best one is timed again, once more after
twice as many, and so on."""
DIRECT = "a drive reads and writes device memory"
"""Why segments do not grow: [Note: growing segments] in transfer/allocator.py."""
NOT_HELD = (
    "no step was held: a graph's plan counts with the times of the eager step, and may "
    "cost more than it says"
)


class Purpose(Enum):
    """What the running step is for."""

    WARM_UP = auto()
    """> OBSERVING."""
    OBSERVING = auto()
    """> BASE or SEARCHING, or OBSERVING again if the step could not be planned."""
    BASE = auto()
    """Is measured, and what others are compared with: [Note: the base]. > SEARCHING."""
    HELD = auto()
    """The device is held, for the plan of a CUDA graph. > SEARCHING or FOLLOWING."""
    SEARCHING = auto()
    """The first plan is searched for during training, which goes on as in BASE.
    > TRYING."""
    TRYING = auto()
    """A plan is timed: [Note: tries] in trials.py. > FOLLOWING."""
    FOLLOWING = auto()
    """The best plan is. > TRYING if another one comes, OBSERVING if steps save other
    tensors."""
    RESTING = auto()
    """No plan can be made; the policy decides. Final."""


class Planner:
    """Decides at the start of every step what the step is for.

    Args:
        peers: the ranks that must follow the same plan.
        notes: for the profile.
        first_regions: while there is no plan: [Note: the safe start].
    """

    def __init__(
        self,
        cache: TensorCache,
        goal: Goal,
        peers: Peers,
        trace: Trace,
        roots: Sequence[nn.Module],
        notes: dict[str, str],
        first_regions: Choice = Choice.NONE,
    ) -> None:
        self.plan: Plan | None = None
        self.num_plans = 0
        is_direct = isinstance(cache.offloader, DirectOffloader)
        self.room = Room(cache.device, DIRECT if is_direct else "")
        self._cache = cache
        self._peers = peers
        self._first_regions = first_regions
        cache.regions.run_again(first_regions)
        self._goal = Tightened(goal)
        self._host = HostPrices(cache)
        self._observation = Observation(
            cache, self._host, self.room, trace, roots, notes
        )
        self.start = SafeStart(cache, self._goal, self._observation, roots)
        self._measured = Measured(cache, self._host, self.room, peers)
        self._largest = LargestBatch(cache, self._goal, peers)
        self._memory = MemoryGoal(
            cache, self._goal, self.room, self._observation, peers
        )
        self._times = StepTimes(cache)
        self._trials = Trials()
        self._strays = Strays()
        self._searching = Searching(cache.device, peers)
        self._adoption = Adoption(cache, peers)
        self._smaller = SmallerPlans(cache)
        self._stage = Purpose.WARM_UP
        self._step = -1
        self._attempts = 0
        self._seen: Profile | None = None
        """The last step that was observed."""
        self._corrected: tuple[Profile, Corrections, Profile] | None = None
        """That step, with these corrections."""
        self._planned: tuple[Any, ...] = ()
        """Signature of the profile that `plan` was made for."""
        self._stopwatch: Stopwatch | None = None
        """Of the plan that is tried."""
        self._is_searched = True
        """Whether that one was searched for."""
        self._found: Answer | None = None
        """What was found meanwhile, if it is no plan to follow."""
        self._again: Tried | None = None
        """A plan that was tried before, and is timed again; what the best one took
        until now."""
        self._next_look = FIRST_LOOK
        self._effort = SEARCH_MARKS
        """Of the last search."""
        self._too_large: Plan | None = None
        """A plan that went beyond the memory limit, until another one is found."""
        self._spared_bytes = 0
        """By how much steps of all regions again need less than they are told to."""
        self._num_others = 0
        """How often in a row steps saved other tensors than a plan that served none."""
        self._rests_within: Goal | None = None
        """What steps are judged by in which all regions run again without a plan."""
        self._refusal = ""
        """Why no plan can be made, while all regions again are tried nevertheless."""
        self._is_given = False
        """Whether the plan that is taken next is one of an earlier run."""
        self._wants_graph = False
        self._captured: tuple[Profile, Corrections, Plan | None] | None = None
        """The plan that CUDA graphs hold, and what it was made for."""

    # -- what others ask -----------------------------------------------------------

    @property
    def profile(self) -> Profile | None:
        """The observed step, with what was measured since; what plans are made for."""
        return None if self._seen is None else self._known(self._seen)

    def _known(self, seen: Profile) -> Profile:
        """Return the step that was observed, with what was measured since."""
        by, known = self._measured.corrections, self._corrected
        if known is None or known[0] is not seen or known[1] is not by:
            known = self._corrected = seen, by, corrected(seen, by)
        return known[2]

    @property
    def stage(self) -> Purpose:
        """What the running step is for."""
        return self._stage

    @property
    def is_settled(self) -> bool:
        """Whether the best plan is followed, and none is searched for or tried."""
        if self._is_awaited or self._smaller.is_searching:
            return False
        return self._stage in (Purpose.FOLLOWING, Purpose.RESTING)

    def may_capture(self) -> bool:
        """Whether what a CUDA graph's plan is made of is known, or none can be made.
        Where the device's own times are missing, the next steps measure them."""
        self._wants_graph = True
        seen = self._seen
        if self._stage is Purpose.RESTING:
            return True
        known = (Purpose.SEARCHING, Purpose.TRYING, Purpose.FOLLOWING)
        if self._stage not in known or seen is None:
            return False
        return not self._measured.may_hold(seen)

    # -- steps ---------------------------------------------------------------------

    def step_starts(self, num_steps: int) -> None:
        """Decide what the step is for whose first forward runs next.

        Args:
            num_steps: steps that have ended.

        Raises:
            ConfigError: the memory limit cannot be reached.
        """
        with self._cache.collector.held():
            self._step_starts(num_steps)

    def _step_starts(self, num_steps: int) -> None:
        self._searching.step_starts()
        if num_steps == self._step:
            if self._stage is Purpose.OBSERVING:
                self._observe()  # a forward without a backward: begin again
            self._cache.cursor.step_starts()
            return
        self._step = num_steps
        self._largest.step_ended()
        self._times.step_starts()
        self._smaller.step_starts()
        acts: dict[Purpose, Callable[[], object]] = {
            Purpose.WARM_UP: self._warm_up,
            Purpose.OBSERVING: self._conclude,
            Purpose.BASE: self._measure,
            Purpose.HELD: self._measure,
            Purpose.SEARCHING: self._await_plan,
            Purpose.TRYING: self._try,
            Purpose.FOLLOWING: self._follow,
            Purpose.RESTING: self._check_rest,
        }
        if self._stage in acts:
            acts[self._stage]()
        self._cache.cursor.step_starts()
        self._predict()

    def follow(self, plan: Plan) -> None:
        """Follow this plan from the next step on, and observe no more."""
        self.close()
        self.plan = plan
        self._rest(Purpose.RESTING)
        self._hand_over(plan)

    def begin_with(self, plan: Plan, profile: Profile) -> None:
        """Follow the plan of an earlier run, made for this profile, as soon as pinned
        memory is there; observe when steps save other tensors."""
        self.close()
        self._seen = profile
        self._host.costs = profile.host_costs
        self._rest(Purpose.SEARCHING)
        self._is_given = True
        self._adoption.take(plan)
        if self._peers.is_alone:  # else all ranks follow it in the next step
            self._prepare(profile)

    def close(self) -> None:
        """Remove what an unfinished observation left. Idempotent."""
        self._stop_search()
        self._searching.clear()
        self._smaller.close()
        self._measured.stop()
        self._observation.stop()
        self._cache.bypass = None

    # -- observing -----------------------------------------------------------------

    def _warm_up(self) -> None:
        if self._step >= NUM_WARM_UPS:
            self._check_memory()
            self._observe()
        elif self._goal.goal.device_bytes is not None:
            self._record()  # whether it fits must be known before the second step

    def _observe(self) -> None:
        self._largest.restart()
        self._smaller.stop()
        self._stop_search()
        self._stage = Purpose.OBSERVING
        self._record()

    def _observe_others(self) -> None:
        """Steps save other tensors than the plan expects: observe one of them. Where
        that was of no use, as layers are skipped at random, regions run again, but for
        those that there is room for, and the rest stays: that needs no plan, and at
        most what all layers need."""
        self._num_others = 1 if self._strays.has_served else self._num_others + 1
        seen, may = self._seen, self._goal.goal.is_by_memory and self._peers.is_alone
        if self._num_others < MOST_OTHERS or not may or seen is None:
            logger.info("ssdtrain: steps save other tensors: observing")
            self._observe()
        elif any(seen.regions.values()):
            logger.info("ssdtrain: no two steps are alike: regions run again")
            plan = self._all_again()
            stays = plan is not None and plan.moves_nothing
            self.close()
            self.plan = None
            self._rest(Purpose.RESTING)
            self._rest_again(Placement.KEEP if stays else Placement.OFFLOAD)
            if stays:
                self._let_stay(seen)
            self._rests_within = self._goal_within(is_all=True)
            self._memory.planned()
        else:
            self._observe()

    def _let_stay(self, seen: Profile) -> None:
        """Without a plan: let those regions stay that the limit leaves room for, by
        their paths, as their numbers are others in each step. Those that this step
        skipped may come: one may run again while all of the others stay."""
        profile, goal = self._known(seen), self._goal.goal
        skipped = self._skipped(profile)
        spare_bytes = max((needs.saved for needs in skipped), default=0)
        spare_bytes += goal.spare_bytes + sum(needs.read for needs in skipped)
        plan = fewest_again(
            profile,
            self._larger(profile),
            replace(goal, budget_margin=TOLERANCE, spare_bytes=spare_bytes),
        )
        stays = frozenset() if plan is None else staying(profile, plan)
        self._cache.regions.run_again(Choice.ALL, stays)

    def _skipped(self, profile: Profile) -> list[RegionBytes]:
        """Return what each region needs that earlier steps have called, and this one
        has not: the most that one of its class does, or else any."""
        found, met = region_bytes(profile), self._cache.regions.met
        most: dict[type | None, RegionBytes] = {}
        for path, needs in found.items():
            for kind in (met.get(path), None):
                most[kind] = max(most.get(kind, needs), needs)
        skipped = [kind for path, kind in met.items() if path not in found]
        return [most.get(kind) or most[None] for kind in skipped if most]

    def _skipped_bytes(self, profile: Profile) -> int:
        """Return what those regions need where all of them stay."""
        return sum(needs.saved + needs.read for needs in self._skipped(profile))

    def _check_rest(self) -> None:
        """Have less stay if steps without a plan need too much."""
        goal, seen = self._rests_within, self._seen
        if goal is None or seen is None:
            return
        over_bytes, regions = self._memory.over_bytes(goal), self._cache.regions
        if over_bytes and regions.staying:
            own = self._goal.goal
            may, spare_bytes = self._goal.can_be, own.spare_bytes + over_bytes
            self._goal.tighten(replace(own, spare_bytes=spare_bytes))
            regions.run_again(Choice.ALL)
            if may:
                self._let_stay(seen)
            self._memory.planned()
        elif over_bytes:
            logger.info("ssdtrain: steps need too much: what regions read leaves")
            self._rests_within = None
            self._rest_again(Placement.OFFLOAD)

    def _rest_again(self, placement: Placement) -> None:
        rebuilds = placement is not Placement.KEEP
        rule = Rule(placement, spares_held=True, rebuilds=rebuilds)
        self._unplanned(Choice.ALL, rule)

    def _record(self) -> None:
        self._unplanned(self._first_regions, Rule(spares_held=True))
        self._observation.begin()

    def _unplanned(self, choice: Choice, rule: Rule) -> None:
        """Steps have hooks and no plan."""
        cache = self._cache
        cache.cursor.rule, cache.cursor.plan = rule, None
        cache.bypass = None
        cache.regions.run_again(choice)

    def _check_memory(self) -> None:
        """Check by the first step's memory that a plan fits, and the next step, which
        has none. Searches on this thread: without an answer there must be no second
        step.

        Raises:
            ConfigError: none does; the text says by how much and where.
        """
        if not self._observation.is_under_way:
            return
        profile = self._observation.end(is_first=True, is_cold=True)
        memory = self._cache.ledger.start_level()
        if profile is None or memory is None:
            return
        # The optimizer makes its state at the end of the first step.
        base_bytes = max(profile.base_bytes, memory.allocated_bytes)
        rest_bytes = max(0, profile.base_bytes + profile.rest_bytes - base_bytes)
        choose(
            replace(profile, base_bytes=base_bytes, rest_bytes=rest_bytes),
            self._goal.goal,
            QUICK_MARKS,
        )
        self.start.check(base_bytes)

    def _conclude(self) -> None:
        self._largest.observed()
        is_last = self._attempts == MAX_ATTEMPTS - 1
        own = self._observation.end(is_first=not self._attempts, is_last=is_last)
        profile = self._peers.agreed(own, self._step, is_last=is_last)
        if profile is None:
            self._attempts += 1
            if not is_last:
                self._observe()
                return
            logger.info("ssdtrain: no plan; this model's steps cannot be observed")
            self._rest(Purpose.RESTING)
            return
        self._attempts = self._spared_bytes = 0
        self._seen = profile
        if self._must_rest():
            return
        is_other = bool(self._planned) and self._planned != profile.signature()
        self.plan = None
        self._measured.observed_anew(is_other=is_other)
        self._trials.forget()
        self._memory.look_at_device(self._step)
        if self._begin_base(profile):
            self._measure()
        elif self._stage is not Purpose.FOLLOWING:
            self._plan()

    @property
    def _meets_unknown(self) -> bool:
        """Whether this rank, with a plan of its own, would meet others in their
        collectives: [Note: one step for all] in engines/peers.py."""
        seen, peers = self._seen, self._peers
        if seen is None or not seen.communicates:
            return False
        return peers.is_alone or not peers.agree  # alone: nobody knows whom they meet

    def _must_rest(self) -> bool:
        """Rest where ranks that do not agree would meet. Return whether."""
        if not self._meets_unknown:
            return False
        logger.warning(
            "ssdtrain: no plan; modules that run again communicate, and the ranks do "
            "not agree on one plan. Name modules without collectives (regions=...), or "
            "set recompute='off'"
        )
        self._rest(Purpose.RESTING)
        return True

    # -- the base ------------------------------------------------------------------

    def _begin_base(self, profile: Profile) -> bool:
        """Measure what plans are compared with from the next step on; False: there is
        nothing to measure, or everything fits a memory limit, and is followed."""
        by_memory = self._goal.goal.is_by_memory
        self._largest.plan_for_it()
        skipped_bytes = self._skipped_bytes(profile)
        may = self._memory.fits_plain(self._larger(profile), skipped_bytes)
        may = may and not (by_memory and runs_always(profile))
        # All of them, or the others would wait for the slowest in a step of theirs.
        fits = self._peers.all_agree(may, "plain", self._step)
        if fits and by_memory:
            self._take_over(keeping_all(profile))
            return False
        wants_plain = fits and self._measured.plain is None
        # What all regions need fitted into the observed step. Behind a plan that steps
        # drifted from, what was measured before it is not believed either.
        may = self._measured.lacks_regions and bool(profile.regions)
        if not (wants_plain or self._peers.all_agree(may, "regions", self._step)):
            return False
        self._rest(Purpose.BASE)
        told = self._observation
        self._measured.begin(
            Observed(profile, told.saved_bytes), without_hooks=wants_plain
        )
        if not wants_plain and by_memory:
            self._run_all_again()
        return True

    def _run_all_again(self) -> None:
        """Follow the plan that runs all regions again, if that fits."""
        plan = self._all_again()
        if plan is not None:
            self._follow_base(plan)

    def _follow_base(self, plan: Plan) -> None:
        self.plan = plan
        self._largest.planned()
        self._hand_over(plan)
        self._memory.planned()
        if not plan.moves_nothing:
            self._memory.show_peak()
        self.num_plans += 1
        logger.info("ssdtrain: plan %d: %s", self.num_plans, plan.policy)

    def _measure_base(self, plan: Plan, seen: Profile) -> bool:
        self._follow_base(plan)
        observed = Observed(seen, self._observation.saved_bytes)
        self._measured.begin(observed, without_hooks=False)
        return self._measured.next_step(self._step)

    def _all_again(self) -> Plan | None:
        """Return the plan that runs all regions again, and moves no more of what they
        read than it must; None: it does not fit."""
        seen = self._seen
        if seen is None or not self._goal.goal.is_by_memory:
            return None
        profile = self._known(seen)
        larger = self._larger(profile)
        goal = near = self._goal.goal.grown(self._largest.planned_ratio)
        if self._peers.agree:
            # What it needs is nearly known, and a step beyond is seen.
            spare_bytes = goal.spare_bytes - self._spared_bytes
            near = replace(goal, budget_margin=-TOLERANCE, spare_bytes=spare_bytes)
        plan = all_again(profile, larger, near)
        return plan or all_again_moving(profile, larger, goal)

    def _try_all_again(self) -> bool:
        """Measure all regions again though no plan seems to fit the budget; False: they
        seem to need far more. Checkpointing needs no more than they do, and what it
        needs is often the budget."""
        seen, goal = self._seen, self._goal.goal
        if seen is None or not self._peers.is_alone or goal.memory_budget_bytes is None:
            return False
        profile = self._known(seen)
        near = replace(goal, budget_margin=-MOST_DOUBT)
        plan = all_again(profile, self._larger(profile), near)
        if plan is None:
            return False
        self._rest(Purpose.BASE)
        return self._measure_base(plan, seen)

    def _larger(self, profile: Profile) -> Profile:
        """Return the profile of the largest batches, which are planned for."""
        ratio, seen = self._largest.planned_ratio, self._seen
        if ratio == 1.0 or seen is None:
            return profile
        return scaled(profile, ratio, self._growth_of(seen))

    def _take_over(self, plan: Plan) -> None:
        """Follow a plan that needs no comparison from the next step on."""
        if self._seen is not None:
            self._planned = self._seen.signature()
        self._largest.planned()
        self.num_plans += 1
        told = 0.0 if plan.prediction is None else plan.prediction.step_ms
        self._trials.follow(Tried(plan, told))
        self._follow_best()

    def _measure(self) -> None:
        if self._stage is Purpose.BASE and self.plan is not None:
            if self._is_exceeded(self.plan):
                return
        if self._measured.next_step(self._step):
            return
        if self._stage is Purpose.HELD:
            self._follow_best()
            return
        self._refusal = ""
        if self._needs_less():
            return
        regions_ms, plan, seen = self._measured.regions_ms, self.plan, self._seen
        own_ms = 0.0
        if plan is not None and seen is not None and regions_ms is not None:
            profile = self._measured.match(self._known(seen), plan, regions_ms)
            self._corrected = seen, self._measured.corrections, profile
            prediction = simulate(Timeline(profile), plan.orders)
            self.plan, own_ms = replace(plan, prediction=prediction), prediction.step_ms
        # Or ranks would not agree on which plans are worth a try.
        (told_ms,) = self._peers.longest((own_ms,), "base", self._step)
        if self.plan is not None and regions_ms is not None:
            self._trials.follow(Tried(self.plan, regions_ms, told_ms=told_ms))
        self._plan()

    def _needs_less(self) -> bool:
        """Whether steps of a base that moves what regions read have needed so much less
        than was told that no such move is needed: that is measured from now on."""
        plan, seen = self.plan, self._seen
        if plan is None or seen is None or plan.moves_nothing or self._spared_bytes:
            return False
        if plan.prediction is None or len(seen.lanes) > 1:
            return False  # of several, the maximum is that of the first backward
        told, own = plan.prediction, self._memory.needed_bytes()
        known = math.inf if own is None else float(own)
        (needed,) = self._peers.longest((known,), "needed", self._step)
        if needed == math.inf:
            return False
        self._spared_bytes = max(0, told.peak_bytes - int(needed))
        base = self._all_again() if self._spared_bytes else None
        if base is None or not base.moves_nothing:
            return False
        return self._measure_base(base, seen)

    def _hold(self) -> bool:
        """Have the next steps held, if a CUDA graph is wanted; whether they are."""
        seen = self._seen
        if not self._wants_graph or seen is None or not self._measured.may_hold(seen):
            return False
        if self._is_awaited:
            return False
        cache = self._cache
        self._stage = Purpose.HELD
        cache.cursor.rule = Rule(spares_held=True)
        cache.cursor.plan, cache.bypass = None, None
        cache.regions.run_again(Choice.ALL)
        self._measured.begin_held(seen)
        self._measured.next_step(self._step)
        return True

    def _rest(self, stage: Purpose) -> None:
        self._stage = stage
        self._times.restart()
        self._cache.regions.run_again(self._first_regions)
        # A limit holds for what no plan knows as well: it waits rather than stays.
        waits = self._goal.goal.is_by_memory and stage is not Purpose.RESTING
        away = Placement.OFFLOAD if waits else Placement.OFFLOAD_IF_IN_TIME
        self._cache.cursor.rule = Rule(away, spares_held=True)

    # -- searching -----------------------------------------------------------------

    def _plan(self) -> None:
        """Start to search for a plan for the last profile. Steps go on as they were
        until it is found."""
        profile = self._seen
        if profile is None:
            return
        self._stop_search()
        if self._must_rest():
            return
        if self._trials.best is None:
            self.plan = None
            # Asked again: the plain step may have been one of smaller batches.
            may = self._measured.plain is not None and not self._goal.goal.is_by_memory
            fits = may and self._memory.fits_plain(profile)
            self._cache.bypass = Unhooked() if fits else None
            self._rest(Purpose.SEARCHING)
        else:
            self._stage = Purpose.SEARCHING
        self._largest.plan_for_it()
        best = self._trials.best
        is_base = best is not None and best.plan.policy == ALL_AGAIN
        fewer = self._fewest_again() if is_base else None
        self._begin_search(SEARCH_MARKS, fewer)
        if fewer is not None:
            self._try_unsearched(fewer, profile)
        elif self._stage is Purpose.SEARCHING:
            self._plan_by_size()

    def _fewest_again(self) -> Plan | None:
        """Return the plan under which no more regions run again than must, and nothing
        moves; None: all of them must, or plans are not tried during a search, or not
        all ranks would run the same ones."""
        seen = self._seen
        if not self._goal.goal.is_by_memory or seen is None:
            return None
        if not self._peers.agree or not self._cache.device.runs_beside:
            return None
        profile = self._known(seen)
        goal = self._goal.goal.grown(self._largest.planned_ratio)
        spare_bytes = goal.spare_bytes + self._skipped_bytes(profile)
        goal = replace(goal, budget_margin=TOLERANCE, spare_bytes=spare_bytes)
        plan = fewest_again(profile, self._larger(profile), goal)
        own = 0 if plan is None else zlib.crc32(repr(plan.orders).encode())
        most, least = self._peers.longest((own, -own), "fewest", self._step)
        return plan if most == -least else None

    def _try_unsearched(self, plan: Plan, seen: Profile) -> None:
        self._count(plan, seen)
        self._begin_try(plan, is_searched=False)

    def _count(self, plan: Plan, seen: Profile) -> None:
        """One more plan was made for this step."""
        self._planned = seen.signature()
        self._largest.planned()
        self.num_plans += 1
        logger.info("ssdtrain: plan %d: %s", self.num_plans, plan.policy)

    def _begin_search(self, effort: int, tried: Plan | None = None) -> None:
        """tried: meanwhile, instead of the plan in force."""
        if self._seen is None:
            return
        request = self._request(self._seen)
        if tried is not None:
            request = replace(request, plan=tried)
        self._effort = effort
        answer = self._searching.begin(request, effort)
        if answer is not None:
            self._take_answer(answer)
            self._follow_taken(is_now=True)

    def _search_longer(self) -> None:
        """Where a plan was wanted soon and is followed now, search for a better one."""
        if self._effort < SEARCH_MARKS and self._trials.num_tries < MOST_TRIES:
            self._begin_search(SEARCH_MARKS)

    @property
    def _is_awaited(self) -> bool:
        """Whether a plan is searched for, or taken and not in force yet."""
        if self._found is not None or self._adoption.taken is not None:
            return True
        return self._searching.is_under_way

    def _request(self, seen: Profile) -> Request:
        goal = self._goal.goal.grown(self._largest.planned_ratio)
        if self._peers.is_alone:  # else each rank would search for another plan
            profile = self._known(seen)
            wanted = self._skipped_bytes(profile)
            spare_bytes = left_free(self._larger(profile), goal, wanted)
            goal = replace(goal, spare_bytes=goal.spare_bytes + spare_bytes)
        return Request(
            profile=seen,
            corrections=self._measured.corrections,
            goal=goal,
            ratio=self._largest.planned_ratio,
            growth=self._growth_of(seen),
            plan=self.plan,
        )

    def _growth_of(self, seen: Profile) -> Growth:
        return self._largest.growth_of(seen, self._measured.fixed_share)

    def _plan_by_size(self) -> None:
        """Have lanes of other sizes follow other plans than the one in force: lanes of
        one kind are never in flight together."""
        seen, is_measured = self._seen, self._stage is Purpose.BASE
        if seen is None or is_measured:
            return
        if len(seen.kinds) == 1 and self._largest.makes_room:
            self._smaller.planned(self._request(seen))

    def _search_again(self, effort: int) -> None:
        """Search for a plan that keeps what the one in force does not."""
        self._stop_search()
        self._trials.forget()
        self._begin_search(effort)

    def _stop_search(self) -> None:
        self._searching.stop()
        self._adoption.drop()
        self._found = None

    def _await_plan(self) -> None:
        """Try the first plan that is there.

        Raises:
            ConfigError: none reaches the goal.
        """
        num_plans = self.num_plans
        self._take_found()
        # The plan in force may stay: other ranks learn of that in another step.
        is_same = self._stage in (Purpose.SEARCHING, Purpose.FOLLOWING)
        if self.num_plans != num_plans or not is_same:
            return
        if self.plan is not None and self._is_exceeded(self.plan):
            return
        if self._peers.observes(self._sees_strays(), self._step):
            self._observe_others()
            return
        self._look_again()

    def _take_found(self) -> None:
        """Take what was found, and follow it when this rank and all others may."""
        # Of several ranks one after the other: all follow the same ones.
        if self._adoption.taken is None or self._peers.is_alone:
            answer, self._found = self._found, None
            if answer is None:
                has_plan = self.plan is not None
                answer = self._searching.answer(has_plan=has_plan)
            if answer is not None:
                self._take_answer(answer)
        self._follow_taken()

    def _prepare_found(self) -> None:
        """Have the pinned memory made for the plan that is found while another one is
        tried, which it follows."""
        if self._adoption.taken is not None or self._found is not None:
            return
        answer = self._searching.answer(has_plan=True)
        if answer is None or answer.plan is None or answer.stays or self._seen is None:
            self._found = answer
            return
        self._adoption.take(answer.plan)
        self._prepare(self._seen)

    def _is_hopeless(self, plan: Plan) -> bool:
        by_memory = self._goal.goal.is_by_memory and plan.policy != ALL_AGAIN
        return by_memory and self._trials.is_hopeless(plan)

    def _take_answer(self, answer: Answer) -> None:
        """Try what was found, if it is better than the plan in force.

        Raises:
            ConfigError: nothing was, and there is no other plan.
        """
        if answer.error and self.plan is None and self._largest.planned_ratio > 1.0:
            # What does not grow with a batch was taken to do so, too.
            logger.info("ssdtrain: no plan has room for the largest batch so far")
            self._largest.plan_for_observed()
            self._begin_search(SEARCH_MARKS)
        elif answer.error and self.plan is None:
            if self._try_all_again():
                self._refusal = answer.error
                return
            self._searching.clear()  # training ends here
            raise ConfigError(answer.error)
        elif answer.error:
            logger.warning("ssdtrain: the plan stays: %s", answer.error)
            self._stays(None)
        elif answer.stays:
            self._largest.planned()
            self._stays(answer.plan)
        elif answer.plan is not None and self._seen is not None:
            if self._is_hopeless(answer.plan):
                self._stays(None)
                return
            self._adoption.take(answer.plan)
            self._prepare(self._seen)

    def _stays(self, priced: Plan | None) -> None:
        """The plan in force is as good as any that was found.

        Args:
            priced: with its prediction by what is known now.
        """
        if self.plan is None:
            return
        # It may tell of the one that was tried while it was searched for.
        if priced is not None and priced.policy == self.plan.policy:
            self.plan = replace(self.plan, prediction=priced.prediction)
        best = self._trials.best
        told = 0.0 if self.plan.prediction is None else self.plan.prediction.step_ms
        self._trials.follow(Tried(self.plan, told if best is None else best.ms))
        self._follow_best()
        self._search_longer()

    def _prepare(self, seen: Profile) -> None:
        ratio = self._largest.planned_ratio
        self._adoption.prepare(seen, ratio, self._growth_of(seen))

    def captured_plan(self) -> Plan | None:
        """Return the plan for a CUDA graph: [Note: captured steps] in replays.py.
        None: the one in force is not the planner's own, or none reaches the goal."""
        seen, by = self._seen, self._measured.corrections
        if self._stage in (Purpose.WARM_UP, Purpose.OBSERVING, Purpose.RESTING):
            return None
        if seen is None:
            return None
        known = self._captured
        if known is None or known[0] is not seen or known[1] is not by:
            found: Plan | None = None
            try:
                profile = captured(seen, by)
                if UNHELD in profile.notes:
                    logger.warning("ssdtrain: %s", NOT_HELD)
                found = choose(profile, self._goal.goal, SEARCH_MARKS)
            except ConfigError as error:
                logger.warning("ssdtrain: a graph holds the eager plan: %s", error)
            known = self._captured = seen, by, found
        return known[2]

    # -- trying --------------------------------------------------------------------

    def _follow_taken(self, *, is_now: bool = False) -> None:
        """Try the plan that was taken last, if it is due.

        is_now: all ranks have taken it in this step.
        """
        plan = self._adoption.due(self._step, is_now=is_now)
        if plan is None or self._seen is None:
            return
        self._count(plan, self._seen)
        self._time_best()
        if self._is_given:
            self._is_given = False
            told = 0.0 if plan.prediction is None else plan.prediction.step_ms
            self._trials.follow(Tried(plan, told))
            self._follow_best()
            return
        self._begin_try(plan)

    def _begin_try(self, plan: Plan, *, is_searched: bool = True) -> None:
        self._is_searched = is_searched
        told = 0.0 if plan.prediction is None else plan.prediction.step_ms
        # What is not searched for is priced by each rank.
        (told,) = self._peers.longest((told,), "told", self._step)
        self._stopwatch = Stopwatch(told)
        self._put_in_force(plan, Purpose.TRYING)

    def _time_best(self) -> None:
        """Count what the best plan's steps took until another one is tried."""
        best = self._trials.best
        if best is None or best.plan is not self.plan:
            return
        counts = steps_of_a_try(best.ms)
        own = self._times.ended_ms(counts.new)
        told = (typical(own), noise_of(own)) if len(own) >= counts.least else (0.0, 0.0)
        ms, noise = self._peers.longest(told, "best", self._step)
        if ms > 0.0:
            self._trials.timed(ms, noise)

    def _try(self) -> None:
        """Count a step of a try; end it where enough is known."""
        plan, watch = self.plan, self._stopwatch
        if plan is None or watch is None:
            return
        if self._is_exceeded(plan) or self._makes_room():
            return
        if self._peers.observes(self._sees_strays(), self._step):
            self._observe_others()
            return
        self._host.sample(self._module_of)
        if not self._is_searched:
            self._prepare_found()
        if not watch.asks(self._times.num_steps):
            return
        own = self._times.ended_ms(watch.num_new)
        told = own or ([plan.prediction.step_ms] if plan.prediction else [0.0])
        # One step is as long on all ranks that wait for each other, or nearly.
        spread = max(told) / min(told) if min(told) > 0.0 else 1.0
        was_ms = 0.0 if self._again is None else self._again.ms
        ms, spread, was_ms, noise = self._peers.longest(
            (typical(told), spread, was_ms, noise_of(told)), "try", self._step
        )
        if not watch.is_enough(self._times.num_steps, spread):
            return
        self._stopwatch = None
        if self._again is not None:
            self._compare_again(Tried(plan, ms, noise), was_ms)
        else:
            self._judge(Tried(plan, ms, noise))

    def _judge(self, tried: Tried) -> None:
        """Go on with the best plan so far, and search for another one where this one
        took longer than it said."""
        is_by_memory = self._goal.goal.is_by_memory
        if not self._is_searched:
            self._trials.compare(tried, does_less=True)
            self._follow_best()
            found = self._adoption.taken
            if found is not None and self._is_hopeless(found):
                self._adoption.drop()
            self._search_longer()
            return
        verdict = self._trials.judge(tried, self._most_ms(), is_by_memory=is_by_memory)
        told = tried.plan.prediction
        logger.info(
            "ssdtrain: plan %d takes %.1f ms, told %.1f: %s",
            self.num_plans,
            tried.ms,
            0.0 if told is None else told.step_ms,
            verdict.name,
        )
        if told is not None and self._trials.wants_another(tried):
            self._measured.disappointed(told, tried.ms)
            self._follow_best()
            self._begin_search(SEARCH_MARKS)
            return
        self._follow_best()
        if verdict is not Verdict.STAYS or not is_by_memory:
            self._search_longer()
            return
        second = self._trials.second
        if second is None:
            if not self._offers_all_again(tried):
                self._search_longer()
        else:  # it was timed in the first steps of a run, which may take longer
            self._again = Tried(second.plan, tried.ms)
            self._begin_try(second.plan)

    def _offers_all_again(self, tried: Tried) -> bool:
        """Try all regions again next to a plan that was compared with nothing, or no
        more of them than must; whether a try began."""
        fewest = self._fewest_again()
        if fewest is not None and self._seen is not None:
            if fewest.orders == tried.plan.orders:
                return False
            self._try_unsearched(fewest, self._seen)
            return True
        plan = self._all_again()
        if plan is None or not self._peers.leads or plan.orders == tried.plan.orders:
            return False
        answer = Answer(plan=plan)
        if not self._peers.is_alone:
            self._peers.offer(dumps(answer))
        self._take_answer(answer)
        return True

    def _most_ms(self) -> float | None:
        """Return what a step may take; None: no step without a plan was measured."""
        goal, plain = self._goal.goal, self._measured.plain
        return None if plain is None else most_ms(plain.step_ms, goal.max_overhead)

    def _goal_of(self, plan: Plan) -> Goal:
        """Return what the memory of its steps is judged by: a plan that moves nothing
        may use a budget to its end, and all regions again `HANDLES` more."""
        if not plan.moves_nothing or not self._peers.agree:
            return self._goal.goal
        return self._goal_within(is_all=plan.policy == ALL_AGAIN)

    def _goal_within(self, *, is_all: bool) -> Goal:
        goal = self._goal.goal
        if is_all and goal.memory_budget_bytes is not None:
            most_bytes = int((1 + HANDLES) * goal.memory_budget_bytes)
            goal = replace(goal, memory_budget_bytes=most_bytes)
        return replace(goal, budget_margin=0.0)

    def _is_exceeded(self, plan: Plan) -> bool:
        """Whether the step before went beyond the memory limit: then the next plan
        leaves more room. Until there is one, what was followed before is.

        Raises:
            ConfigError: the plan was the last that might have fitted.
        """
        over_bytes = self._memory.over_bytes(self._goal_of(plan))
        if over_bytes and self._refusal:
            raise ConfigError(self._refusal)
        if over_bytes and not self._goal.can_be and plan is not self._too_large:
            self._too_large = plan
            logger.warning(
                "ssdtrain: steps need %d bytes more than %s leaves them, and the last "
                "plans that were to need less did not; set it that much higher for "
                "the same step, or lower for a plan that leaves more",
                *(over_bytes, self._goal.goal.memory_limit),
            )
        is_known = plan is self._too_large and self._is_awaited
        # All may follow the plan of an earlier run, and agree on no other one.
        if is_known or not self._goal.can_be or self._meets_unknown:
            over_bytes = 0
        over_bytes = self._peers.exceeded(over_bytes, self._step)
        if not over_bytes:
            return False
        self._too_large = plan
        logger.info("ssdtrain: the plan takes %d bytes more", over_bytes)
        self._spared_bytes = 0
        goal, best = self._goal.goal, self._trials.best
        self._goal.tighten(replace(goal, spare_bytes=goal.spare_bytes + over_bytes))
        self._smaller.stop()
        self._measured.stop()
        self._stop_search()
        self._again = self._stopwatch = None
        if best is None or best.plan is plan:
            self._trials.forget()
            self._stage = Purpose.FOLLOWING
        else:
            self._follow_best()
        self._begin_search(QUICK_MARKS)
        return True

    # -- following -----------------------------------------------------------------

    def _follow_best(self) -> None:
        """Follow the best plan so far; keep everything where none may be followed."""
        best, seen = self._trials.best, self._seen
        if best is None and seen is not None:
            plan = keeping_all(self._known(seen))
            best = Tried(plan, 0.0)
            self._trials.follow(best)
        if best is not None:
            self._put_in_force(best.plan, Purpose.FOLLOWING)

    def _put_in_force(self, plan: Plan, stage: Purpose) -> None:
        is_other = plan is not self.plan or self._stage in (
            Purpose.HELD,
            Purpose.OBSERVING,
        )
        self.plan = plan
        if not is_other:
            self._stage = stage
            self._leave_room()
            self._plan_by_size()
            return
        self._rest(stage)
        self._hand_over(plan)
        self._host.planned()
        self._memory.planned()
        self._strays.planned()

    def _hand_over(self, plan: Plan) -> None:
        """Let the cache follow this plan from now on."""
        cache = self._cache
        cache.cursor.plan = plan
        self._leave_room()
        self._plan_by_size()
        cache.regions.run_again(Choice.PLANNED)
        self.room.trim()  # see [Note: torn blocks]
        cache.bypass = None
        if plan.keeps_all and not cache.verifier.checks_all:
            # Under a memory limit a batch that is larger than others has hooks.
            most = self._largest.most_elements
            if most or not self._goal.goal.is_by_memory:
                limited = self._goal.goal.is_by_memory
                cache.bypass = Unhooked(most if limited else None)

    def _leave_room(self) -> None:
        self._largest.leave_room(
            is_followed=self.plan is not None,
            runs_all=self._first_regions is Choice.ALL,
        )

    def _follow(self) -> None:
        if self._hold():
            return
        self._take_found()
        if self._stage is not Purpose.FOLLOWING or self.plan is None:
            return
        if self._makes_room() or self._is_exceeded(self.plan):
            return
        if self._memory.is_short():
            self._search_again(QUICK_MARKS)
        if self._adoption.taken is None:  # pinned memory is made for one at a time
            self._smaller.step(may_begin=not self._searching.is_under_way)
        if self._peers.observes(self._sees_strays(), self._step):
            self._observe_others()
            return
        self._host.sample(self._module_of)
        self._look_again()

    def _module_of(self, kind: str, item: int) -> str:
        """Return the module of an item of the profile."""
        items = () if self._seen is None else self._seen.kinds.get(kind, ())
        return items[item].module if 0 <= item < len(items) else ""

    def _sees_strays(self) -> bool:
        return self._strays.step(self._cache.cursor.num_strayed)

    def _look_again(self) -> None:
        """Time the next best plan once more: machines change."""
        times = self._times
        if times.num_steps < self._next_look or self._meets_unknown:
            return
        own = times.ended_ms()
        # A rank may take later than others what was found.
        may = self.is_settled and bool(own)
        if not self._peers.all_agree(may, "look", self._step):
            self._next_look += FIRST_LOOK
            return
        self._next_look *= 2
        second = self._next_best()
        if second is None:
            return
        self._again = Tried(second, typical(own))
        self._begin_try(second)

    def _next_best(self) -> Plan | None:
        """Return what the best plan is to be compared with again, if anything."""
        best, second, seen = self._trials.best, self._trials.second, self._seen
        if self._goal.goal.is_by_memory or best is None or best.plan.keeps_all:
            return None if second is None else second.plan
        if seen is None:
            return None
        fits = self._memory.fits_plain(self._larger(seen))
        if not self._peers.all_agree(fits, "keep", self._step):
            return None
        return keeping_all(self._known(seen))

    def _compare_again(self, tried: Tried, best_ms: float) -> None:
        """Follow whichever is faster, by what both took just now."""
        self._again, goal = None, self._goal.goal
        limit = None if goal.is_by_memory else goal.max_overhead
        self._trials.compare_again(tried, best_ms, limit)
        if self._trials.best == tried:
            logger.info(
                "ssdtrain: another plan is better now: %s, %.1f ms instead of %.1f",
                tried.plan.policy,
                tried.ms,
                best_ms,
            )
        self._follow_best()
        self._search_longer()

    def _makes_room(self) -> bool:
        """Under a memory limit, plan for the largest batch so far: [Note: sizes].
        Return whether a larger one came."""
        has_grown = self._largest.has_grown()
        # A search ends with a plan that is followed before the next one begins, or
        # batches that grow and grow would never have one.
        if not has_grown or self._is_awaited:
            return False
        self._again = self._stopwatch = None
        self._stage = Purpose.FOLLOWING
        self._largest.plan_for_it()
        self._search_again(QUICK_MARKS)
        return True

    def _predict(self) -> None:
        follows = self._stage in (Purpose.TRYING, Purpose.FOLLOWING)
        plan = self.plan if follows else None
        prediction = None if plan is None else plan.prediction
        predicted_ms = None if prediction is None else prediction.step_ms
        self._cache.ledger.predicted_ms = predicted_ms
