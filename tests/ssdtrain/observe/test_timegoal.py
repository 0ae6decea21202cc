"""Whether steps under a plan take what it said and what they may."""

from dataclasses import replace
from typing import Any

import pytest

from ssdtrain.observe.measured import Measured
from ssdtrain.observe.tightened import MOST_TIGHTENED, Tightened
from ssdtrain.observe.timegoal import GONE_BACK, TimeGoal
from ssdtrain.plan.adapt import (
    ALIKE_STEPS,
    JUDGED_STEPS,
    LEAST_AIM,
    LEAST_STEPS,
    MOST_BLAMED,
    NEW_STEPS,
    NUM_SURPRISES,
    WINDOW_STEPS,
    earned_aim,
)
from ssdtrain.plan.agree import Alone
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import LinkLoad
from tests.ssdtrain.observe.parts import Cache, number_of, promise

PLAIN_MS = 100.0


class Times:
    """A `TimeGoal` and what it was made with."""

    def __init__(self, goal: Goal | None = None, peers: Any = None) -> None:
        self.cache: Any = Cache()
        self.goal = Tightened(goal or Goal(max_overhead=0.02))
        own: Any = None
        self.measured = Measured(self.cache, own, own, peers or Alone())
        self.times = TimeGoal(self.cache, self.goal, self.measured, peers or Alone())

    def knows_plain(self) -> "Times":
        for _ in range(LEAST_STEPS):
            self.times.plain_step(PLAIN_MS)
        return self

    def step(self, ms: float) -> float | None:
        """A step starts that will take so long."""
        found = self.times.last_step_ms()
        self.cache.ledger.clock.ms += ms
        return found


def test_a_step_is_told_when_it_has_ended_for_sure() -> None:
    own = Times()
    assert [own.step(ms) for ms in (7.0, 5.0, 3.0, 1.0)] == [None, None, 7.0, 5.0]
    own.cache.course.num_resized = 1  # the one that has ended: of 1 ms
    assert own.step(2.0) == 3.0
    own.cache.course.num_resized = 0
    assert [own.step(ms) for ms in (4.0, 1.0)] == [None, 2.0]
    own.cache.course.num_beside = 1  # under another plan, of another prediction
    assert own.step(3.0) == 4.0
    own.cache.course.num_beside = 0
    assert [own.step(ms) for ms in (5.0, 1.0)] == [None, 3.0]
    own.times.restart()
    assert [own.step(ms) for ms in (7.0, 5.0, 3.0)] == [None, None, 7.0]


def test_a_slower_plan_than_it_said_gives_way_to_the_one_before() -> None:
    own = Times()
    first, second = promise(100.0), promise(101.0)
    own.times.taken(first)
    for _ in range(LEAST_STEPS):
        assert own.times.plan_before(100.0) is None
    own.times.taken(second)
    asked = [own.times.plan_before(110.0) for _ in range(WINDOW_STEPS + 1)]
    assert asked == [None] * (WINDOW_STEPS - 1) + [first, None]
    assert own.times.aim_lower() and own.goal.goal.aim == GONE_BACK


@pytest.mark.parametrize("takes_ms", [102.5, 120.0])
def test_steps_that_take_more_than_they_may_lower_what_is_promised(
    takes_ms: float,
) -> None:
    own, plan = Times().knows_plain(), promise(101.0)
    own.times.planned(plan)
    assert own.times.holds_overhead and not own.times.is_judged
    asked = [
        own.times.is_exceeded(takes_ms, plan) for _ in range(NEW_STEPS + ALIKE_STEPS)
    ]
    assert asked[:-1] == [False] * (len(asked) - 1)
    assert asked[-1] == (takes_ms > 110.0) and own.times.is_judged
    assert (own.goal.goal.aim < 1.0) == own.goal.was == asked[-1]


