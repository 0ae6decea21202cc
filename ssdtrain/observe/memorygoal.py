"""What fits into device memory, and whether steps under a plan do.

What was predicted is compared with the allocator's own counts: [Note: measured peaks]
and [Note: retries] in peaks.py, [Note: torn blocks] in room.py. A goal that steps went
beyond gets stricter, and a plan is searched for again.
(tests/ssdtrain/observe/test_peaks.py, test_room.py, test_memorygoal.py)
"""

import logging
from dataclasses import replace

from ssdtrain.cache.cache import TensorCache
from ssdtrain.observe.observation import Observation
from ssdtrain.observe.peaks import PeakWatch, RetryWatch
from ssdtrain.observe.room import GROWING, Room
from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.goal import DEVICE_RESERVE, MOST_TORN, Goal
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.simulate import Simulation, keep_all
from ssdtrain.plan.timeline import Timeline

logger = logging.getLogger(__name__)

PLAIN_SHARE = 0.9
"""Share of the device's memory that a step without ssdtrain may seem to take."""


class MemoryGoal:
    """Compares the memory of steps with the goal's."""

    def __init__(
        self,
        cache: TensorCache,
        goal: Tightened,
        room: Room,
        observation: Observation,
        peers: Peers,
    ) -> None:
        self._cache = cache
        self.goal = goal
        self._room = room
        self._observation = observation
        self._peers = peers
        self._peaks = PeakWatch(cache.device, cache.ledger)
        self._retries = RetryWatch(cache.device)
        self._left_bytes = 0
        """What plans leave free because the allocator had to try again."""
        self._keep: tuple[Profile, int] | None = None
        """The peak of a step with everything kept, once somebody has asked."""

    def fits_plain(self, profile: Profile, skipped_bytes: int = 0) -> bool:
        """Return whether a step that keeps everything fits the memory limit, or the
        device.

        Args:
            skipped_bytes: of layers that this step skipped, and others may not.
        """
        goal = self.goal.goal
        if goal.is_by_memory:
            keep_bytes = self._keep_bytes(profile) + skipped_bytes
            limits = goal.most_bytes(profile), goal.easy_bytes(profile)
            fits = all(keep_bytes <= limit for limit in limits if limit is not None)
            return fits or goal.holds_all(keep_bytes)
        capacity_bytes = self._cache.device.capacity_bytes()
        memory = self._cache.ledger.start_level()
        if capacity_bytes is None or memory is None:
            return False
        used_bytes = memory.allocated_bytes + self._room.stuck_bytes
        needed_bytes = used_bytes + self._keep_bytes(profile) + skipped_bytes
        return needed_bytes < PLAIN_SHARE * capacity_bytes

    def _keep_bytes(self, profile: Profile) -> int:
        if self._keep is None or self._keep[0] is not profile:
            timeline = Timeline(profile)
            self._keep = (
                profile,
                Simulation(timeline, keep_all(timeline)).run().peak_bytes,
            )
        return self._keep[1]

    def look_at_device(self, step: int) -> None:
        """Plan for what the device holds now, as others come and go, and for what of it
        blocks that are torn may take; the worst of all ranks: with limits of its own
        each would make a plan of its own."""
        own = self._cache.device.capacity_bytes()
        if own is None:
            self.goal.fit(None, 0)
            return
        torn_bytes = self._observation.torn_bytes
        left = max(torn_bytes, self._room.unusable_bytes, self._left_bytes)
        most, torn = self._peers.longest((-float(own), float(left)), "capacity", step)
        self.goal.fit(-int(most), int(torn))

    def planned(self) -> None:
        """Another plan is followed from now on."""
        self._retries.planned()
        if self.goal.goal.is_by_memory:
            self._peaks.planned()

    def show_peak(self) -> None:
        """Start the allocator's maximum again: the observed step needed more than the
        next ones, whose own is asked for."""
        self._cache.device.reset_peak()

    def needed_bytes(self) -> int | None:
        """What this rank's steps needed at most above their start since then; None:
        nobody can tell, or they were not of the size that was observed."""
        start, end = self._cache.ledger.levels
        cursor = self._cache.cursor
        if start is None or end is None or cursor.num_strayed or cursor.num_outgrown:
            return None
        return end.max_allocated_bytes - start.allocated_bytes

    def over_bytes(self, goal: Goal) -> int:
        """Count the start of a step; by how much the step before, this rank's, went
        beyond the memory limit of this goal."""
        if not goal.is_by_memory:
            return 0
        cursor = self._cache.cursor
        is_alike = not (cursor.num_strayed or cursor.num_outgrown)
        return self._peaks.step(goal, is_alike)

    def is_short(self) -> bool:
        """Whether the allocator had to empty its cache under this plan; the next one is
        to leave more: see [Note: retries] in peaks.py."""
        grows = self._room.segments == GROWING
        if not self._peers.is_alone or not self._retries.step(grows=grows):
            return False
        goal = self.goal.goal
        limit = goal.limit_bytes
        if limit is None or not self.goal.can_be:
            return False
        logger.info("ssdtrain: the plan leaves the allocator too little")
        # As for torn blocks: where a plan can, and no error where none can.
        left_bytes = goal.torn_bytes + int(DEVICE_RESERVE * limit)
        if self._left_bytes:
            left_bytes = max(left_bytes, self._observation.cached_bytes)
        self._left_bytes = min(left_bytes, int(MOST_TORN * limit))
        self.goal.tighten(replace(goal, torn_bytes=self._left_bytes))
        return True
