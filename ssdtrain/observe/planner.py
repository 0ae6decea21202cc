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
import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from torch import nn

from ssdtrain.cache.bypass import Bypass, Unhooked
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.course import SLACK, Unobserved
from ssdtrain.cache.regions import REGION, Choice
from ssdtrain.counters import Trace
from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import in_parts
from ssdtrain.observe.contention import measure
from ssdtrain.observe.heldregions import HeldRegions, middle_ms
from ssdtrain.observe.hostprobe import host_costs
from ssdtrain.observe.hosttime import WEIGHT, HostMeter, is_far, mixed
from ssdtrain.observe.links import fitted_drive, fitted_links, probe
from ssdtrain.observe.modules import ModuleNames
from ssdtrain.observe.observer import Recording, prices
from ssdtrain.observe.paced import HOLD_FACTOR, HOLD_MS, Paced
from ssdtrain.observe.peaks import PeakWatch, RetryWatch
from ssdtrain.observe.plainsteps import PlainSteps
from ssdtrain.observe.regionsteps import RegionStep, fastest
from ssdtrain.observe.room import Room
from ssdtrain.plan.adapt import Drift, Overhead, Trial
from ssdtrain.plan.agree import Alone, Peers
from ssdtrain.plan.calibrate import (
    PLAIN_STEP,
    WITHOUT_RERUNS,
    Corrections,
    PlainTimes,
    captured,
    corrected,
)
from ssdtrain.plan.choose import LONG_MARKS, QUICK_MARKS, SEARCH_MARKS, choose
from ssdtrain.plan.goal import DEVICE_RESERVE, MOST_TORN, Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.policies import KeepAll, OffloadAll
from ssdtrain.plan.profile import HostCosts, Profile
from ssdtrain.plan.search import (
    PART,
    TURN_S,
    Answer,
    Reading,
    Request,
    Search,
    answers,
    turn_of,
)
from ssdtrain.plan.simulate import Run, keep_all
from ssdtrain.plan.timeline import Timeline
from ssdtrain.transfer.direct import DirectOffloader
from ssdtrain.transfer.offloader import Drain

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 1
"""Steps before the first observation: kernels are chosen and pools are filled."""
NUM_PROBE_THREADS = 4
"""Writers of a drive that the observed step used too little (as `io_threads`)."""
MAX_ATTEMPTS = 3
"""Observations in a row that may fail before the policy is left alone."""
COLD_BYTES = 1 << 30
"""A step that had to pin more than this waited for it, and its small operators were
measured with the time of their launch: it is observed again."""
NUM_EMPTY = 5
"""Times that nothing is timed; the least counts."""
NUM_REGION_STEPS = 4
"""In which all regions run again. The first one starts on an idle device; the others
are measured."""
PLAIN_SHARE = 0.9
"""Share of the device's memory that a step without ssdtrain may seem to take."""

