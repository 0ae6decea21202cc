"""Which batch a plan under a memory limit is for."""

import math
from typing import Any

import pytest

from ssdtrain.cache.lanes import LaneSize
from ssdtrain.observe.largest import HEADROOM, LargestBatch
from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.agree import Alone
from ssdtrain.plan.goal import Goal
from tests.ssdtrain.observe.parts import Cache, promise

BUDGET = Goal(memory_budget_bytes=1000)


def saved(num_bytes: int, first_bytes: int = 0, num_elements: int = 0) -> LaneSize:
    """Of a lane that saved so much."""
    return LaneSize(first_bytes, num_bytes, num_elements)


def largest(goal: Goal = BUDGET, peers: Any = None) -> tuple[LargestBatch, Cache]:
    """Behind an observed step whose lane saved 100 bytes."""
    cache: Any = Cache()
    made = LargestBatch(cache, Tightened(goal), peers or Alone())
    cache.lanes.largest = {"model/0": saved(100)}
    made.step_ended()
    made.observed()
    return made, cache


def test_the_largest_lane_before_a_plan_counts_and_some_more() -> None:
    made, cache = largest()
    for num_bytes in (150, 120):
        cache.lanes.largest = {"model/0": saved(num_bytes), "other": saved(1000)}
        made.step_ended()
    assert made.has_grown()
    made.plan_for_it()
    assert made.planned_ratio == pytest.approx(1.5 * HEADROOM)
    assert not made.has_grown()


def test_under_a_plan_lanes_tell_by_what_its_items_take() -> None:
    made, cache = largest()
    cache.course.plan = promise(100.0)
    cache.lanes.largest = {"model/0": saved(900)}  # a plan decides what is counted
    cache.course.planned_bytes, cache.course.resized_bytes = 10, 12
    made.step_ended()
    assert made.has_grown()
    made.plan_for_it()
    assert made.planned_ratio == pytest.approx(1.2 * HEADROOM)
    # One that left its plan was told by a first tensor; the lane grew with its square.
    cache.course.resized_bytes, cache.course.num_outgrown = 20, 1
    cache.lanes.largest = {"model/0": saved(390)}
    made.step_ended()
    assert made.has_grown()
    made.plan_for_it()
    assert made.planned_ratio == pytest.approx(3.9 * HEADROOM)


def test_the_plan_in_force_has_the_room_it_was_made_with() -> None:
    made, cache = largest()
    made.leave_room(is_followed=True, runs_all=True)
    assert cache.course.most_ratio == 1.0 and cache.course.runs_all
    cache.lanes.largest = {"model/0": saved(200)}
    made.step_ended()
    made.plan_for_it()
    made.leave_room(is_followed=True, runs_all=False)
    assert cache.course.most_ratio == 1.0, "the next plan is not there"
    made.planned()
    made.leave_room(is_followed=True, runs_all=False)
    assert cache.course.most_ratio == made.planned_ratio > 2.0
    made.leave_room(is_followed=False, runs_all=True)
    assert cache.course.most_ratio == math.inf and not cache.course.runs_all
    made.restart()
    assert made.planned_ratio == 1.0


def test_without_a_limit_and_of_several_ranks_no_batch_is_too_large() -> None:
    class Others(Alone):
        is_alone = False

    for made, cache in (largest(Goal()), largest(peers=Others())):
        cache.lanes.largest = {"model/0": saved(500)}
        made.step_ended()
        assert not made.has_grown()
        made.plan_for_it()
        made.leave_room(is_followed=True, runs_all=True)
        assert (made.planned_ratio, cache.course.most_ratio) == (1.0, math.inf)
        assert not cache.course.runs_all


def test_what_does_not_grow_makes_no_lane_smaller_than_it_is() -> None:
    """A first item of twice the size, in a lane half of which does not grow: a plan
    has room for the next one like it, and some more."""
    made, cache = largest()
    cache.lanes.largest = {"model/0": saved(100, 20)}
    made.step_ended()
    made.observed()
    cache.lanes.largest = {"model/0": saved(150, 40)}
    made.step_ended()
    made.plan_for_it()
    assert made.planned_ratio == pytest.approx(2.0 * HEADROOM)


def test_sizes_are_told_by_arguments_over_the_observed_ones() -> None:
    """Of lanes before it as well."""
    made, cache = largest()
    cache.lanes.largest = {"model/0": saved(400, num_elements=80)}
    made.step_ended()
    cache.lanes.largest = {"model/0": saved(200, num_elements=40)}
    made.step_ended()
    made.observed()
    cache.lanes.largest = {"model/0": saved(50, num_elements=10)}
    made.step_ended()
    cache.course.plan = promise(100.0)
    cache.lanes.largest = {"model/0": saved(500, num_elements=20)}
    made.step_ended()  # under a plan a table tells
    assert cache.course.by_size.ratios == [0.25, 1.0, 2.0]
