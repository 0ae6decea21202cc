"""A goal that gets tighter."""

from dataclasses import replace

from ssdtrain.observe.tightened import MOST_TIGHTENED, Tightened
from ssdtrain.plan.goal import Goal


def test_a_goal_gets_tighter_so_often() -> None:
    goal = Tightened(Goal(max_overhead=0.1))
    assert goal.can_be and not goal.was
    for _ in range(MOST_TIGHTENED):
        assert goal.can_be
        goal.tighten(replace(goal.goal, spare_bytes=goal.goal.spare_bytes + 3))
    assert goal.was and not goal.can_be
    assert goal.goal.spare_bytes == 3 * MOST_TIGHTENED


def test_another_device_is_no_tighter_goal() -> None:
    goal = Tightened(Goal(max_overhead=0.1, spare_bytes=3))
    goal.fit(1000, 10)
    assert goal.goal == Goal(
        max_overhead=0.1, spare_bytes=3, capacity_bytes=1000, torn_bytes=10
    )
    assert not goal.was
