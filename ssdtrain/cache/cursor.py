"""Counts marks, hands out the plan's orders, and tells an observer.

See [Note: marks] in plan/profile.py. A lane that saves other tensors than its plan
expects leaves the plan: it is counted, and goes on under the rule.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ssdtrain.cache.bysize import PlansBySize, SizedPlan
from ssdtrain.cache.identity import Key, is_held
from ssdtrain.cache.met import MAX_NAMES, MetNames, name_of
from ssdtrain.cache.record import (
    NO_PLAN,
    Lane,
    LaneCursor,
    LanePlan,
    Rebuilt,
    RebuiltView,
    RecordView,
)
from ssdtrain.cache.sizes import MOST, SLACK, is_same_item, producer_of
from ssdtrain.counters import Fallback
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.profile import Phase
from ssdtrain.plan.rule import Rule

T = TypeVar("T")
OUTSIDE_PLAN = -1
ALIKE = 1.5
"""By how much a small tensor's change of size may differ from its lane's."""


class Saved(NamedTuple):
    """A tensor that autograd saves for the first time."""

    name: str
    num_bytes: int
    owner: int = OUTSIDE_PLAN
    """The item whose recipe it serves."""
    held: bool = False
    """Its owner holds it until the end of backward."""
    region: int = OUTSIDE_PLAN
    """The region call in whose forward it is saved."""
    serves: int = OUTSIDE_PLAN
    """The region call that stores it as its input."""


class Entry(NamedTuple):
    """Its place in the lane, and what is to happen to it."""

    number: int
    order: Order | None
    """None: not planned."""
    due: int | None
    """Mark of its release."""
    name: str
    held: bool
    """See `Saved`."""

    @property
    def may_be_rebuilt(self) -> bool:
        """Whether a recipe may take its place."""
        return self.order is None or self.order.placement is Placement.RECOMPUTE


class ItemRecipe(NamedTuple):
    """How an item is rebuilt."""

    name: str
    inputs: tuple[int, ...]
    """Items of the same lane that it reads."""
    place: Hashable
    """Where its cost is found among the clock's spans."""


class Observer:
    """Hears of every mark, and makes nothing of it. Off is an object: `Unobserved`."""

    listens = False
    """Whether telling it is worth the time."""
    hears_reruns = False
    """The same, of regions that have run again."""

    def lane(self, cursor: LaneCursor, kind: str) -> None:
        """A lane begins."""

    def item(self, lane: int, number: int, saved: Saved, tensor: Tensor) -> None:
        """A new item of a lane: this tensor."""

    def recipe(self, lane: int, number: int, recipe: ItemRecipe) -> None:
        """The item is rebuilt in this step."""

    def makes(self) -> None:
        """A copy in a smaller dtype is about to be made, for a recipe."""

    def made(self) -> None:
        """It has been: the next item."""

    def rebuilt(self, lane: int, number: int) -> None:
        """A recipe has run, since `rebuilds`."""

    def region(self, lane: int, number: int, module: str) -> None:
        """A region call begins."""

    def small(self, lane: int, number: int, num_bytes: int) -> None:
        """That region call has saved so many bytes that are no item, and its re-run
        makes them again."""

    def refused(self) -> None:
        """A region call has ended, and will not run again."""

    def reads(self, lane: int, number: int, item: int) -> None:
        """This item is an input of that region call."""

    def saved_again(self, lane: int, item: int) -> None:
        """Autograd itself has saved the item, too."""

    def rebuilds(self) -> None:
        """A recipe is about to run."""

    def runs_again(self) -> None:
        """The forward of a region is about to run again."""

    def ran_again(self, lane: int, number: int) -> None:
        """It has."""

    def attention(
        self, lane: int, number: int, items: Iterable[int], before: Any, behind: Any
    ) -> None:
        """An attention of that region call has run again, between these moments, and
        autograd has saved its results as these items."""

    def mark(self, lane: int, phase: Phase, number: int) -> None:
        """The cache begins to act."""

    def given(self, handle: Any, tensor: Tensor) -> None:
        """An operator of backward gets this tensor for what it holds."""

    def seal(self) -> None:
        """The cache has acted; an operator runs next."""


