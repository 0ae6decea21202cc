"""`plan="auto"`: observe a step, choose, follow, and look again when it drifts.

The first steps move everything that can move and wait where they must, so they fit
wherever full offloading fits. Plans change at step boundaries only.

[Note: the safe start]
Where device memory is limited, all regions run again in the steps before the first plan
([Note: regions] in regions.py). A region's tensors are then alive only while its
forward runs, the first time or again, and what is seen of them there is the
observation: their sizes and recipes in forward, the times of forward and backward, and
what the re-run takes and needs. So these steps need what checkpointing with moved
inputs needs, and no host memory for all activations.
(tests/ssdtrain/regions/test_planned.py)
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from torch import nn

from ssdtrain.cache.bypass import Unhooked
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.regions import Choice
from ssdtrain.counters import Trace
from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import in_parts
from ssdtrain.observe.adoption import Adoption
from ssdtrain.observe.guard import Guard
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.hosttime import is_far
from ssdtrain.observe.largest import LargestBatch
from ssdtrain.observe.measured import Measured, Observed
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.observation import Observation
from ssdtrain.observe.room import Room
from ssdtrain.observe.searching import Searching
from ssdtrain.observe.smaller import SmallerPlans
from ssdtrain.observe.start import SafeStart
from ssdtrain.observe.tightened import Tightened
from ssdtrain.observe.timegoal import TimeGoal
from ssdtrain.observe.waits import WaitGoal
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
from ssdtrain.plan.search import PART, Answer, Request
from ssdtrain.transfer.direct import DirectOffloader

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 1
"""Steps before the first observation: kernels are chosen and pools are filled."""
MAX_ATTEMPTS = 3
"""Observations in a row that may fail before the policy is left alone."""
DIRECT = "a drive reads and writes device memory"
"""Why segments do not grow: [Note: growing segments] in transfer/segments.py."""

NOT_HELD = (
    "the host bounds these steps, and none was held: a graph's plan counts with the "
    "times of the observed step, and may cost more than it says"
)


class Stage(Enum):
    """What the running step is for."""

    WARM_UP = auto()
    """> OBSERVING."""
    OBSERVING = auto()
    """> FOLLOWING, or OBSERVING again if the step could not be planned. > PLAIN before
    the first plan, where everything fits into device memory."""
    PLAIN = auto()
    """Runs without ssdtrain, and is measured: [Note: the plain step]. Where that does
    not fit, with all regions run again: [Note: the step of regions]. > SEARCHING, or
    FOLLOWING where the search is not beside training."""
    SEARCHING = auto()
    """The first plan is searched for beside training: without hooks where everything
    fits, else as before. > FOLLOWING."""
    FOLLOWING = auto()
    """> OBSERVING when it drifts."""
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
        self._first_regions = cache.regions.choice = first_regions
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
        self._times = TimeGoal(cache, self._goal, self._measured, peers)
        self._waits = WaitGoal(cache, self._goal, self._measured, peers)
        self._is_repriced = False
        """Whether hooks cost the host something else than when a plan was searched for
        last. What waits tell comes before the next search."""
        self._guard = Guard(self._goal, peers)
        self._searching = Searching(cache.device, peers)
        self._adoption = Adoption(cache, peers)
        self._smaller = SmallerPlans(cache)
        self._stage = Stage.WARM_UP
        self._step = -1
        self._attempts = 0
        self._seen: Profile | None = None
        """The last step that was observed."""
        self._planned: tuple[Any, ...] = ()
        """Signature of the profile that `plan` was made for."""
        self._captured: tuple[Profile, Corrections, Plan | None] | None = None
        """The plan that CUDA graphs hold, and what it was made for."""

    @property
    def most_bytes(self) -> float | None:
        """The peak above a step's start that the goal allows a plan; None: any."""
        profile = self.profile
        return None if profile is None else self._goal.goal.most_bytes(profile)

    @property
    def profile(self) -> Profile | None:
        """The observed step, with what was measured since; what plans are made for."""
        if self._seen is None:
            return None
        return corrected(self._seen, self._measured.corrections)

    @property
    def stage(self) -> Stage:
        """What the running step is for."""
        return self._stage

    @property
    def is_settled(self) -> bool:
        """Whether the running step is neither a warm-up nor observed, no other plan is
        searched for, and the steps of the one in force were compared with what it says
        and with plain ones."""
        if self._searching.is_under_way or self._adoption.taken is not None:
            return False
        if self._smaller.is_searching:
            return False
        if self._stage is Stage.FOLLOWING:
            is_judged = self._times.is_judged and self._waits.is_judged
            return is_judged and self._guard.is_judged
        return self._stage is Stage.RESTING

    @property
    def has_observed(self) -> bool:
        """Whether what a plan is made of is known, or none can be made."""
        return self._stage in (Stage.SEARCHING, Stage.FOLLOWING, Stage.RESTING)

    def step_starts(self, num_steps: int) -> None:
        """Decide what the step is for whose first forward runs next.

        Args:
            num_steps: steps that have ended.

        Raises:
            ConfigError: `memory_budget_bytes` cannot be reached.
        """
        with self._cache.collector.held():
            self._step_starts(num_steps)

    def _step_starts(self, num_steps: int) -> None:
        self._searching.step_starts()
        if num_steps == self._step:
            if self._stage is Stage.OBSERVING:
                self._observe()  # a forward without a backward: begin again
            self._cache.course.step_starts()
            return
        self._step = num_steps
        self._largest.step_ended()
        if self._stage is Stage.WARM_UP and num_steps < NUM_WARM_UPS:
            if self._goal.goal.device_bytes is not None:
                self._record()  # whether it fits must be known before the second step
        elif self._stage is Stage.WARM_UP:
            self._check_memory()
            self._observe()
        elif self._stage is Stage.OBSERVING:
            self._conclude()
        elif self._stage is Stage.PLAIN:
            self._measure()
        elif self._stage is Stage.SEARCHING:
            self._await_plan()
        elif self._stage is Stage.FOLLOWING:
            self._follow()
        self._cache.course.step_starts()
        self._predict()

    def follow(self, plan: Plan) -> None:
        """Follow this plan from the next step on, and observe no more."""
        self.close()
        self.plan = plan
        self._rest(Stage.RESTING)
        self._hand_over(plan)

    def begin_with(self, plan: Plan, profile: Profile) -> None:
        """Follow the plan of an earlier run, made for this profile, as soon as pinned
        memory is there; observe when steps drift from it."""
        self.close()
        self._seen = profile
        self._host.costs = profile.host_costs
        self._rest(Stage.SEARCHING)
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

    # -- observing ----------------------------------------------------------------

    def _observe(self) -> None:
        self._largest.restart()
        self._times.forget_before()
        self._smaller.stop()
        self._stage = Stage.OBSERVING
        self._record()

    def _record(self) -> None:
        cache = self._cache
        cache.course.rule = Rule(spares_held=True)
        cache.regions.choice = self._first_regions
        cache.course.plan = None
        cache.bypass = None
        self._observation.begin()

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
            self._rest(Stage.RESTING)
            return
        self._attempts = 0
        self._seen = profile
        if self._must_rest():
            return
        is_other = bool(self._planned) and self._planned != profile.signature()
        self._measured.observed_anew(is_other=is_other)
        if is_other:
            self._guard.forget()
        may = self._measured.plain is None and self._memory.fits_plain(profile)
        # All of them, or the others would wait for the slowest in a step of theirs.
        fits = self._peers.all_agree(may, "plain", self._step)
        # What all regions need fitted into the observed step. Behind a plan that steps
        # drifted from, what was measured before it is not believed either.
        may = self._measured.lacks_regions and bool(profile.regions)
        if fits or self._peers.all_agree(may, "regions", self._step):
            self._rest(Stage.PLAIN)
            told = self._observation
            self._measured.begin(
                Observed(profile, told.packs, told.saved_bytes), without_hooks=fits
            )
            self._measure()
            return
        self._plan()

    def _must_rest(self) -> bool:
        """Rest where ranks with plans of their own would meet in each other's
        collectives: [Note: one step for all] in hosts/peers.py. Return whether."""
        seen = self._seen
        if self._peers.agree or seen is None or not seen.communicates:
            return False
        logger.warning(
            "ssdtrain: no plan; modules that run again communicate, and the ranks do "
            "not agree on one plan. Name modules without collectives (regions=...), or "
            "set recompute='off'"
        )
        self._rest(Stage.RESTING)
        return True

    def _measure(self) -> None:
        if not self._measured.next_step(self._step):
            self._plan()

    def _rest(self, stage: Stage) -> None:
        self._stage = stage
        self._times.restart()
        self._cache.regions.choice = self._first_regions
        # A limit holds for what no plan knows as well: it waits rather than stays.
        waits = self._goal.goal.is_by_memory and stage is not Stage.RESTING
        away = Placement.OFFLOAD if waits else Placement.OFFLOAD_IF_IN_TIME
        self._cache.course.rule = Rule(away, spares_held=True)

    # -- searching ----------------------------------------------------------------

    def _plan(self) -> None:
        """Start to search for a plan for the last profile. Steps go on as they were
        until it is found."""
        profile = self._seen
        if profile is None:
            return
        self._memory.look_at_device(self._step)
        self._stop_search()
        if self._must_rest():
            return
        if self._planned != profile.signature():
            self.plan = None
        if self.plan is None:
            # Asked again: the plain step may have been one of smaller batches.
            was_plain = self._measured.plain is not None
            fits = was_plain and self._memory.fits_plain(profile)
            self._cache.bypass = Unhooked() if fits else None
        self._largest.plan_for_it()
        self._begin_search(SEARCH_MARKS)
        if self._stage is Stage.FOLLOWING:
            return
        if self.plan is not None:
            self._follow_from_now(self.plan)
            return
        self._rest(Stage.SEARCHING)
        self._plan_by_size()

    def _begin_search(self, effort: int) -> None:
        self._is_repriced = False
        if self._seen is None:
            return
        request = replace(self._request(self._seen), plan=self.plan)
        are_plain = isinstance(self._cache.bypass, Unhooked)
        answer = self._searching.begin(request, effort, are_plain=are_plain)
        if answer is not None:
            self._take_answer(answer)
            self._follow_taken(is_now=True)

    def _request(self, seen: Profile) -> Request:
        return Request(
            profile=seen,
            corrections=self._measured.corrections,
            goal=self._goal.goal,
            ratio=self._largest.planned_ratio,
            growth=self._growth_of(seen),
        )

    def _growth_of(self, seen: Profile) -> Growth:
        return self._largest.growth_of(seen, self._measured.fixed_share)

    def _plan_by_size(self) -> None:
        """Have lanes of other sizes follow other plans than the one in force: lanes of
        one kind are never in flight together."""
        seen, is_own = self._seen, self._stage in (Stage.SEARCHING, Stage.FOLLOWING)
        if is_own and seen is not None and len(seen.kinds) == 1:
            if self._largest.makes_room:
                self._smaller.planned(self._request(seen))

    def _search_again(self, effort: int) -> None:
        """Search for a plan that keeps what the one in force does not; the plan before
        promised as much."""
        self._stop_search()
        self._times.forget_before()
        self._begin_search(effort)

    def _stop_search(self) -> None:
        self._searching.stop()
        self._adoption.drop()

    def _await_plan(self) -> None:
        """Follow the first plan that is there.

        Raises:
            ConfigError: none reaches the goal.
        """
        measured = self._times.last_step_ms()
        if measured is not None and isinstance(self._cache.bypass, Unhooked):
            self._times.plain_step(measured)
        self._take_found()
        if self._peers.observes(False, self._step):
            self._observe()

    def _take_found(self) -> None:
        """Take what was found, and follow it when this rank and all others may."""
        # Of several ranks one after the other: all follow the same ones.
        if self._adoption.taken is None or self._peers.is_alone:
            has_plan = self.plan is not None
            answer = self._searching.answer(self._seen, has_plan=has_plan)
            if answer is not None:
                self._take_answer(answer)
        self._follow_taken()

    def _take_answer(self, answer: Answer) -> None:
        """Follow what was found, if it is better than the plan in force.

        Raises:
            ConfigError: nothing was, and there is no other plan.
        """
        if answer.error and self.plan is None and self._largest.planned_ratio > 1.0:
            # What does not grow with a batch was taken to do so, too.
            logger.info("ssdtrain: no plan has room for the largest batch so far")
            self._largest.plan_for_observed()
            self._begin_search(SEARCH_MARKS)
        elif answer.error and self.plan is None:
            self._searching.clear()  # training ends here
            raise ConfigError(answer.error)
        elif answer.error:
            logger.warning("ssdtrain: the plan stays: %s", answer.error)
        elif answer.stays and answer.plan is not None:
            prediction = answer.plan.prediction
            if self._adoption.taken is not None:
                self._adoption.reprice(prediction)
                return
            self._largest.planned()
            self._leave_room()
            self._plan_by_size()
            if self.plan is not None:
                self.plan = replace(self.plan, prediction=prediction)
                self._times.priced_anew(prediction)
        elif answer.plan is not None and self._seen is not None:
            self._adoption.take(answer.plan)
            self._prepare(self._seen)

    def _prepare(self, seen: Profile) -> None:
        ratio = self._largest.planned_ratio
        self._adoption.prepare(seen, ratio, self._growth_of(seen))

    def captured_plan(self) -> Plan | None:
        """Return the plan for a CUDA graph: [Note: captured steps] in replays.py.
        None: the one in force is not the planner's own, or none reaches the goal."""
        seen, by = self._seen, self._measured.corrections
        if self._stage not in (Stage.SEARCHING, Stage.FOLLOWING) or seen is None:
            return None
        known = self._captured
        if known is None or known[0] is not seen or known[1] is not by:
            found: Plan | None = None
            try:
                profile = captured(seen, by)
                if UNHELD in profile.notes:
                    logger.warning("ssdtrain: %s", NOT_HELD)
                # What eager steps took beside their plan says nothing of a replay.
                goal = replace(self._goal.goal, aim=1.0)
                found = choose(profile, goal, SEARCH_MARKS)
            except ConfigError as error:
                logger.warning("ssdtrain: a graph holds the eager plan: %s", error)
            known = self._captured = seen, by, found
        return known[2]

    # -- following ----------------------------------------------------------------

    def _follow_taken(self, *, is_now: bool = False) -> None:
        """Follow the plan that was taken last, if it is due.

        is_now: all ranks have taken it in this step.
        """
        plan = self._adoption.due(self._step, is_now=is_now)
        if plan is None or self._seen is None:
            return
        self._planned = self._seen.signature()
        self._largest.planned()
        self.num_plans += 1
        self._times.taken(plan)
        self._follow_from_now(plan)

    def _follow_from_now(self, plan: Plan) -> None:
        self.plan = plan
        self._rest(Stage.FOLLOWING)
        self._hand_over(plan)
        self._host.planned()
        self._memory.planned()
        seen = self._seen
        has_regions = seen is not None and any(seen.regions.values())
        self._guard.planned(plan, has_regions=has_regions)
        self._times.planned(plan)
        self._waits.planned()
        logger.info("ssdtrain: plan %d: %s", self.num_plans, plan.policy)

    def _hand_over(self, plan: Plan) -> None:
        """Let the cache follow this plan from now on."""
        cache = self._cache
        cache.course.plan = plan
        self._leave_room()
        self._plan_by_size()
        cache.regions.choice = Choice.PLANNED
        self.room.trim()  # see [Note: torn blocks]
        # Under a byte budget somebody must see that a batch is larger than others.
        unhooked = (
            plan.keeps_all
            and not self._goal.goal.is_by_memory
            and not cache.verifier.checks_all
        )
        cache.bypass = Unhooked() if unhooked else None

    def _leave_room(self) -> None:
        self._largest.leave_room(
            is_followed=self._stage is Stage.FOLLOWING,
            runs_all=self._first_regions is Choice.ALL,
        )

    def _follow(self) -> None:
        self._take_found()
        self._reprice()
        self._make_room()
        if self._guard.is_in_force:
            if self._memory.over_bytes(self._guard.goal):
                self._offer(self._guard.refuse())
        elif self._memory.is_exceeded():
            self._smaller.stop()
            self._search_again(QUICK_MARKS)
        if self._memory.is_short():
            self._search_again(QUICK_MARKS)
        if self._adoption.taken is None:  # pinned memory is made for one at a time
            self._smaller.step(may_begin=not self._searching.is_under_way)
        measured = self._times.last_step_ms()
        before = self._times.plan_before(measured)
        if before is not None:
            self._go_back(before)
            return
        self._match_waits()
        # If one is taken, other ranks may be about to follow it.
        comes = self._searching.is_under_way or self._adoption.taken is not None
        if not comes and self._times.is_exceeded(measured, self.plan):
            self._search_again(SEARCH_MARKS)
        self._compare(measured)
        is_over = self._waits.is_judged and not self._searching.is_under_way
        drifts = self._times.drifts(measured, is_over=is_over)
        if self._peers.observes(drifts, self._step):
            logger.info(
                "ssdtrain: the plan drifts (%s): observing", self._times.drift.error
            )
            self._observe()

    def _compare(self, measured_ms: float | None) -> None:
        """Count a step; follow all regions again, or the plan before, if that is
        shorter: see [Note: the guard]."""
        comes = self._searching.is_under_way or self._adoption.taken is not None
        is_judged = self._times.is_judged and self._waits.is_judged
        plan, seen = self.plan, self._seen
        if comes or not is_judged or plan is None or seen is None:
            return

        def profiles() -> tuple[Profile, Profile]:
            own = corrected(seen, self._measured.corrections)
            ratio = self._largest.planned_ratio
            if ratio == 1.0:
                return own, own
            return own, scaled(own, ratio, self._growth_of(seen))

        self._offer(self._guard.step(measured_ms, plan, profiles))

    def _offer(self, answer: Answer | None) -> None:
        """Follow what was compared, with all other ranks."""
        if answer is None:
            return
        if not self._peers.is_alone:
            self._peers.offer("\n".join(in_parts(answer, PART)))
        self._times.forget_before()
        self._take_answer(answer)

    def _go_back(self, before: Plan) -> None:
        """Return to the plan before: the one in force is slower than predicted."""
        logger.info("ssdtrain: plan %d is slower than it said", self.num_plans)
        self._stop_search()
        self._follow_from_now(before)
        if self._times.aim_lower():  # or the next search would find it again
            self._search_again(SEARCH_MARKS)

    def _make_room(self) -> None:
        """Under a memory limit, plan for the largest batch so far: [Note: sizes]."""
        has_grown = self._largest.has_grown()
        # A search ends with a plan that is followed before the next one begins, or
        # batches that grow and grow would never have one.
        is_awaited = self._searching.is_awaited or self._adoption.taken is not None
        if has_grown and not is_awaited:
            self._largest.plan_for_it()
            self._search_again(QUICK_MARKS)

    def _reprice(self) -> None:
        """Search again if hooks cost the host something else by now than what the plan
        was made with."""
        peers, seen = self._peers, self._seen
        if self._guard.is_in_force:
            return  # it was chosen by the clock
        costs = self._host.step(samples=peers.leads, module_of=self._module_of)
        if costs is None or seen is None:
            return
        waits = not self._waits.is_judged
        if not peers.leads or (self._searching.is_under_way and not waits):
            return
        before = self._measured.corrections.host_costs or seen.host_costs
        if not is_far(before, costs):
            return
        self._measured.reprice(costs)
        if waits:
            self._is_repriced = True
        else:
            self._begin_search(SEARCH_MARKS)

    def _match_waits(self) -> None:
        """Search with slower links, and with what hooks cost by now, as soon as the
        waits of the plan in force are known."""
        if self._waits.is_judged:
            return
        is_exceeded = self._waits.is_exceeded(self.plan)
        if is_exceeded or (self._is_repriced and self._waits.is_judged):
            self._stop_search()
            self._begin_search(SEARCH_MARKS)

    def _module_of(self, kind: str, item: int) -> str:
        """Return the module of an item of the profile."""
        items = () if self._seen is None else self._seen.kinds.get(kind, ())
        return items[item].module if 0 <= item < len(items) else ""

    def _predict(self) -> None:
        plan = self.plan if self._stage is Stage.FOLLOWING else None
        prediction = None if plan is None else plan.prediction
        predicted_ms = None if prediction is None else prediction.step_ms
        self._cache.ledger.predicted_ms = predicted_ms
