"""What a plan's percentage counts from is said beside it."""

from ssdtrain.plan.calibrate import PlainTimes, calibrated
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.words import compared, explain
from tests.ssdtrain.plan.profiles import chain


def test_a_ratio_and_a_percentage_of_other_steps_are_told_apart() -> None:
    """On a CPU no step without ssdtrain is measured; the run without it is another."""
    profile = chain(8)
    plan = choose(profile, Goal(max_overhead=0.1))
    assert "% over keeping everything (27.0 ms by this profile)" in (
        explain(profile, plan)
    )
    told = compared(profile, plan, without_ms=20.0, with_ms=26.0)
    assert "20.0 ms without ssdtrain and 26.0 ms with it, x 1.300" in told
    assert "counts from keeping everything in the observed step, 27.0 ms" in told


def test_a_measured_plain_step_is_what_the_percentage_counts_from() -> None:
    profile = calibrated(chain(8), PlainTimes(20.0, 7.0))
    plan = choose(profile, Goal(max_overhead=0.1))
    assert "% over a step without ssdtrain (20.0 ms)" in explain(profile, plan)
    told = compared(profile, plan, without_ms=20.0, with_ms=20.2)
    assert told.endswith("x 1.010, observed steps included.")
