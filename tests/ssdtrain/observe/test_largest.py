"""Which batch a plan under a memory limit is for."""

import math
from typing import Any

from ssdtrain.cache.lanes import LaneSize
from ssdtrain.observe.largest import LargestBatch
from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.goal import Goal
from tests.ssdtrain.observe.parts import Cache

BUDGET = Goal(memory_budget_bytes=1000)


def saved(num_bytes: int, first_bytes: int = 0, num_elements: int = 0) -> LaneSize:
    """Of a lane that saved so much."""
    return LaneSize(first_bytes, num_bytes, num_elements)


def largest(goal: Goal = BUDGET, peers: Any = None) -> tuple[LargestBatch, Cache]:
    """Behind an observed step whose lane saved 100 bytes."""
    cache: Any = Cache()
    made = LargestBatch(cache, Tightened(goal), peers or Peers())
    cache.lanes.largest = {"model/0": saved(100)}
    made.step_ended()
    made.observed()
    return made, cache


def test_the_plan_in_force_has_the_room_it_was_made_with() -> None:
    made, cache = largest()
    made.leave_room(is_followed=True, runs_all=True)
    assert cache.cursor.most_ratio == 1.0 and cache.cursor.runs_all
    cache.lanes.largest = {"model/0": saved(200)}
    made.step_ended()
    made.plan_for_it()
    made.leave_room(is_followed=True, runs_all=False)
    assert cache.cursor.most_ratio == 1.0, "the next plan is not there"
    made.planned()
    made.leave_room(is_followed=True, runs_all=False)
    assert cache.cursor.most_ratio == made.planned_ratio > 2.0
    made.leave_room(is_followed=False, runs_all=True)
    assert cache.cursor.most_ratio == math.inf and not cache.cursor.runs_all
    made.restart()
    assert made.planned_ratio == 1.0


def test_without_a_limit_and_of_several_ranks_no_batch_is_too_large() -> None:
    class Others(Peers):
        is_alone = False

    for made, cache in (largest(Goal()), largest(peers=Others())):
        cache.lanes.largest = {"model/0": saved(500)}
        made.step_ended()
        assert not made.has_grown()
        made.plan_for_it()
        made.leave_room(is_followed=True, runs_all=True)
        assert (made.planned_ratio, cache.cursor.most_ratio) == (1.0, math.inf)
        assert not cache.cursor.runs_all
