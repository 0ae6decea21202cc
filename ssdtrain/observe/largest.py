"""The largest batch so far, which plans under a memory limit have room for.

See [Note: sizes] in ssdtrain/cache/sizes.py. Sizes are those of a lane, over the
observed one's of its kind.
(tests/ssdtrain/cache/test_sizes.py, tests/ssdtrain/observe/test_largest.py)
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.lanes import LaneSize, larger_of
from ssdtrain.cache.sizes import SLACK
from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.scaled import Growth

HEADROOM = 1.06
"""A plan for larger batches leaves room for some that are larger still: the longest
batch so far is seldom the longest of all, and each one more is another search."""


class LargestBatch:
    """Knows the sizes of batches, that of the next plan and that of the one in
    force."""

    def __init__(self, cache: TensorCache, goal: Tightened, peers: Peers) -> None:
        self.planned_ratio = 1.0
        """Size of the batch that is planned for."""
        self._cache = cache
        self._goal = goal
        self._peers = peers
        self._room_ratio = 1.0
        """The same of the plan in force: there is room for."""
        self._met_ratio = 1.0
        """The same of the largest lane under a plan."""
        self._met: dict[str, LaneSize] = {}
        """The largest lane of each kind, of all that followed no plan."""
        self._lanes: dict[str, LaneSize] = {}
        """The same of the step that has ended."""
        self._observed_lanes: dict[str, LaneSize] = {}
        """The same of the observed one."""

    @property
    def makes_room(self) -> bool:
        """Whether plans are for the largest batch so far. Ranks that gather weights
        together go one way."""
        return self._goal.goal.is_by_memory and self._peers.is_alone

    @property
    def most_elements(self) -> int:
        """Of the arguments of a forward whose batch is no larger than the observed one;
        0: they do not tell."""
        return self._cache.cursor.by_size.most_elements

    # -- what was met -------------------------------------------------------------

    def step_ended(self) -> None:
        """Note the sizes of the step that has ended."""
        self._lanes, cursor = self._cache.lanes.take_largest(), self._cache.cursor
        if cursor.plan is None:
            for kind, size in self._lanes.items():
                self._met[kind] = larger_of(self._met.get(kind, LaneSize()), size)
        if not cursor.num_strayed:
            self._note(self._lanes)

    def observed(self) -> None:
        """The step that has ended was observed."""
        self._observed_lanes = self._lanes
        self._cache.cursor.by_size.observed()
        self._note(self._lanes)
        self._note(self._met)

    def _note(self, lanes: Mapping[str, LaneSize]) -> None:
        """See [Note: plans by size] in cache/bysize.py."""
        for kind, size in lanes.items():
            observed = self._observed_lanes.get(kind)
            if observed is not None:
                by_size = self._cache.cursor.by_size
                by_size.note(size.num_elements, size.over(observed))

    def growth_of(self, seen: Profile, fixed_share: float) -> Growth:
        """Return how the observed step grows with its batch.

        Args:
            seen: that step.
            fixed_share: part of its times that does not.
        """
        return replace(
            self._cache.cursor.met.growth(seen.kinds), fixed_share=fixed_share
        )

    def restart(self) -> None:
        """The next step is observed: what plans are for is not known any more."""
        self.planned_ratio = self._met_ratio = 1.0

    def _ratio_of(self, lanes: Mapping[str, LaneSize]) -> float:
        """Return the most of these sizes over the observed one of their kind, and at
        least 1."""
        ratios = (
            lanes[kind].over(observed)
            for kind, observed in self._observed_lanes.items()
            if kind in lanes
        )
        return max((1.0, *ratios))

    def _largest_ratio(self) -> float:
        return max(self._met_ratio, self._ratio_of(self._met))

    def has_grown(self) -> bool:
        """Take the sizes of a step under a plan; whether what is planned for, or a plan
        in force, has no room for the largest one so far."""
        if not self.makes_room:
            return False
        cursor = self._cache.cursor
        if cursor.planned_bytes:
            ratio = cursor.resized_bytes / cursor.planned_bytes
            if cursor.num_outgrown:
                # It was told by a first tensor; others may grow with its square.
                found = self._ratio_of(self._lanes)
                ratio = max(ratio, min(found, ratio * ratio))
            self._met_ratio = max(self._met_ratio, ratio)
        elif cursor.num_outgrown:  # its arguments told, and it followed no plan
            self._met_ratio = max(self._met_ratio, self._ratio_of(self._lanes))
        return self._largest_ratio() > self.planned_ratio * (1 + SLACK)

    # -- plans --------------------------------------------------------------------

    def plan_for_it(self) -> None:
        """Plans are for the largest batch so far, under a memory limit."""
        if self.makes_room:
            self.planned_ratio = _with_headroom(self._largest_ratio())

    def plan_for_observed(self) -> None:
        """No plan has room for the largest one: they are for the observed batch."""
        self.planned_ratio = 1.0

    def planned(self) -> None:
        """The plan in force has room for the batches that were planned for."""
        self._room_ratio = self.planned_ratio

    def leave_room(self, *, is_followed: bool, runs_all: bool) -> None:
        """Under a memory limit, let batches for which the plan in force has no room go
        another way.

        Args:
            is_followed: whether there is one, of our own.
            runs_all: whether all regions run again in them.
        """
        is_bounded = self.makes_room and is_followed
        cursor = self._cache.cursor
        cursor.most_ratio = self._room_ratio if is_bounded else math.inf
        cursor.runs_all = is_bounded and runs_all


def _with_headroom(ratio: float) -> float:
    """Return the size to plan for where the largest batch so far has this one."""
    return ratio * HEADROOM if ratio > 1 + SLACK else 1.0
