"""Which plan stays, by what its steps took."""

from dataclasses import replace

import pytest

from ssdtrain.observe.steptimes import StepTimes
from ssdtrain.observe.trials import (
    ERROR,
    GAIN,
    Trials,
    Tried,
    Verdict,
    most_ms,
    noise_of,
    typical,
)
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order
from tests.ssdtrain.observe.parts import Cache, promise


def tried(ms: float, told_ms: float = 10.0, peak_bytes: int = 100) -> Tried:
    plan = promise(told_ms)
    assert plan.prediction is not None
    told = replace(plan.prediction, peak_bytes=peak_bytes)
    return Tried(replace(plan, prediction=told), ms)


def test_the_lower_middle_counts() -> None:
    assert typical([3.0, 1.0]) == 1.0
    assert typical([9.0, 1.0, 2.0]) == 2.0
    assert typical([4.0, 3.0, 2.0, 1.0]) == 2.0


def test_under_a_memory_limit_the_fastest_stays() -> None:
    trials, base = Trials(), tried(10.0)
    trials.follow(base)
    within = tried(10.0 * (1 - GAIN / 2))
    assert trials.judge(within, None, is_by_memory=True) is Verdict.GOES_BACK
    assert trials.best is base and trials.second is within
    faster = tried(9.0)
    assert trials.judge(faster, None, is_by_memory=True) is Verdict.STAYS
    assert trials.best is faster and trials.second is base
    trials.forget()
    assert trials.best is trials.second is None and not trials.num_tries


def test_a_gain_is_more_than_steps_differ() -> None:
    """On a host that others share the middle step is far from the fastest."""
    assert noise_of([10.0]) == 0.0 and noise_of([0.0, 1.0]) == 0.0
    assert noise_of([12.0, 10.0, 11.0, 30.0]) == pytest.approx(0.1)
    trials, base = Trials(), tried(100.0)
    trials.follow(base)
    lucky, good = replace(tried(92.0), noise=0.1), replace(tried(88.0), noise=0.1)
    assert trials.judge(lucky, None, is_by_memory=True) is Verdict.GOES_BACK
    assert trials.judge(good, None, is_by_memory=True) is Verdict.STAYS
    trials.follow(base)
    trials.timed(104.0, 0.1)  # those of the best one differ as well
    assert trials.judge(tried(96.0), None, is_by_memory=True) is Verdict.GOES_BACK
    assert trials.compare(lucky, does_less=True) is Verdict.STAYS


def test_of_two_that_are_as_fast_the_one_without_copies_stays() -> None:
    order = Order(name="a", num_bytes=8, placement=Placement.OFFLOAD)
    trials, base = Trials(), tried(100.0)
    moving = replace(tried(95.0), plan=replace(base.plan, orders={"m": (order,)}))
    for base_ms, noise, stays in ((96.0, 0.0, 1), (95.5, 0.0, 0), (96.0, 0.02, 0)):
        trials.follow(moving)
        again = Tried(base.plan, base_ms, noise)
        trials.compare_again(again, 95.0)
        assert trials.best is not None
        assert trials.best.plan is (moving.plan if stays else base.plan)


def test_under_a_limit_in_time_the_least_memory_stays() -> None:
    trials, limit = Trials(), most_ms(10.0, 0.1)
    assert limit == pytest.approx(10.0 * (1.1 + ERROR))
    late, first = tried(12.0), tried(11.0, peak_bytes=100)
    assert trials.judge(late, limit, is_by_memory=False) is Verdict.KEEPS_ALL
    assert trials.best is None
    assert trials.judge(first, limit, is_by_memory=False) is Verdict.STAYS
    assert trials.judge(late, limit, is_by_memory=False) is Verdict.GOES_BACK
    as_much = tried(10.0, peak_bytes=100)
    assert trials.judge(as_much, limit, is_by_memory=False) is Verdict.GOES_BACK
    less = tried(11.0, peak_bytes=90)
    assert trials.judge(less, limit, is_by_memory=False) is Verdict.STAYS
    assert trials.best is less


def test_under_a_limit_in_time_the_other_one_keeps_everything() -> None:
    """A plan that takes too long by now goes, and comes back where it does not."""
    trials, limit = Trials(), 0.05
    plan = tried(10.2)
    order = Order(name="a", num_bytes=8, placement=Placement.OFFLOAD)
    plan = replace(plan, plan=replace(plan.plan, orders={"model/0": (order,)}))
    plain = tried(10.0)
    assert plain.plan.keeps_all and not plan.plan.keeps_all
    trials.judge(plan, most_ms(10.0, limit), is_by_memory=False)
    trials.compare_again(plain, 10.2, limit)
    assert trials.best == plan and trials.second == plain
    trials.compare_again(plain, 11.0, limit)
    assert trials.best == plain and trials.second == replace(plan, ms=11.0)
    trials.compare_again(replace(plan, ms=10.9), 10.0, limit)
    assert trials.best == plain
    trials.compare_again(replace(plan, ms=10.5), 10.0, limit)
    assert trials.best == replace(plan, ms=10.5)


def test_steps_of_other_sizes_are_not_timed() -> None:
    cache = Cache()
    times = StepTimes(cache)  # type: ignore[arg-type]
    for number, resized in enumerate((0, 0, 1, 0)):
        cache.cursor.num_resized = resized
        cache.ledger.clock.ms = 10.0 * number * number
        times.step_starts()
    assert times.num_steps == 3
    assert times.ended_ms() == [10.0, 50.0]
    assert times.ended_ms(1) == [50.0] and times.ended_ms(3) == []
    times.restart()
    assert times.num_steps == 0 and times.ended_ms() == []


def test_behind_a_try_a_plan_must_say_that_it_is_faster() -> None:
    trials, slow = Trials(), tried(0.0, 105.0).plan
    assert not trials.is_hopeless(slow)  # nothing was tried yet
    # Whatever the base took: it says what it takes by the same prices.
    trials.follow(replace(tried(100.0), told_ms=107.0))
    assert not trials.is_hopeless(slow) and trials.is_hopeless(tried(0.0, 106.5).plan)
    trials.judge(tried(120.0), None, is_by_memory=True)
    assert trials.is_hopeless(slow) and trials.is_hopeless(tried(0.0, 99.5).plan)
    assert not trials.is_hopeless(tried(0.0, 90.0).plan)