FIRST_SAMPLE = 3
"""Step under a new plan whose hooks are timed first: its tables are made."""
MOST_HELD = 2
"""Steps of regions that are held. A graph has one shape; steps whose shapes change are
not captured."""
HEADROOM = 1.06
"""A plan for larger batches leaves room for some that are larger still: the longest
batch so far is seldom the longest of all, and each one more is another search."""
MOST_TIGHTENED = 4
"""Plans that leave more room under a limit than the one before."""
DIRECT = "a drive reads and writes device memory"
"""Why segments do not grow: [Note: growing segments] in transfer/segments.py."""
GONE_BACK = 0.5
"""Part of the overhead that may be predicted behind a plan that was given up."""
SAMPLED_STEPS = 128
"""One step in so many has its hooks timed."""


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
    """Decides at the start of every step what the step is for."""

    def __init__(
        self,
        cache: TensorCache,
        goal: Goal,
        trace: Trace,
        roots: Sequence[nn.Module],
        notes: dict[str, str],
        first_regions: Choice = Choice.NONE,
    ) -> None:
        self.plan: Plan | None = None
        self.num_plans = 0
        self._seen: Profile | None = None
        """The last step that was observed."""
        self._corrections = Corrections()
        """What was measured behind it."""
        self._planned: tuple[Any, ...] = ()
        """Signature of the profile that `plan` was made for."""
        self._keep_bytes: int | None = None
        """Peak of that step with everything kept, once somebody has asked."""
        self.peers: Peers = Alone()
        """The ranks that must follow the same plan."""
        self._cache = cache
        self._goal = goal
        self._trace = trace
        self._wants_trace = trace.enabled
        self._names = ModuleNames(roots)
        self._first_regions = cache.regions.choice = first_regions
        """While there is no plan: [Note: the safe start]."""
        self._notes = notes
        self._drift = Drift()
        self._stage = Stage.WARM_UP
        self._attempts = 0
        self._recording: Recording | None = None
        self._pause: tuple[Any, Any] = (None, None)
        """From the end of the step before the observed one to the observed one."""
        self._pinned_bytes = 0
        self._search: Search | None = None
        """Beside training; it finds a plan quickly, and then the best that it can."""
        self._ended: list[Search] = []
        """Searches that are over, and whose processes end."""
        self._reading: Reading | None = None
        """Of what the leading rank's search has found."""
        self._taken: Plan | None = None
        """To be followed when there is pinned memory for what it moves."""
        self._plain: PlainTimes | None = None
        self._rerun_ms: dict[str, tuple[float, ...]] = {}
        """Of region calls, in the step that was measured with them."""
        self._plain_steps = PlainSteps(cache.ledger.clock)
        self._num_region_steps = 0
        self._holds_rebuilds = False
        """Whether the running step rebuilds all that it can, each by itself."""
        self._held_regions: HeldRegions | None = None
        """Of the running step, if it is [Note: a held step of regions]."""
        self._held_before: dict[tuple[Any, ...], Corrections] = {}
        """With what such steps told, by the signature of the observed one: they are
        long ones, and there are few of them."""
        self._region_steps: list[RegionStep] = []
        """What was measured of them, until it is read."""
        self._observed_bytes = 0
        """Saved in the observed step."""
        self._torn_bytes = self._cached_bytes = 0
        """Likewise of the allocator: [Note: torn blocks], [Note: retries]."""
        self._left_bytes = 0
        """What plans leave free because the allocator had to try again."""
        self._packs: list[int] = []
        """Up to each mark of the last observed step: see `Paced`."""
        self._without_hooks = False
        """Whether the plain step is one, and not that of regions."""
        self._idle_host_ms = float("inf")
        """Host time of the forward of regions that started on an idle device."""
        self._region_start: Any = None
        self._num_spans = 0
        self._was_sampled = False
        """Whether the hooks of a step under a plan were timed."""
        self._host_costs: HostCosts | None = None
        """None before the first observation, and where the host is the device."""
        self._planned_ratio = 1.0
        """Size of the batch that is planned for, over the observed one's."""
        self._room_ratio = 1.0
        """Likewise of the plan in force: there is room for."""
        self._met_ratio = 1.0
        """Likewise of the largest lane under a plan: [Note: sizes]."""
        self._met_bytes: dict[str, int] = {}
        """Saved in the largest lane of each kind, of all that followed no plan."""
        self._lane_bytes: dict[str, int] = {}
        """Likewise of the step that has ended."""
        self._observed_lanes: dict[str, int] = {}
        """Likewise of the observed one."""
        self._num_followed = 0
        """Steps since the plan in force was taken."""
        self._step = -1
        self._starts: list[tuple[Any, bool]] = []
        """Start of the last steps, and whether the step had the plan's sizes."""
        self._meter: HostMeter | None = None
        """Of the step that is being timed."""
        self._peaks = PeakWatch(cache.device, cache.ledger)
        is_direct = isinstance(cache.offloader, DirectOffloader)
        self.room = Room(cache.device, DIRECT if is_direct else "")
        self._retries = RetryWatch(cache.device)
        self._overhead = Overhead()
        self._num_tightened = 0
        """How often steps went beyond a limit."""
        self._captured: tuple[Profile, Corrections, Plan | None] | None = None
        """The plan that CUDA graphs hold, and what it was made for."""
        self._trial: Trial | None = None
        """Of the plan in force, where nobody else follows it."""

    @property
    def profile(self) -> Profile | None:
        """The observed step, with what was measured since; what plans are made for."""
        return None if self._seen is None else corrected(self._seen, self._corrections)

    @property
    def stage(self) -> Stage:
        """What the running step is for."""
        return self._stage

    @property
    def is_settled(self) -> bool:
        """Whether the running step is neither a warm-up nor observed, no other plan is
        searched for, and the one in force was compared with plain steps."""
        if self._search is not None or self._taken is not None:
            return False
        if self._stage is Stage.FOLLOWING and self._holds_overhead:
            return self._overhead.is_judged
        return self._stage in (Stage.FOLLOWING, Stage.RESTING)

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
        self._ended = [search for search in self._ended if not search.clear()]
        if num_steps == self._step:
            if self._stage is Stage.OBSERVING:
                self._observe()  # a forward without a backward: begin again
            self._cache.course.step_starts()
            return
        self._step = num_steps
        self._meet()
        if self._stage is Stage.WARM_UP and num_steps < NUM_WARM_UPS:
            if self._goal.device_bytes is not None:
                self._record()  # whether it fits must be known before the second step
        elif self._stage is Stage.WARM_UP:
            self._check_memory()
            self._observe()
        elif self._stage is Stage.OBSERVING:
            self._conclude()
        elif self._stage is Stage.PLAIN:
            self._run_plain()
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
        self._seen, self._keep_bytes = profile, None
        self._host_costs = profile.host_costs
        self._rest(Stage.SEARCHING)
        self._taken = plan
        if self.peers.is_alone:
            self._prepare(plan)  # else all ranks follow it in the next step

    def close(self) -> None:
        """Remove what an unfinished observation left. Idempotent."""
        self._names.stop()
        self._stop_search()
        self._clear()
        self._leave_rebuilds()
        self._cache.bypass = self._cache.timer = None
        self._take_meter()
        self._trace.enabled = self._wants_trace
        self._cache.course.observer = Unobserved()
        self._recording = None  # it may hold tensors of a step that was not ended

    # -- observing ----------------------------------------------------------------

    def _observe(self) -> None:
        self._planned_ratio = self._met_ratio = 1.0
        self._trial = None
        self._stage = Stage.OBSERVING
        self._record()

    def _check_memory(self) -> None:
        """Check that a plan fits, by the first step's memory. Searches on this thread:
        without an answer there must be no second step.

        Raises:
            ConfigError: none does; the text says by how much and where.
        """
        if self._recording is None:
            return
        profile, self._recording = self._observed(is_cold=True), None
        memory = self._cache.ledger.start_level()
        if profile is None or memory is None:
            return
        # The optimizer makes its state at the end of the first step.
        base_bytes = max(profile.base_bytes, memory.allocated_bytes)
        rest_bytes = max(0, profile.base_bytes + profile.rest_bytes - base_bytes)
        choose(
            replace(profile, base_bytes=base_bytes, rest_bytes=rest_bytes),
            self._goal,
            QUICK_MARKS,
        )

    def _record(self) -> None:
        cache = self._cache
        self._pause = (cache.ledger.closed, cache.ledger.clock.now())
        cache.policy = OffloadAll(spares_held=True)
        cache.regions.choice = self._first_regions
        cache.course.plan = None
        cache.bypass = cache.timer = None
        self.room.trim()  # see [Note: torn blocks]
        self._meter = cache.meter = HostMeter(
            self._away, is_autograds=lambda: cache.course.storing < 0
        )
        cache.ledger.clock.keep_spans = True
        self._pinned_bytes = cache.offloader.pool.total_bytes
        self._num_spans = len(self._trace.spans())
        self._trace.enabled = True
        cache.device.watch_copies()
        if not cache.is_compiled:
            self._names.start()
        self._recording = Recording(
            cache.device,
            cache.ledger,
            lambda: self._names.now,
            lambda: cache.moves.lingering_bytes,
            self._meter,
        )
        cache.course.observer = self._recording

    def _conclude(self) -> None:
        self._observed_bytes = self._cache.ledger.saved_bytes
        self._observed_lanes = self._lane_bytes
        is_last = self._attempts == MAX_ATTEMPTS - 1
        profile = self.peers.agreed(self._observed(), self._step, is_last=is_last)
        if profile is None:
            self._attempts += 1
            if not is_last:
                self._observe()
                return
            logger.info("ssdtrain: no plan; this model's steps cannot be observed")
            self._rest(Stage.RESTING)
            return
        self._attempts = 0
        self._seen, self._keep_bytes = profile, None
        if self._must_rest():
            return
        self._corrections = replace(self._corrections, host_costs=None)
        if self._planned and self._planned != profile.signature():
            self._corrections = replace(
                self._corrections, pace=None, held_pace=None, held_regions={}
            )
        may = self._plain is None and self._may_run_plain()
        # All of them, or the others would wait for the slowest in a step of theirs.
        self._without_hooks = self.peers.all_agree(may, "plain", self._step)
        # What all regions need fitted into the observed step. Behind a plan that steps
        # drifted from, what was measured before it is not believed either.
        is_open = self._plain is None or self._corrections.note == WITHOUT_RERUNS
        may = is_open and bool(profile.regions)
        if self._without_hooks or self.peers.all_agree(may, "regions", self._step):
            self._rest(Stage.PLAIN)
            self._plain_steps = PlainSteps(self._cache.ledger.clock)
            self._num_region_steps = 0
            self._region_steps.clear()
            self._run_plain()
            return
        self._plan()

    def _must_rest(self) -> bool:
        """Rest where ranks with plans of their own would meet in each other's
        collectives: [Note: one step for all] in hosts/peers.py. Return whether."""
        seen = self._seen
        if self.peers.agree or seen is None or not seen.communicates:
            return False
        logger.warning(
            "ssdtrain: no plan; modules that run again communicate, and the ranks do "
            "not agree on one plan (recompute='recipes' plans without such modules)"
        )
        self._rest(Stage.RESTING)
        return True

    # -- the plain step: see [Note: the plain step] in plan/calibrate.py ---------------

    def _may_run_plain(self) -> bool:
        """Return whether a step that keeps everything fits the device. Under a memory
        limit nobody would see that it is larger than the observed one."""
        capacity_bytes = self._cache.device.capacity_bytes()
        memory, profile = self._cache.ledger.start_level(), self._seen
        if capacity_bytes is None or memory is None or profile is None:
            return False
        if self._goal.is_by_memory:
            return False
        if self._keep_bytes is None:
            timeline = Timeline(profile)
            keep = Run(timeline, keep_all(timeline)).run()
            self._keep_bytes = keep.peak_bytes
        used_bytes = memory.allocated_bytes + self.room.stuck_bytes
        needed_bytes = used_bytes + self._keep_bytes
        return needed_bytes < PLAIN_SHARE * capacity_bytes

    def _run_plain(self) -> None:
        """Let the next step run without hooks; plan when enough of them have."""
        cache = self._cache
        if self._holds_rebuilds:
            self._take_rebuilds()
            return
        if self._held_regions is not None:
            self._take_held_regions(self._held_regions)
            return
        bypass, cache.bypass = cache.bypass, None
        timer, cache.timer = cache.timer, None
        meter = self._take_meter()
        before = bypass if timer is None else timer
        if isinstance(before, Paced):
            self._take_pace(before)
            return
        if self._without_hooks:
            self._run_without_hooks(bypass)
            return
        if self._num_region_steps > 1 and isinstance(timer, Bypass):
            self._keep_region_step(timer, meter)
        if self._num_region_steps == NUM_REGION_STEPS and isinstance(timer, Bypass):
            own = self._without_reruns()
            host_ms = min(own.host_forward_ms, self._idle_host_ms)
            # The slowest rank's, and the host that is the least ahead.
            times = own.step_ms, own.forward_ms, host_ms, -own.host_lead_ms
            step_ms, forward_ms, host_ms, behind_ms = self.peers.longest(
                times, "plain times", self._step
            )
            self._correct(PlainTimes(step_ms, forward_ms, host_ms, -behind_ms))
            self._hold_regions()
            return
        if isinstance(timer, Bypass):
            self._idle_host_ms = min(self._idle_host_ms, timer.host_forward_ms)
        self._num_region_steps += 1
        self._region_start = cache.ledger.closed
        self.room.trim()  # see [Note: torn blocks]
        own_meter = self._meter = cache.meter = HostMeter(
            self._away, is_autograds=lambda: cache.course.storing < 0
        )
        cache.timer = Bypass(cache.ledger.clock, lambda: own_meter.spent_ns)
        cache.ledger.clock.keep_spans = True

    def _run_without_hooks(self, before: Any) -> None:
        """Let the next step run without hooks, or take what such steps took."""
        cache, steps = self._cache, self._plain_steps
        if isinstance(before, Bypass):
            steps.ended(before, cache.ledger.closed)
        plain: PlainTimes | None = None
        if steps.round_is_over:
            # The slowest rank's, and the host that is the least ahead.
            found = self.peers.longest(steps.measured(), "plain times", self._step)
            plain = steps.believed(found)
        if plain is None:
            cache.bypass = steps.begin(cache.ledger.closed)
            return
        self._correct(plain)
        if self._seen is None:
            self._plan()
            return
        cache.bypass = Paced(cache, self._seen, self._packs, listens=self._is_on_gpu)

    def _price_regions(self, meter: HostMeter | None) -> None:
        """Take what the calls of regions cost the host in forward."""
        costs = self._host_costs
        if meter is not None and costs is not None:
            region_ms = meter.costs(HostCosts()).region_ms
            self._host_costs = replace(costs, region_ms=region_ms)

    def _take_pace(self, paced: Paced) -> None:
        """Take what a paced step told; where the host bounds it, run a held one."""
        pace = paced.pace()
        if paced.is_held:
            self._corrections = replace(self._corrections, held_pace=pace)
            self._hold_rebuilds()
            return
        self._corrections = replace(self._corrections, pace=pace)
        if pace is None or self._seen is None or not self._may_hold():
            self._plan()
            return
        self._cache.bypass = Paced(
            self._cache, self._seen, self._packs, listens=False, before=pace
        )

    def _may_hold(self) -> bool:
        """Whether a held step, which is a long one, would show anything, and nobody
        waits for it."""
        plain = self._plain
        if plain is None:
            return False
        if not (plain.is_hosted if self._without_hooks else plain.may_be_hosted):
            return False
        return self._is_on_gpu and self.peers.is_alone

    def _hold_rebuilds(self) -> None:
        """Let the next step keep what no recipe makes, and rebuild the rest behind a
        device that is held: [Note: captured steps] in calibrate.py."""
        cache, seen = self._cache, self._seen
        every = () if seen is None else tuple(seen.kinds.values())
        # Eager ones take as long as their launches: that is how far ahead to be.
        longest_ms = max(
            (item.recipe_ms for items in every for item in items), default=0
        )
        if not longest_ms:
            self._plan()
            return
        hold_ms = HOLD_MS + HOLD_FACTOR * longest_ms
        self._holds_rebuilds = True
        cache.policy = KeepAll()
        cache.regions.choice = Choice.NONE
        cache.ledger.clock.keep_spans = True
        cache.ledger.clock.before_rebuild = lambda: cache.device.hold(hold_ms)

    def _take_rebuilds(self) -> None:
        """Take what they took, the middle of those that are alike; plan."""
        clock = self._cache.ledger.clock
        self._leave_rebuilds()
        own = middle_ms(clock.last_spans(), self._empty_ms())
        self._corrections = replace(self._corrections, rebuild_ms=own)
        self._plan()

    def _hold_regions(self) -> None:
        """Let the next step be [Note: a held step of regions], where the host may bound
        it; plan behind it."""
        cache, seen = self._cache, self._seen
        before = None if seen is None else self._held_before.get(seen.signature())
        if before is not None:
            self._corrections = replace(
                self._corrections,
                rebuild_ms=before.rebuild_ms,
                held_regions=before.held_regions,
            )
        is_new = before is None and len(self._held_before) < MOST_HELD
        if seen is None or not is_new or not self._may_hold():
            self._plan()
            return
        held = HeldRegions(cache.ledger.clock, cache.device, seen)
        self._held_regions = cache.course.observer = held
        held.start()

    def _take_held_regions(self, held: HeldRegions) -> None:
        """Take what it told; plan."""
        self._leave_rebuilds()
        self._corrections = replace(
            self._corrections,
            rebuild_ms=held.rebuild_ms(self._empty_ms()),
            held_regions=held.region_times(),
        )
        if self._seen is not None:
            self._held_before[self._seen.signature()] = self._corrections
        self._plan()

    def _empty_ms(self) -> float:
        """Return what a clock finds between two moments that nothing is between."""
        device, clock = self._cache.device, self._cache.ledger.clock
        found = []
        for _ in range(NUM_EMPTY):
            device.hold(HOLD_MS)
            start = clock.now()
            found.append(clock.ms_between(start, clock.now()))
        return min(found)

    def _leave_rebuilds(self) -> None:
        clock = self._cache.ledger.clock
        self._holds_rebuilds = clock.keep_spans = False
        clock.before_rebuild = None
        held, self._held_regions = self._held_regions, None
        if held is not None:
            held.stop()
            self._cache.course.observer = Unobserved()

    def captured_plan(self) -> Plan | None:
        """Return the plan for a CUDA graph: [Note: captured steps] in calibrate.py.
        None: the one in force is not the planner's own, or none reaches the goal."""
        seen, by = self._seen, self._corrections
        if self._stage not in (Stage.SEARCHING, Stage.FOLLOWING) or seen is None:
            return None
        known = self._captured
        if known is None or known[0] is not seen or known[1] is not by:
            found: Plan | None = None
            try:
                profile = captured(seen, by)
                # What eager steps took beside their plan says nothing of a replay.
                goal = replace(self._goal, aim=1.0)
                found = choose(profile, goal, SEARCH_MARKS)
            except ConfigError as error:
                logger.warning("ssdtrain: a graph holds the eager plan: %s", error)
            known = self._captured = seen, by, found
        return known[2]

    def _keep_region_step(self, timer: Bypass, meter: HostMeter | None) -> None:
        """Keep what was measured of the step that has ended."""
        ledger = self._cache.ledger
        self._region_steps.append(
            RegionStep(
                timer=timer,
                start=self._region_start,
                end=ledger.closed,
                spans=ledger.clock.kept_spans(),
                stalls=ledger.stalls,
                meter=meter,
                num_bytes=ledger.saved_bytes,
            )
        )

    def _without_reruns(self) -> PlainTimes:
        """Return the fastest step of regions without their second forwards and stalls:
        see regionsteps.py."""
        self._cache.ledger.clock.keep_spans = False
        steps, self._region_steps = self._region_steps, []
        step = fastest(steps, self._observed_bytes)
        self._price_regions(step.meter)
        regions = {} if self._seen is None else self._seen.regions
        places = [
            (kind, number)
            for kind, runs in sorted(regions.items())
            for number in range(len(runs))
        ]
        costs = prices(step.spans())
        own = [costs.get((kind, REGION, number), 0.0) for kind, number in places]
        found = self.peers.longest(own, "times of regions", self._step)
        self._rerun_ms = {
            kind: tuple(
                ms for (of, _), ms in zip(places, found, strict=True) if of == kind
            )
            for kind in regions
        }
        return step.times().plain()

    def _correct(self, plain: PlainTimes) -> None:
        """Take these as the times of a step without ssdtrain."""
        self._plain = plain
        self._corrections = Corrections(
            plain=tuple(plain),
            note=PLAIN_STEP if self._without_hooks else WITHOUT_RERUNS,
            rerun_ms=self._rerun_ms,
            host_costs=self._host_costs,
            copy_slowdown=self._corrections.copy_slowdown,
        )

    def _plan(self) -> None:
        """Start to search for a plan for the last profile. Steps go on as they were
        until it is found."""
        profile = self._seen
        if profile is None:
            return
        capacity_bytes, torn_bytes = self._limits()
        self._goal = replace(
            self._goal, capacity_bytes=capacity_bytes, torn_bytes=torn_bytes
        )
        self._stop_search()
        if self._must_rest():
            return
        if self._planned != profile.signature():
            self.plan = None
        if self.plan is None:
            # Asked again: the plain step may have been one of smaller batches.
            fits = self._plain is not None and self._may_run_plain()
            self._cache.bypass = Unhooked() if fits else None
        if self._makes_room:
            self._planned_ratio = _with_headroom(self._largest_ratio())
        self._begin_search(SEARCH_MARKS)
        if self._stage is Stage.FOLLOWING:
            return
        if self.plan is not None:
            self._follow_from_now()
            return
        self._rest(Stage.SEARCHING)

    def _begin_search(self, effort: int) -> None:
        """Search in a process beside training; on a CPU on this thread, with this
        effort."""
        if self._seen is None:
            return
        if not self._cache.device.runs_beside:
            self._take_answer(self._answer_here(effort))
            self._follow_taken(is_now=True)
        elif self.peers.leads:
            # Each plan that is taken costs a long step: one soon, and the best.
            efforts: tuple[int, ...] = (QUICK_MARKS, LONG_MARKS)
            if not self.peers.is_alone and isinstance(self._cache.bypass, Unhooked):
                # Plain steps cost nothing; each plan that all follow does, and waits.
                efforts = efforts[1:]
            self._search = Search(self._request(self._seen, *efforts))

    def _request(self, profile: Profile, *efforts: int) -> Request:
        return Request(
            profile=profile,
            corrections=self._corrections,
            goal=self._goal,
            ratio=self._planned_ratio,
            plan=self.plan,
            efforts=efforts,
        )

    def _answer_here(self, effort: int) -> Answer:
        if self._seen is None:
            return Answer(error="no step was observed")
        *_, answer = answers(self._request(self._seen, effort))
        return answer

    def _limits(self) -> tuple[int | None, int]:
        """What the device holds now, as others come and go, and what of it blocks that
        are torn may take; the worst of all ranks: with limits of its own each would
        make a plan of its own."""
        own = self._cache.device.capacity_bytes()
        if own is None:
            return None, 0
        left = max(self._torn_bytes, self.room.stuck_bytes, self._left_bytes)
        most, torn = self.peers.longest(
            (-float(own), float(left)), "capacity", self._step
        )
        return -int(most), int(torn)

    def _await_plan(self) -> None:
        """Follow the first plan that is there.

        Raises:
            ConfigError: none reaches the goal.
        """
        measured = self._last_step_ms()
        if measured is not None and isinstance(self._cache.bypass, Unhooked):
            self._overhead.plain_step(measured)
        self._take_found()
        if self.peers.observes(False, self._step):
            self._observe()

    def _take_found(self) -> None:
        """Take what was found, and follow it when this rank and all others may."""
        answer = self._next_answer()
        if answer is not None:
            self._take_answer(answer)
        self._follow_taken()

    def _next_answer(self) -> Answer | None:
        """What was found beside training, if its last part has come in this step. The
        leading rank of several searches for all."""
        if self._taken is not None and not self.peers.is_alone:
            return None  # one after the other: all ranks follow the same ones
        if self.peers.leads:
            return self._own_answer()
        if self._reading is None:
            text = self.peers.offered()
            if text is None:
                return None
            own_s = TURN_S if self._seen is None else turn_of(self._seen)
            self._reading = Reading(text, turn_s=own_s)
        answer = self._reading.advance()
        if answer is not None:
            self._reading = None
        return answer

    def _own_answer(self) -> Answer | None:
        search = self._search
        if search is None:
            return None
        answer = search.advance()
        if not search.is_over:
            if answer is not None and not answer.error:
                self.peers.offer(search.text)
                return answer
            return None  # a quick search may find nothing where a longer one does
        self._search, text = None, search.text
        self._ended.append(search)
        if answer is None and self.plan is not None:
            logger.warning("ssdtrain: no other plan: %s", search.error)
            return None
        if answer is None:
            logger.warning(
                "ssdtrain: the search for a plan failed (%s); this step waits for "
                "another one",
                search.error,
            )
            answer = self._answer_here(SEARCH_MARKS)
            text = "\n".join(in_parts(answer, PART))
        self.peers.offer(text)
        return answer

    def _take_answer(self, answer: Answer) -> None:
        """Follow what was found, if it is better than the plan in force.

        Raises:
            ConfigError: nothing was, and there is no other plan.
        """
        if answer.error and self.plan is None and self._planned_ratio > 1.0:
            # What does not grow with a batch was taken to do so, too.
            logger.info("ssdtrain: no plan has room for the largest batch so far")
            self._planned_ratio = 1.0
            self._begin_search(SEARCH_MARKS)
        elif answer.error and self.plan is None:
            self._clear()  # training ends here
            raise ConfigError(answer.error)
        elif answer.error:
            logger.warning("ssdtrain: the plan stays: %s", answer.error)
        elif answer.stays and answer.plan is not None:
            prediction = answer.plan.prediction
            if self._taken is None:
                self._room_ratio = self._planned_ratio
                self._leave_room()
            if self._taken is not None:
                self._taken = replace(self._taken, prediction=prediction)
            elif self.plan is not None:
                self.plan = replace(self.plan, prediction=prediction)
                if self._num_tightened:
                    self._overhead.planned()  # it took too long: does it still?
        elif answer.plan is not None and self._seen is not None:
            self._taken = answer.plan
            self._prepare(answer.plan)

    def _prepare(self, plan: Plan) -> None:
        """Have the pinned memory made that the plan's step needs: while it is followed
        for the first time nothing waits for that."""
        seen, cache = self._seen, self._cache
        if seen is None or not cache.device.runs_beside:
            return
        sizes = [
            round(order.num_bytes * max(1.0, self._planned_ratio))
            for kind in seen.lanes
            for order in plan.orders.get(kind, ())
            if order.release_after > 0
        ]
        cache.offloader.pool.prepare(sizes, soon=cache.tables.place_sizes)

    def _follow_taken(self, *, is_now: bool = False) -> None:
        """Follow the plan that was taken last, once its memory is there, in the same
        step as all ranks.

        is_now: they have all taken it in this step.
        """
        plan, pool = self._taken, self._cache.offloader.pool
        is_ready = plan is not None and self._seen is not None and pool.is_prepared
        if not (is_now or self.peers.adopts(is_ready, self._step)):
            return
        if plan is None or self._seen is None:
            return
        self._taken = None
        self.plan, self._planned = plan, self._seen.signature()
        self._room_ratio = self._planned_ratio
        self.num_plans += 1
        if self.peers.is_alone and not self._holds_overhead:
            self._trial = Trial(plan, self._trial)
        self._follow_from_now()

    def _stop_search(self) -> None:
        search, self._search = self._search, None
        self._reading = self._taken = None
        if search is not None:
            search.stop()
            self._ended.append(search)

    def _clear(self) -> None:
        while self._ended:
            self._ended.pop().clear(wait=True)

    def _follow_from_now(self) -> None:
        self._rest(Stage.FOLLOWING)
        if self.plan is None:
            return
        self._hand_over(self.plan)
        self._num_followed = 0
        self._retries.planned()
        if self._goal.is_by_memory:
            self._peaks.planned()
        if self.plan.prediction is not None:
            self._drift.planned(self.plan.prediction.step_ms)
        self._overhead.planned()
        logger.info("ssdtrain: plan %d: %s", self.num_plans, self.plan.policy)

    def _hand_over(self, plan: Plan) -> None:
        """Let the cache follow this plan from now on."""
        cache = self._cache
        cache.course.plan = plan
        self._leave_room()
        cache.regions.choice = Choice.PLANNED
        self.room.trim()  # see [Note: torn blocks]
        # Under a byte budget somebody must see that a batch is larger than others.
        unhooked = (
            plan.keeps_all
            and not self._goal.is_by_memory
            and not cache.verifier.checks_all
        )
        cache.bypass = Unhooked() if unhooked else None

    @property
    def _away(self) -> Placement:
        """Return where the observed step's policy moves tensors."""
        to_ssd = self._cache.offloader.drain is Drain.AT_ONCE
        return Placement.OFFLOAD_SSD if to_ssd else Placement.OFFLOAD

    @property
    def _is_on_gpu(self) -> bool:
        return self._cache.device.torch_device.type == "cuda"

    def _observed(self, *, is_cold: bool = False) -> Profile | None:
        cache, recording = self._cache, self._recording
        if recording is not None:
            recording.stop()  # before what follows, which waits for the device
            recording.waited_ms = self._waited_ms()
        cache.course.observer = Unobserved()
        meter = self._take_meter()
        self._names.stop()
        cache.offloader.wait_io()  # the drive is measured, and idle for its probe
        self._trace.enabled = self._wants_trace
        clock = cache.ledger.clock
        clock.keep_spans = False
        copies = cache.device.watched_copies()
        grown_bytes = cache.offloader.pool.total_bytes - self._pinned_bytes
        if grown_bytes > COLD_BYTES and not self._attempts and not is_cold:
            return None  # once: the next step finds the memory there
        copying_ms = sum(copy.ms for copy in copies)
        if len({copy.outwards for copy in copies}) < 2:
            copies += probe(cache.device, cache.offloader.pool)
        if recording is None:
            return None
        spans = self._trace.spans()[self._num_spans :]
        contention = measure(cache.device, cache.offloader.pool, clock, copies)
        drive = fitted_drive(cache.offloader.storage, spans, NUM_PROBE_THREADS)
        if drive is not None:
            direct = isinstance(cache.offloader, DirectOffloader)
            drive = drive._replace(direct=direct)
        profile = recording.profile(
            clock.last_spans(),
            fitted_links(copies, drive, contention),
            cache.offloader.pool.cap_bytes,
            copying_ms,
            {**self._notes, "copy_slowdown": contention.how},
        )
        self._packs = recording.packs()
        self._torn_bytes = recording.torn_bytes
        self._cached_bytes = recording.cached_bytes
        if profile is None or meter is None or not self._is_on_gpu or is_cold:
            return profile
        if self._host_costs is None:
            self._host_costs = host_costs(cache.device.torch_device)
        return replace(profile, host_costs=self._host_costs)

    def _waited_ms(self) -> float:
        """By how much more than usual passed since the observed step's end.

        The first stage of a pipeline plans before it sends anything, so that the others
        wait between their observed step and the next for it, and only then.
        """
        clock, (end, start) = self._cache.ledger.clock, self._pause
        if end is None:
            return 0.0
        usual = clock.ms_between(end, start)
        now = clock.ms_between(self._cache.ledger.closed, clock.now())
        return max(0.0, now - usual)

    def _rest(self, stage: Stage) -> None:
        self._stage = stage
        self._starts.clear()
        self._recording = None
        self._cache.regions.choice = self._first_regions
        # A limit holds for what no plan knows as well: it waits rather than stays.
        waits = self._goal.is_by_memory and stage is not Stage.RESTING
        away = Placement.OFFLOAD if waits else Placement.OFFLOAD_IF_IN_TIME
        self._cache.policy = OffloadAll(away, spares_held=True)

    # -- following ----------------------------------------------------------------

    def _follow(self) -> None:
        self._take_found()
        self._sample_host()
        self._make_room()
        self._keep_within()
        self._leave_more()
        measured = self._last_step_ms()
        if measured is not None and self._trial is not None:
            before = self._trial.step(measured)
            if before is not None:
                self._go_back(before)
                return
        self._hold_overhead(measured)
        drifts = self._drift.step(
            measured if self._looks_at_times else None, self._cache.course.num_strayed
        )
        if self.peers.observes(drifts, self._step):
            logger.info("ssdtrain: the plan drifts (%s): observing", self._drift.error)
            self._observe()

    def _last_step_ms(self) -> float | None:
        """Time of the last step that has ended for sure, from its start to that of the
        next; None if it is not known, or its batch was of another size."""
        clock, starts = self._cache.ledger.clock, self._starts
        if starts and self._cache.course.num_resized:
            starts[-1] = starts[-1][0], False
        starts.append((clock.now(), True))
        if len(starts) < 3:
            return None
        # The last step may still run on the device; the one before has ended.
        (before, is_alike), (after, _), _ = starts
        del starts[0]
        return clock.ms_between(before, after) if is_alike else None

    def _go_back(self, before: Plan) -> None:
        """Return to the plan before: the one in force is slower than predicted."""
        logger.info("ssdtrain: plan %d is slower than it said", self.num_plans)
        self._stop_search()
        self.plan, self._trial = before, Trial(before)
        self._follow_from_now()
        if not self._goal.is_by_memory:
            self._aim_lower(GONE_BACK)  # or the next search would find it again

    @property
    def _holds_overhead(self) -> bool:
        """Whether this rank, for all, holds an overhead over steps that it measured:
        those of ranks that wait for each other take as long on each."""
        is_own = not self._goal.is_by_memory and self.peers.leads
        return is_own and self._overhead.knows_plain

    @property
    def _looks_at_times(self) -> bool:
        """Whether steps that take other times are a reason to observe again. Of ranks
        that wait for each other one is enough; and where plans are compared with plain
        steps, that comes first: an observed step is a long one."""
        judges = self._holds_overhead and not self._overhead.is_judged
        return self.peers.leads and not judges

    def _hold_overhead(self, measured_ms: float | None) -> None:
        """Plan for less where steps take more than they may: see
        [Note: the measured overhead]."""
        plan = self.plan
        if not self._holds_overhead or plan is None or plan.prediction is None:
            return
        if self._taken is not None and not self.peers.is_alone:
            return  # others may be about to follow it
        part = self._overhead.step(
            measured_ms, plan.prediction.overhead, self._goal.max_overhead
        )
        if part is None:
            return
        blamed = self._overhead.blamed_on_copies(plan.prediction)
        # Of one rank copies are left when a plan that promises less took as long.
        if blamed is None or (self.peers.is_alone and self._goal.aim == 1.0):
            self._aim_lower(part)
        elif self._num_tightened < MOST_TIGHTENED:
            self._num_tightened += 1
            logger.info("ssdtrain: copies cost compute %.1f %%", 100 * blamed)
            blamed += self._corrections.copy_slowdown
            self._corrections = replace(self._corrections, copy_slowdown=blamed)
            self._search_for_less()

    def _aim_lower(self, part: float) -> None:
        """Search for a plan that promises only this part of the overhead that plans
        may have by now."""
        if self._num_tightened == MOST_TIGHTENED:
            return
        self._num_tightened += 1
        self._goal = replace(self._goal, aim=self._goal.aim * part)
        logger.info(
            "ssdtrain: plan %d takes longer than it may: the next one may predict "
            "%.2f %%",
            self.num_plans,
            100 * self._goal.overhead,
        )
        self._search_for_less()

    def _search_for_less(self) -> None:
        self._stop_search()
        self._trial = None  # the plan before promised as much
        self._begin_search(SEARCH_MARKS)

    @property
    def _makes_room(self) -> bool:
        """Whether plans are for the largest batch so far: [Note: sizes]."""
        return self._goal.is_by_memory and self.peers.is_alone

    def _meet(self) -> None:
        """Note the sizes of the lanes of the step that has ended."""
        self._lane_bytes = self._cache.lanes.take_most_bytes()
        if self._cache.course.plan is not None:
            return  # which decides what is counted
        for kind, num_bytes in self._lane_bytes.items():
            most_bytes = self._met_bytes.get(kind, 0)
            self._met_bytes[kind] = max(most_bytes, num_bytes)

    def _ratio_of(self, lanes: dict[str, int]) -> float:
        """Return the most of these sizes over the observed one of their kind, and at
        least 1."""
        ratios = (
            lanes.get(kind, 0) / observed_bytes
            for kind, observed_bytes in self._observed_lanes.items()
            if observed_bytes
        )
        return max((1.0, *ratios))

    def _largest_ratio(self) -> float:
        """Return the size of the largest lane so far over the observed one's."""
        return max(self._met_ratio, self._ratio_of(self._met_bytes))

    def _make_room(self) -> None:
        """Under a memory limit, plan for the largest batch so far: [Note: sizes]."""
        if not self._makes_room:
            return
        course = self._cache.course
        if course.planned_bytes:
            ratio = course.resized_bytes / course.planned_bytes
            if course.num_outgrown:
                # It was told by a first tensor; others may grow with its square.
                found = self._ratio_of(self._lane_bytes)
                ratio = max(ratio, min(found, ratio * ratio))
            self._met_ratio = max(self._met_ratio, ratio)
        ratio = self._largest_ratio()
        # A search ends with a plan that is followed before the next one begins, or
        # batches that grow and grow would never have one.
        is_awaited = self._search is not None and not self._search.has_answered
        if ratio <= self._planned_ratio * (1 + SLACK) or is_awaited or self._taken:
            return
        self._planned_ratio = _with_headroom(ratio)
        self._stop_search()  # its plan would be for smaller ones
        self._trial = None  # and so was the plan before this one
        self._begin_search(QUICK_MARKS)

    def _leave_room(self) -> None:
        """Under a memory limit, let batches for which the plan in force has no room go
        another way: [Note: sizes]. Ranks that gather weights together go one way."""
        bounded = self._makes_room and self._stage is Stage.FOLLOWING
        course = self._cache.course
        course.most_ratio = self._room_ratio if bounded else math.inf
        course.runs_all = bounded and self._first_regions is Choice.ALL

    def _keep_within(self) -> None:
        """Under a memory limit, leave more room if a step went beyond it: see
        [Note: measured peaks]."""
        if not self._goal.is_by_memory or not self.peers.is_alone:
            return
        course = self._cache.course
        is_alike = not (course.num_strayed or course.num_outgrown)
        over_bytes = self._peaks.step(self._goal, is_alike)
        if not over_bytes or self._num_tightened == MOST_TIGHTENED:
            return
        self._num_tightened += 1
        logger.info("ssdtrain: plan %d takes %d bytes more", self.num_plans, over_bytes)
        spare_bytes = self._goal.spare_bytes + over_bytes
        self._goal = replace(self._goal, spare_bytes=spare_bytes)
        self._stop_search()
        self._trial = None  # the plan before took more than it may
        self._begin_search(QUICK_MARKS)

    def _leave_more(self) -> None:
        """Leave more free if the allocator had to empty its cache under this plan: see
        [Note: retries] in peaks.py."""
        if not self.peers.is_alone or not self._retries.step():
            return
        limit = self._goal.limit_bytes
        if limit is None or self._num_tightened == MOST_TIGHTENED:
            return
        self._num_tightened += 1
        logger.info("ssdtrain: plan %d leaves the allocator too little", self.num_plans)
        # As for torn blocks: where a plan can, and no error where none can.
        left_bytes = self._goal.torn_bytes + int(DEVICE_RESERVE * limit)
        if self._left_bytes:
            left_bytes = max(left_bytes, self._cached_bytes)
        self._left_bytes = min(left_bytes, int(MOST_TORN * limit))
        self._goal = replace(self._goal, torn_bytes=self._left_bytes)
        self._stop_search()
        self._trial = None  # the plan before left as little
        self._begin_search(QUICK_MARKS)

    def _sample_host(self) -> None:
        """Time the hooks of one step in many; plan with what they cost by now."""
        meter = self._take_meter()
        if not self._is_on_gpu or self._cache.bypass is not None:
            return
        if meter is not None and self._host_costs is not None:
            # The first sample takes the place of the probe's chain.
            weight = WEIGHT if self._was_sampled else 1.0
            self._was_sampled = True
            found = meter.costs(self._host_costs)
            self._reprice(mixed(self._host_costs, found, weight))
        self._num_followed += 1
        if not self.peers.leads:
            return  # who searches for all knows what its own cost
        first = self._num_followed == FIRST_SAMPLE
        if first or self._num_followed % SAMPLED_STEPS == 0:
            clock = self._cache.ledger.clock
            self._meter = self._cache.meter = HostMeter(
                self._away,
                moment=clock.now,
                module_of=self._module_of,
                num_rebuilds=lambda: clock.num_begun,
            )

    def _take_meter(self) -> HostMeter | None:
        meter, self._meter = self._meter, None
        self._cache.meter = None
        return meter

    def _module_of(self, kind: str, item: int) -> str:
        """Return the module of an item of the profile."""
        items = () if self._seen is None else self._seen.kinds.get(kind, ())
        return items[item].module if 0 <= item < len(items) else ""

    def _reprice(self, costs: HostCosts) -> None:
        """These are the host's costs; if they are others than those that the plan was
        made with, search again."""
        self._host_costs, profile = costs, self._seen
        if profile is None or not self.peers.leads or self._search is not None:
            return
        before = self._corrections.host_costs or profile.host_costs
        if is_far(before, costs):
            self._corrections = replace(self._corrections, host_costs=costs)
            self._begin_search(SEARCH_MARKS)

    def _predict(self) -> None:
        following = self._stage is Stage.FOLLOWING and self.plan is not None
        prediction = self.plan.prediction if following and self.plan else None
        ledger = self._cache.ledger
        ledger.predicted_ms = None if prediction is None else prediction.step_ms


def _with_headroom(ratio: float) -> float:
    """Return the size to plan for where the largest batch so far has this one."""
    return ratio * HEADROOM if ratio > 1 + SLACK else 1.0
