"""Plans for smaller batches, searched for once one for the largest is followed.

See [Note: plans by size] in cache/bysize.py, and [Note: searched for smaller batches]
in plan/search.py. Sizes are spread evenly from the smallest batch so far to the largest
that there is room for. They are plans of the same observed step for the same limit, so
they stay when another plan for the largest is taken.

Before there is a plan, steps run all regions again, which takes the host as long for a
short batch as for a long one. So until then lanes follow plans that need no search
(plan/unsearched.py), as far as their sizes are known. What keeps everything stays
next to the plan that is found, and so do those with more room.
(tests/ssdtrain/cache/test_bysize.py)
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from ssdtrain.cache.cache import TensorCache
from ssdtrain.plan.calibrate import corrected
from ssdtrain.plan.choose import QUICK_MARKS, SEARCH_MARKS
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.scaled import Growth, UpTo
from ssdtrain.plan.search import Answer, Request, Search, answers
from ssdtrain.plan.unsearched import unsearched

logger = logging.getLogger(__name__)

NUM_SIZES = 4
"""Plans for smaller batches at most: few that are searched for thoroughly are better
than many, and each has a table of its own."""
LEAST_MET = 4
"""Batches of different sizes that are met before it is known what the sizes are."""
WORTHWHILE = 0.9
"""Part of the room that the smallest batch takes at most, or one plan serves all."""
GROWN = 1.05
"""By how much more room another plan has for which others are searched for anew."""


class SmallerPlans:
    """Searches for them during training, and has lanes follow them."""

    def __init__(self, cache: TensorCache) -> None:
        self._cache = cache
        self._asked: Request | None = None
        """For the plan in force: the step and the limit that they are for as well."""
        self._request: Request | None = None
        """For those of other sizes."""
        self._search: Search | None = None
        self._ended: list[Search] = []
        self._unsearched: list[UpTo] | None = None
        """Plans that needed no search; None: not made yet."""
        self._found: list[UpTo] = []
        """Others that were searched for, and are followed."""
        self._coming: list[UpTo] = []
        """Those of the search that runs, or that wait for pinned memory."""
        self._num_answers = 0
        self._waits = False
        """For pinned memory, to be followed then."""

    @property
    def is_searching(self) -> bool:
        """Whether others are searched for, or wait for pinned memory."""
        return self._search is not None or self._waits

    def planned(self, asked: Request) -> None:
        """Another plan is in force, or none yet, for this observed step and limit."""
        seen, goal, before = asked.profile, asked.goal, self._asked
        if before is None or before.profile is not seen or before.goal != goal:
            self.stop()
        self._asked = asked
        if self._waits:
            self._prepare()  # what the plan in force moves is others by now
        self._make_unsearched()
        self._follow()

    def step_starts(self) -> None:
        """At the start of every step: batches may differ in size by now."""
        if self._make_unsearched():
            self._follow()

    def _make_unsearched(self) -> bool:
        """Make those that need no search, once batches differ in size: until then
        nobody follows them. Return whether they were made now."""
        asked, ratios = self._asked, self._cache.cursor.by_size.ratios
        if asked is None or self._unsearched is not None or len(ratios) < 2:
            return False
        profile = corrected(asked.profile, asked.corrections)
        self._unsearched = unsearched(profile, asked.goal, asked.growth)
        return True

    def step(self, *, may_begin: bool) -> None:
        """At the start of a step that follows a plan.

        Args:
            may_begin: whether to search for others if there are none: no better plan
                for the largest is searched for, which would be a candidate for them,
                and would have to share the machine.
        """
        self._ended = [search for search in self._ended if not search.clear()]
        if self._search is not None:
            self._read(self._search)
        elif self._waits:
            if self._cache.offloader.pool.is_prepared:
                self._found, self._waits = self._coming, False
                self._follow()
        elif self._asked is not None and may_begin:
            if self._request is None or self._has_grown(self._request):
                self._begin(self._asked)

    def _has_grown(self, request: Request) -> bool:
        """Whether the plan in force has room for much larger batches than the one that
        these plans were found next to."""
        return self._cache.cursor.most_ratio > GROWN * request.ratio

    def _begin(self, asked: Request) -> None:
        cursor = self._cache.cursor
        kept = [each.ratio for each in self._unsearched or () if each.plan.keeps_all]
        ratios = sizes_for(cursor.by_size.ratios, cursor.most_ratio, *kept)
        if not ratios or not cursor.by_size.is_trusted:
            return
        self._coming, self._num_answers = [], 0
        beside = self._cache.device.runs_beside
        self._request = request = replace(
            asked,
            ratio=cursor.most_ratio,
            plan=cursor.plan,
            efforts=(),
            smaller=ratios,
            smaller_effort=SEARCH_MARKS if beside else QUICK_MARKS,
        )
        if beside:
            self._search = Search(request)
            return
        for answer in answers(request):
            self._take(answer)
        self._prepare()

    def _read(self, search: Search) -> None:
        answer = search.answer()
        if answer is not None:
            self._take(answer)
        if search.is_over:
            if search.error:
                logger.warning(
                    "ssdtrain: no plans for smaller batches: %s", search.error
                )
            self._search = None
            self._ended.append(search)
            self._prepare()

    def _take(self, answer: Answer) -> None:
        request = self._request
        if request is not None and answer.plan is not None:
            self._coming.append(UpTo(request.smaller[self._num_answers], answer.plan))
        self._num_answers += 1

    def _prepare(self) -> None:
        """Have pinned memory made for all that any of the plans moves, as far as they
        may have some."""
        request, largest = self._request, self._cache.cursor.plan
        if request is None or largest is None:
            return
        found, self._coming = self._coming, []
        sizes = moved_bytes(largest, request.ratio, request.growth)
        limit = request.profile.host_bytes
        for ratio, plan in found:
            own = moved_bytes(plan, ratio, request.growth)
            both = {key: max(own.get(key, 0), sizes.get(key, 0)) for key in own | sizes}
            if limit is None or sum(both.values()) <= limit:
                self._coming.append(UpTo(ratio, plan))
                sizes = both
        pool, tables = self._cache.offloader.pool, self._cache.tables
        self._waits = bool(self._coming)
        if self._waits and self._cache.device.runs_beside:
            pool.prepare(sizes.values(), soon=tables.place_sizes)

    def _follow(self) -> None:
        cursor, plans = self._cache.cursor, self._found
        for each in self._unsearched or ():
            # Where there is room, what was searched for is better.
            if not cursor.plan or each.plan.keeps_all or each.ratio > cursor.most_ratio:
                plans = [*plans, each]
        cursor.by_size.follow(cursor.plan, plans)
        logger.info("ssdtrain: %d plans for smaller batches", len(plans))

    def stop(self) -> None:
        """Forget all plans, and search for none. Idempotent."""
        search, self._search = self._search, None
        if search is not None:
            search.stop()
            self._ended.append(search)
        self._asked = self._request = None
        self._unsearched, self._found, self._coming = None, [], []
        self._num_answers, self._waits = 0, False
        self._cache.cursor.by_size.leave()

    def close(self) -> None:
        """Leave nothing behind. Idempotent."""
        self.stop()
        while self._ended:
            self._ended.pop().clear(wait=True)


def sizes_for(met: Sequence[float], most: float, *kept: float) -> tuple[float, ...]:
    """Return for which sizes there are to be plans, the largest first: evenly between
    the smallest that was met and the most that there is room for.

    kept: up to which size what keeps everything fits.
    """
    if len(met) < LEAST_MET:
        return ()
    least = max((min(met), *kept))
    if least > WORTHWHILE * most:
        return ()
    step = (most - least) / (NUM_SIZES + 1)
    return tuple(most - step * (number + 1) for number in range(NUM_SIZES))


def moved_bytes(plan: Plan, ratio: float, growth: Growth) -> dict[tuple[str, int], int]:
    """Return the sizes of what leaves, by kind of lane and item."""
    return {
        (kind, item): growth.bytes_of(order.name, order.num_bytes, ratio)
        for kind, orders in plan.orders.items()
        for item, order in enumerate(orders)
        if order.release_after > 0
    }