class Unobserved(Observer):
    """For steps that nobody observes."""


NOBODY = Unobserved()


class Cursor:
    """The marks of one cache."""

    def __init__(self, rule: Rule, fall_back: Callable[[Fallback], None]) -> None:
        self._fall_back = fall_back
        self.plan: Plan | None = None
        self.rule = rule
        """For what no order of a plan names."""
        self.most_ratio = math.inf
        """A lane that is larger than the plan's by more than this does not follow it:
        [Note: sizes]."""
        self.by_size = PlansBySize()
        """Further plans, for lanes of other sizes."""
        self.runs_all = False
        """Whether all regions run again of a lane that has left its plan."""
        self.observer: Observer = Unobserved()
        self._used_by: Observer = NOBODY
        """Who hears of the use that is served now."""
        self.mark = 0
        self.num_strayed = 0
        """Lanes of this step that the plan did not fit."""
        self.num_outgrown = 0
        """Lanes of this step that were too large for the plan."""
        self.num_beside = 0
        """Lanes of this step that followed a plan besides the one in force."""
        self.num_resized = 0
        """Tensors of this step that had another size than the plan's."""
        self.planned_bytes = self.resized_bytes = 0
        """Of the lanes with such tensors: by the plan, and as they were."""
        self._num_lanes = 0
        self.serving = OUTSIDE_PLAN
        """The item whose recipe is served by what is packed now."""
        self.region = OUTSIDE_PLAN
        """The region call that runs."""
        self.storing = OUTSIDE_PLAN
        """The region call whose inputs are packed now."""
        self.is_using = False
        """Whether a use is served now: what it asks for itself is no mark."""
        self._plans: dict[tuple[str, float], LanePlan] = {}
        """By kind of lane, and which plan it is (`SizedPlan.key`)."""
        self._plans_of: Plan | None = None
        """The plan in force when they were made."""
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}
        self.met = MetNames()

    def step_starts(self) -> None:
        """Lanes count from 0 again."""
        self._num_lanes = 0
        self.num_strayed = self.num_resized = 0
        self.num_outgrown = self.num_beside = 0
        self.planned_bytes = self.resized_bytes = 0

    def of(self, lane: Lane) -> LaneCursor:
        """The lane's cursor."""
        if lane.cursor is None:
            plan, sized = NO_PLAN, self.plan_of(lane)
            if sized.plan is not None and lane.kind:
                plan = self._lane_plan(lane.kind, sized)
                self.num_beside += sized.is_beside
            lane.cursor = LaneCursor(self._num_lanes, plan, sized.most_ratio)
            if plan is not NO_PLAN and plan.orders is None:
                self._stray(lane.cursor)
            elif sized.plan is None and sized.in_force is not None:
                self.num_outgrown += 1
                lane.cursor.leaves(runs_all=self.runs_all)
                self._fall_back(Fallback.PLAN_OUTGROWN)
            self._num_lanes += 1
            self.observer.lane(lane.cursor, lane.kind)
        return lane.cursor

    def observer_of(self, lane: Lane) -> Observer:
        """Who hears of a lane that may be of a step before: nobody then."""
        return NOBODY if self.of(lane).is_past else self.observer

    def plan_of(self, lane: Lane) -> SizedPlan:
        """The plan that a lane follows, fixed when it is asked for first."""
        if lane.sized is None:
            lane.sized = self.by_size.of(self.plan, self.most_ratio, lane.num_elements)
        return lane.sized

    def _lane_plan(self, kind: str, sized: SizedPlan) -> LanePlan:
        orders = None if sized.plan is None else sized.plan.orders.get(kind)
        if sized.in_force is not self._plans_of:
            self._plans.clear()
            self._plans_of = sized.in_force
        key = kind, sized.key
        known = self._plans.get(key)
        if known is None or known.orders is not orders:
            own = {kind: orders or ()}
            known = LanePlan(orders, self.met.growth(own).sums(kind, own[kind]))
            self._plans[key] = known
        return known

    def enter(self, lane: Lane, tensor: Tensor, key: Key, name: str) -> Entry:
        """A new item of the lane: a mark."""
        cursor, held = self.of(lane), is_held(tensor)
        num_bytes = key.end_byte - key.start_byte
        if cursor.is_free:  # under a plan another item may be the first
            cursor.first_bytes = cursor.first_bytes or num_bytes
            self.met.note_item(lane.kind, cursor.num_items, cursor.first_bytes, name)
        number, order = self._expected(cursor, name, num_bytes)
        cursor.num_items = max(cursor.num_items, number + 1)
        self.mark += 1
        if self.observer.listens:
            saved = Saved(
                name, num_bytes, self.serving, held, self.region, self.storing
            )
            self.observer.item(cursor.number, number, saved, tensor)
            self.observer.mark(cursor.number, Phase.FORWARD, number)
        due = None
        if order is not None and order.release_after > 0:
            due = self.mark + order.release_after
        return Entry(number, order, due, name, held)

    def name_of(self, node: Any, shape: tuple[int, ...]) -> str:
        """`name_of`, made once for each producer and shape."""
        key = "" if node is None else node.name(), shape
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            name = self._names[key] = name_of(node, shape)
        return name

    def _expected(
        self, cursor: LaneCursor, name: str, num_bytes: int
    ) -> tuple[int, Order | None]:
        self._pass_absent(cursor)
        orders = cursor.orders
        if orders is None:
            return cursor.num_items, None
        is_exact = self._follows(cursor, name, num_bytes)
        while cursor.num_items < len(orders):
            number = cursor.num_items
            order = orders[number]
            if (order.name, order.num_bytes) == (name, num_bytes):
                cursor.found(order.num_bytes, num_bytes)
                return number, order
            resized = order.name != name and is_same_item(order.name, name)
            if resized and not (
                is_exact or self._rather_floats(cursor, order, name, num_bytes)
            ):
                found = self._found_resized(cursor, order, num_bytes)
                return number, order if found else None
            if not order.floats:
                break
            cursor.floating.append(number)
            cursor.num_items += 1
            self._pass_absent(cursor)
        for number in cursor.floating:
            # Another view of it may have given it its name.
            order = orders[number]
            resized = order.name != name and is_same_item(order.name, name)
            if resized or _is_as_large(cursor, order, num_bytes):
                cursor.floating.remove(number)
                if resized or order.num_bytes != num_bytes:
                    found = self._found_resized(cursor, order, num_bytes)
                    return number, order if found else None
                cursor.found(order.num_bytes, num_bytes)
                return number, order
        self._stray(cursor)
        return cursor.num_items, None

    def _follows(self, cursor: LaneCursor, name: str, num_bytes: int) -> bool:
        """Whether an order after those that float is for this very tensor, in a lane
        of the plan's size: then none of these is for it at another size."""
        if cursor.own_bytes != cursor.planned_bytes:
            return False
        orders = cursor.orders or ()
        for order in orders[cursor.num_items :]:
            if (order.name, order.num_bytes) == (name, num_bytes):
                return not self._is_absent(order, cursor)
            if not (order.floats or self._is_absent(order, cursor)):
                return False
        return False

    def _rather_floats(
        self, cursor: LaneCursor, order: Order, name: str, num_bytes: int
    ) -> bool:
        """Whether a tensor is a view of one that floats, and not the next order at
        another size: a rotary table where the mask of attention comes next."""
        if self._is_scaled_alike(cursor, order, num_bytes):
            return False
        floating = ((cursor.orders or ())[number] for number in cursor.floating)
        return any(
            producer_of(each.name) == producer_of(name)
            and _is_as_large(cursor, each, num_bytes)
            for each in floating
        )

    def _found_resized(self, cursor: LaneCursor, order: Order, num_bytes: int) -> bool:
        """Count an item of another size; whether the lane goes on under its plan."""
        is_first = not cursor.planned_bytes
        cursor.found(order.num_bytes, num_bytes)
        ratio = num_bytes / max(1, order.num_bytes)
        if is_first and self.is_too_large(cursor, ratio):
            self.outgrow(cursor, ratio)
            return False
        self.resized(1, order.num_bytes, num_bytes)
        return True

    def resized(self, num_tensors: int, planned_bytes: int, num_bytes: int) -> None:
        """Tensors of another size than the plan's: see [Note: sizes]."""
        self.num_resized += num_tensors
        self.planned_bytes += planned_bytes
        self.resized_bytes += num_bytes

    def is_too_large(self, cursor: LaneCursor, ratio: float) -> bool:
        """Whether the lane's plan has no room for one whose first item is so many times
        larger."""
        return ratio > cursor.most_first * (1 + SLACK)

    def outgrow(self, cursor: LaneCursor, ratio: float) -> None:
        """A lane that is too large for its plan goes on under the rule."""
        planned_bytes = sum(order.num_bytes for order in cursor.orders or ())
        self.resized(1, planned_bytes, int(ratio * planned_bytes))
        self.num_outgrown += 1
        if cursor.most_ratio != self.most_ratio:
            self.by_size.misled()
        cursor.leaves(runs_all=self.runs_all)
        self._fall_back(Fallback.PLAN_OUTGROWN)

    def counts(self, lane: Lane, name: str, num_bytes: int, least: int) -> bool:
        """Whether a tensor that nobody knows yet is an item: what is not smaller than
        `least` bytes, and in a lane of another size what was not when it was observed.
        """
        is_large = num_bytes >= least
        if self.observer.listens and not is_large:
            self.met.note_small(name)
        if self.plan_of(lane).plan is None or num_bytes >= MOST * least:
            return is_large
        cursor = self.of(lane)
        if cursor.orders is None:
            return is_large
        for order in self._following(cursor):
            if order.name == name:
                return is_large
            if is_same_item(order.name, name) and (
                is_large or self._is_scaled_alike(cursor, order, num_bytes)
            ):
                return is_large or not self.met.is_rather_small(order.name, name)
        orders = (cursor.orders[number] for number in cursor.floating)
        if any(_is_as_large(cursor, order, num_bytes) for order in orders):
            return True
        if not is_large:
            return False
        # The plan knows of nothing like it: it was too small then. In a lane that is
        # not larger another program saves it.
        if not cursor.planned_bytes:
            return not self.met.is_like_small(name)
        return cursor.own_bytes <= cursor.planned_bytes

    def _is_scaled_alike(
        self, cursor: LaneCursor, order: Order, num_bytes: int
    ) -> bool:
        """Whether the lane's other items have become smaller by about as much."""
        if not cursor.planned_bytes:
            return num_bytes < order.num_bytes
        found = num_bytes / max(1, order.num_bytes)
        powers = (cursor.ratio, cursor.ratio**2)  # attention's scores are squares
        return any(1 / ALIKE <= found / power <= ALIKE for power in powers)

    def _following(self, cursor: LaneCursor) -> Iterator[Order]:
        """Orders that the next tensor may have; moves nothing on."""
        orders = cursor.orders or ()
        yield from (orders[number] for number in cursor.floating)
        for order in orders[cursor.num_items :]:
            if self._is_absent(order, cursor):
                if order.serves >= 0:
                    yield order
                continue
            yield order
            if not order.floats:
                return

    def _pass_absent(self, cursor: LaneCursor) -> None:
        """Marks of items that come next and are not saved under this plan."""
        orders = cursor.orders or ()
        while cursor.num_items < len(orders):
            if not self._is_absent(orders[cursor.num_items], cursor):
                return
            if orders[cursor.num_items].serves >= 0:
                cursor.floating.append(cursor.num_items)
            cursor.num_items += 1
            self.mark += 1

    def _stray(self, cursor: LaneCursor) -> None:
        self.num_strayed += 1
        cursor.leaves(runs_all=self.runs_all)
        self._fall_back(Fallback.PLAN_MISMATCH)

    def leave(self, cursor: LaneCursor) -> None:
        """A lane whose table does not fit goes on under the rule."""
        if cursor.orders is not None:
            self._stray(cursor)

    def count_use(self, cursor: LaneCursor) -> int | None:
        """A mark: autograd uses an item that is at hand.

        Returns:
            The number of the use in its lane; None inside another use.
        """
        if self.is_using:
            return None
        at = cursor.num_uses
        if not at:
            self._pass_absent(cursor)  # the last ones of forward
        cursor.num_uses = at + 1
        self.mark += 1
        return at

    def _is_absent(self, order: Order, cursor: LaneCursor) -> bool:
        """Whether it would serve a recipe or a region that is not used: not by the
        plan, or not this time, because what is packed now serves none."""
        if order.serves >= 0:
            return self.storing != order.serves
        if order.owner < 0 or cursor.orders is None:
            return False
        placement = cursor.orders[order.owner].placement
        return placement is not Placement.RECOMPUTE or self.serving != order.owner

    def inside_use(self, work: Callable[[], T]) -> T:
        """Do this; what is asked for meanwhile is no mark."""
        before, self.is_using = self.is_using, True
        try:
            return work()
        finally:
            self.is_using = before

    def rebuilds(self, rebuilt: Rebuilt) -> None:
        """A recipe takes the place of an item."""
        if not self.observer.listens:
            return
        inputs = set()
        for holder in rebuilt.holders:
            source = holder.source
            if isinstance(source, RecordView) and source.record.lane is rebuilt.lane:
                inputs.add(source.record.item)
            elif isinstance(source, RebuiltView):
                if source.rebuilt.lane is rebuilt.lane:
                    inputs.add(source.rebuilt.item)
        recipe = ItemRecipe(
            rebuilt.expression.recipe, tuple(sorted(inputs)), rebuilt.place
        )
        self.observer.recipe(self.of(rebuilt.lane).number, rebuilt.item, recipe)

    def begin_use(self, lane: Lane, number: int) -> int | None:
        """Autograd uses an item: a mark, unless a recipe asks.

        Returns:
            The number of the use in its lane; None inside another use. To be given to
            `end_use`, whatever happens.
        """
        if self.is_using:
            return None
        cursor = lane.cursor or self.of(lane)
        if not cursor.num_uses:
            self._pass_absent(cursor)  # the last ones of forward
        at, cursor.num_uses = cursor.num_uses, cursor.num_uses + 1
        self.mark += 1
        self.is_using = True
        self._used_by = NOBODY if cursor.is_past else self.observer
        if self._used_by.listens:
            self._used_by.mark(cursor.number, Phase.BACKWARD, number)
        return at

    def given(self, handle: Any, tensor: Tensor) -> Tensor:
        """What whoever asked for a handle gets."""
        if self.observer.listens and not self.is_using:
            self.observer.given(handle, tensor)
        return tensor

    def end_use(self, at: int | None) -> None:
        """The cache has acted for the use that `begin_use` gave."""
        if at is not None:
            self.is_using = False
            if self._used_by.listens:
                self._used_by.seal()


def _is_as_large(cursor: LaneCursor, order: Order, num_bytes: int) -> bool:
    """Whether an item of so many bytes may be this one under another name: in its size,
    or in that of the lane."""
    if order.num_bytes == num_bytes:
        return True
    sizes = [order.num_bytes * each for each in (cursor.ratio, cursor.even_ratio)]
    near = any(abs(num_bytes - size) <= SLACK * size for size in sizes)
    return near and cursor.planned_bytes > 0
