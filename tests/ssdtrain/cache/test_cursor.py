"""What a lane's items are under a plan, and what becomes of one that is too large."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ssdtrain.cache.cursor import Cursor, Entry, Observer
from ssdtrain.cache.identity import identify
from ssdtrain.cache.record import Lane, LaneProfile
from ssdtrain.cache.sizes import SLACK
from ssdtrain.counters import Fallback
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.rule import Rule

WIDTH, ROWS, LEAST = 16, 200, 4096
KIND = "model/0"


class Counted(Cursor):
    """A cursor that follows these orders."""

    def __init__(self, orders: Sequence[Order] = ()) -> None:
        self.fallbacks: list[Fallback] = []
        super().__init__(Rule(), self.fallbacks.append)
        if orders:
            self.plan = Plan(orders={KIND: tuple(orders)}, policy="given")

    def save(self, lane: Lane, tensor: Tensor) -> Entry:
        """A new item."""
        return self.enter(lane, tensor, identify(tensor)[0], self._name(tensor))

    def is_item(self, lane: Lane, tensor: Tensor, least: int = LEAST) -> bool:
        """Whether it is one."""
        return self.counts(lane, self._name(tensor), tensor.nbytes, least)

    def _name(self, tensor: Tensor) -> str:
        return self.name_of(tensor.grad_fn, tensor.shape)


class Listening(Observer):
    """Somebody does."""

    listens = True


def order(name: str, num_bytes: int, *, floats: bool = False) -> Order:
    """Of an item that stays."""
    return Order(
        name=name, num_bytes=num_bytes, placement=Placement.KEEP, floats=floats
    )


def lane() -> Lane:
    """One that begins."""
    return Lane("model", LaneProfile(), KIND)


def rows(num: int, width: int = WIDTH) -> Tensor:
    """(num, width)"""
    return torch.empty(num, width)


def of(tensor: Tensor, *, floats: bool = False) -> Order:
    """An order for a tensor like this, which nothing has made."""
    size = "x".join(map(str, tensor.shape))
    return order(f"input [{size}]", tensor.nbytes, floats=floats)


# -- which item a tensor is ----------------------------------------------------------


@pytest.mark.parametrize("num", [ROWS, ROWS // 2, 3 * ROWS])
def test_another_view_of_a_floating_item_is_known_by_its_size(num: int) -> None:
    """An input of a region, which comes later, unsqueezed, in a lane of any length."""
    cursor = Counted([of(rows(ROWS, 8)), of(rows(ROWS), floats=True), of(rows(ROWS))])
    own = lane()
    assert cursor.save(own, rows(num, 8)).order is cursor.plan.orders[KIND][0]  # type: ignore[union-attr]
    # The floating one is not here; something else of its name and size is next.
    cursor.of(own).num_items, cursor.of(own).floating = 2, [1]
    view = rows(num)[None]
    assert cursor.is_item(own, view)
    entry = cursor.save(own, view)
    assert entry.number == 1 and not cursor.fallbacks


def test_scores_do_not_tell_how_large_other_items_are() -> None:
    """Of an attention: they grow with the square."""
    scores, made = rows(ROWS, ROWS), rows(ROWS).view(2, ROWS // 2, WIDTH)
    cursor, here = Counted([of(rows(ROWS)), of(scores), of(made, floats=True)]), lane()
    num = ROWS // 2
    for number, tensor in enumerate((rows(num), rows(num, num), rows(num))):
        assert cursor.save(here, tensor).number == number
    assert cursor.num_strayed == 0


def test_another_size_than_the_lanes_is_no_view_of_a_floating_item() -> None:
    """As much as a twentieth more is something else."""
    cursor = Counted([of(rows(ROWS, 8)), of(rows(ROWS), floats=True), of(rows(ROWS))])
    own = lane()
    cursor.save(own, rows(ROWS // 2, 8))
    cursor.of(own).num_items, cursor.of(own).floating = 2, [1]
    cursor.save(own, rows(ROWS // 2 + ROWS // 40)[None])
    assert cursor.fallbacks == [Fallback.PLAN_MISMATCH]


def test_the_first_item_of_a_lane_tells_nothing_of_its_size_yet() -> None:
    """So a view of another size is not taken for the floating one."""
    cursor = Counted([of(rows(ROWS), floats=True), of(rows(ROWS, 8))])
    own = lane()
    cursor.of(own).num_items, cursor.of(own).floating = 1, [0]
    cursor.save(own, rows(ROWS + 1)[None])
    assert cursor.fallbacks == [Fallback.PLAN_MISMATCH]


# -- what is an item ---------------------------------------------------------------


def test_what_was_too_small_in_the_observed_step_stays_small() -> None:
    """At any length: not because it has become large enough, and not where an order of
    another tensor would suit it."""
    small, large = rows(LEAST // WIDTH // 8), rows(ROWS, 8 * WIDTH)
    cursor, observed = Counted(), lane()
    cursor.observer = Listening()
    assert not cursor.is_item(observed, small) and cursor.is_item(observed, large)
    cursor.save(observed, large)
    cursor.observer = Observer()
    cursor.plan = Plan(orders={KIND: (of(large),)}, policy="given")
    assert not cursor.is_item(lane(), rows(3 * len(small)))
    first = lane()
    assert not cursor.is_item(first, rows(4 * len(small)))
    # The order is for something larger; nothing else is like this.
    own = lane()
    cursor.save(own, rows(2 * ROWS, 8 * WIDTH))
    assert not cursor.is_item(own, rows(2 * len(small)))


def test_a_tensor_that_nobody_saw_is_an_item_if_it_is_large() -> None:
    cursor = Counted([of(rows(ROWS, 64))])
    assert cursor.is_item(lane(), rows(LEAST // WIDTH))
    assert not cursor.is_item(lane(), rows(LEAST // WIDTH // 8))


def test_a_small_tensor_by_its_own_name_is_no_item_of_a_shorter_lane() -> None:
    """Its name may be that of an order at another size."""
    small = rows(8)
    cursor, observed = Counted(), lane()
    cursor.observer = Listening()
    assert not cursor.is_item(observed, small)
    cursor.observer = Observer()
    cursor.plan = Plan(orders={KIND: (of(rows(32)),)}, policy="given")
    assert not cursor.is_item(lane(), small)
    assert cursor.is_item(lane(), rows(9))  # the item of a lane of 9 rows


def test_what_was_too_small_is_no_item_for_being_like_one() -> None:
    """Keys with half as many heads as queries, of the same producer."""
    queries, keys = torch.empty(1, 4, 55, 16), torch.empty(1, 2, 55, 16)
    cursor = Counted()
    cursor.observer = Listening()
    assert not cursor.is_item(lane(), keys, 8000)
    cursor.observer = Observer()
    cursor.plan = Plan(orders={KIND: (of(rows(55, 64)), of(queries))}, policy="given")
    own = lane()
    cursor.save(own, rows(38, 64))
    shorter = torch.empty(1, 2, 38, 16)
    assert not cursor.is_item(own, shorter, 8000)
    shorter = torch.empty(1, 4, 30, 16)
    assert cursor.is_item(own, shorter, 8000)


# -- lanes that are too large ------------------------------------------------------


@pytest.mark.parametrize(("num", "follows"), [(200, True), (202, True), (203, False)])
def test_a_lane_may_be_a_little_larger_than_there_is_room_for(
    num: int, follows: bool
) -> None:
    assert (num <= ROWS * (1 + SLACK)) is follows
    cursor = Counted([of(rows(ROWS)), of(rows(ROWS))])
    cursor.most_ratio = 1.0
    own = lane()
    entry = cursor.save(own, rows(num))
    assert (entry.order is not None) is follows
    assert cursor.num_outgrown == (not follows)
    assert (Fallback.PLAN_OUTGROWN in cursor.fallbacks) is not follows


@pytest.mark.parametrize("runs_all", [True, False])
@pytest.mark.parametrize("leaves", ["outgrown", "other program"])
def test_regions_of_a_lane_that_leaves_its_plan_all_run_again(
    leaves: str, runs_all: bool
) -> None:
    """Where the first steps ran them again as well."""
    cursor = Counted([of(rows(ROWS))])
    cursor.most_ratio, cursor.runs_all = 1.0, runs_all
    own = lane()
    assert not cursor.of(own).runs_all
    tensor = rows(2 * ROWS) if leaves == "outgrown" else rows(8 * ROWS, 1)
    cursor.save(own, tensor)
    assert len(cursor.fallbacks) == 1
    assert cursor.of(own).runs_all is runs_all and cursor.of(own).orders is None


# -- what does not grow ------------------------------------------------------------


def test_items_of_one_size_in_lanes_of_different_sizes_are_known() -> None:
    """A gradient that a fused loss saves; not what grows with the batch."""
    cursor = Counted()
    for num in (ROWS, ROWS, ROWS // 2):
        own = lane()
        cursor.save(own, rows(num))
        cursor.save(own, rows(100, 64))
        if num == ROWS:
            assert not cursor.met.fixed
    assert cursor.met.fixed == {"input [100x64]"}


def test_items_that_grow_with_the_square_are_known() -> None:
    """An attention's scores, from the second length on; not what grows as the first
    item does, nor what is as large by chance."""
    cursor = Counted()
    for num in (ROWS, ROWS // 2):
        cursor.save(own := lane(), rows(num, 4))
        cursor.save(own, rows(num, 2 * num)), cursor.save(own, rows(2 * num, 3))
        assert bool(cursor.met.squares) is (num != ROWS)
    assert cursor.met.squares == {(KIND, 1)}


def test_sizes_that_are_equal_by_chance_are_none_that_stay() -> None:
    """A router gives some expert of a longer batch as many rows as one of a shorter
    batch: taken for fixed, a plan that keeps everything once was followed up to 1.4
    times its budget."""
    cursor = Counted()
    routed = ((7, 9, 3), (9, 3, 3), (3, 7, 3), (7, 9, 3))
    for num, counts in zip((32, 16, 8, 32), routed, strict=True):
        cursor.save(own := lane(), rows(num))
        for count in counts:
            cursor.save(own, rows(count))
        cursor.save(own, rows(100, 64))
    # The last expert's are equal, too; another one of its size is seen to change.
    assert cursor.met.fixed == {"input [100x64]"}


def test_two_lanes_do_not_tell_what_is_fixed() -> None:
    cursor = Counted()
    for num, count in ((32, 7), (16, 7), (8, 9)):
        cursor.save(own := lane(), rows(num)), cursor.save(own, rows(count))
        assert not cursor.met.fixed


def test_lanes_under_a_plan_tell_nothing_of_what_grows() -> None:
    """Their first item may be another one: of equal lanes the first ones once had
    different sizes, all that they saved was taken for what does not grow, and steps
    went beyond the budget."""
    cursor = Counted()
    cursor.save(own := lane(), rows(ROWS, 8)), cursor.save(own, rows(ROWS))
    both = of(rows(ROWS, 4)), of(rows(ROWS))
    cursor.plan = Plan(orders={KIND: both}, policy="given")
    cursor.save(own := lane(), rows(ROWS, 4)), cursor.save(own, rows(ROWS))
    cursor.plan = None
    assert not cursor.met.fixed
    cursor.save(own := lane(), rows(ROWS, 8)), cursor.save(own, rows(ROWS))
    assert not cursor.met.fixed


def test_lanes_of_other_kinds_have_sizes_of_their_own() -> None:
    """A chunk of a pipeline may begin with another tensor."""
    cursor = Counted()
    cursor.save(own := lane(), rows(ROWS)), cursor.save(own, rows(100, 64))
    other = Lane("model", LaneProfile(), "chunk/0")
    cursor.save(other, rows(ROWS // 2)), cursor.save(other, rows(100, 64))
    assert not cursor.met.fixed