@pytest.mark.parametrize(("busy_ms", "is_blamed"), [(200.0, True), (50.0, False)])
def test_copies_are_blamed_once_and_then_less_is_promised(
    busy_ms: float, is_blamed: bool
) -> None:
    own = Times().knows_plain()
    load = LinkLoad(busy_ms=busy_ms, num_bytes=1)
    plan = promise(101.0, links={"d2h": load})
    found = []
    for _ in range(MOST_TIGHTENED + 1):
        own.times.planned(plan)
        found.append(
            any(
                own.times.is_exceeded(120.0, plan)
                for _ in range(NEW_STEPS + ALIKE_STEPS)
            )
        )
    assert found == [True] * MOST_TIGHTENED + [False]
    blamed = (120.0 - 101.0) / busy_ms if is_blamed else 0.0
    assert own.measured.corrections.copy_slowdown == pytest.approx(blamed)
    # Its error is known: it may promise most of what was left to errors, and then less.
    aim = earned_aim(0.02) * LEAST_AIM**3 if is_blamed else LEAST_AIM**MOST_TIGHTENED
    assert own.goal.goal.aim == pytest.approx(aim)


def test_a_goal_of_nothing_is_not_raised() -> None:
    assert earned_aim(0.0) == 1.0
    assert 0.01 * earned_aim(0.01) == pytest.approx(0.0175)


def test_under_a_memory_limit_time_is_no_goal() -> None:
    own = Times(Goal(memory_budget_bytes=1)).knows_plain()
    assert not own.times.holds_overhead and own.times.is_judged
    assert not own.times.aim_lower() and not own.goal.was


SURPRISED = NEW_STEPS + JUDGED_STEPS


def surprised(own: Times, plan: Any, takes_ms: float) -> list[bool]:
    own.times.planned(plan)
    return [own.times.is_exceeded(takes_ms, plan) for _ in range(SURPRISED)]


@pytest.mark.parametrize("goal", [Goal(memory_budget_bytes=1), Goal(max_overhead=0.1)])
@pytest.mark.parametrize(("takes_ms", "is_blamed"), [(102.9, False), (110.0, True)])
def test_without_plain_steps_the_prediction_is_what_steps_are_compared_with(
    goal: Goal, takes_ms: float, is_blamed: bool
) -> None:
    """Where the times of a step without a plan were measured, and copies are made."""
    own = Times(goal)
    plan = promise(100.0, links={"d2h": LinkLoad(busy_ms=200.0, num_bytes=1)})
    assert own.times.is_judged and not any(surprised(own, plan, takes_ms))
    by = replace(own.measured.corrections, plain=(90.0, 30.0))
    own.measured.corrections = by
    assert not own.times.holds_overhead and not own.times.is_judged
    found = surprised(own, plan, takes_ms)
    assert found == [False] * (SURPRISED - 1) + [is_blamed] and own.times.is_judged
    blamed = (takes_ms - 100.0) / 200.0 if is_blamed else 0.0
    assert own.measured.corrections.copy_slowdown == pytest.approx(blamed)
    assert not own.goal.was  # a limit may still get tighter as often
    assert not any(surprised(own, promise(100.0), 150.0))  # nothing is copied
    own.cache.device.runs_beside = False
    assert own.times.is_judged and not any(surprised(own, plan, takes_ms))


def test_copies_of_two_plans_are_blamed_for_no_more_than_they_can_cost() -> None:
    own = Times(Goal(memory_budget_bytes=1))
    plan = promise(100.0, links={"d2h": LinkLoad(busy_ms=200.0, num_bytes=1)})
    own.measured.corrections = replace(own.measured.corrections, plain=(90.0, 30.0))
    assert surprised(own, plan, 400.0)[-1]
    own.times.priced_anew(plan.prediction)  # the plan stays
    found = [own.times.is_exceeded(400.0, plan) for _ in range(SURPRISED)]
    assert found == [False] * (SURPRISED - 1) + [True]
    assert not any(surprised(own, plan, 400.0))
    slowdown = own.measured.corrections.copy_slowdown
    assert slowdown == pytest.approx(NUM_SURPRISES * MOST_BLAMED)


def test_drift_is_looked_at_by_who_leads_and_behind_the_judgement() -> None:
    class Follower(Alone):
        leads = False

    own = Times()
    own.times.planned(promise(100.0))
    assert number_of(lambda: own.times.drifts(150.0), 64) >= WINDOW_STEPS
    judging = Times().knows_plain()
    judging.times.planned(promise(100.0))
    for times in (judging.times, Times(peers=Follower()).times):
        times.drift.planned(100.0)
        assert not any(times.drifts(150.0) for _ in range(64))
    # Another program is one on every rank.
    judging.cache.course.num_strayed = 1
    assert number_of(lambda: judging.times.drifts(None), 4) == 2
