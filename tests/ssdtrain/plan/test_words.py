"""What a plan's percentage counts from is said beside it, and advice agrees with what
was measured."""

from dataclasses import replace

import pytest

from ssdtrain.plan.calibrate import PlainTimes, calibrated
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import ESTIMATED, Profile
from ssdtrain.plan.words import explain
from tests.ssdtrain.plan.profiles import chain


def test_the_observed_step_is_what_the_percentage_counts_from() -> None:
    """On a CPU no step without ssdtrain is measured."""
    profile = chain(8)
    plan = choose(profile, Goal(max_overhead=0.1))
    told = explain(profile, plan, {"step_ms": 20.0, "stall_ms": 0.0})
    assert "% over keeping everything, by the times of the observed step (27.0 ms" in (
        told
    )
    assert "step 27" not in told and "from the prediction" not in told
    assert "Measured, last step: 20.0 ms, stalled 0.0 ms." in told


def test_a_measured_plain_step_is_what_the_percentage_counts_from() -> None:
    profile = calibrated(chain(8), PlainTimes(20.0, 7.0))
    plan = choose(profile, Goal(max_overhead=0.1))
    told = explain(profile, plan, {"step_ms": 20.0, "stall_ms": 0.0})
    assert "% over a step without ssdtrain (20.0 ms)" in told
    assert "% from the prediction), stalled 0.0 ms" in told


def test_what_was_estimated_is_not_said_to_be_observed() -> None:
    """`ssdtrain plan --no-gpu` spoke of an observed step."""
    profile = replace(chain(8), notes={ESTIMATED: "kernel models of h200"})
    told = explain(profile, choose(profile, Goal(max_overhead=0.1)))
    assert "over keeping everything (27.0 ms), by kernel models of h200; peak" in told
    assert "observed" not in told


def unhurried(device: str) -> tuple[Profile, Plan]:
    """A plan that moves tensors, and waits for none by its prediction."""
    profile = replace(chain(8), device=device)
    plan = choose(profile, Goal(max_overhead=0.1))
    assert plan.prediction is not None and plan.prediction.stall_ms == 0.0
    assert plan.prediction.links["d2h"].num_bytes > 0
    return profile, plan


@pytest.mark.parametrize(
    ("device", "waits_ms", "told"),
    [
        ("cpu", {}, "Next: nothing waits and the links have room."),
        ("cpu", {"copy out": 0.3}, "waits are short (0.3 ms of the last step, 1.2 %)"),
        ("cpu", {"copy out": 5.0, "copy in": 1.0}, "waited 6.0 ms (24.0 %), most for "
         "copy out, and the plan foresaw next to none: on a CPU copies share the"),
        ("H100", {"copy in": 6.0}, "most for copy in, and the plan foresaw next to "
         "none: the links were slower than when they were measured"),
        ("H100", {"host": 6.0}, "most for host, and the plan foresaw next to none: the "
         "device waits for kernel launches; larger"),
    ],
)  # fmt: skip
def test_the_advice_agrees_with_the_measured_waits(
    device: str, waits_ms: dict[str, float], told: str
) -> None:
    """A report said "nothing waits" below measured waits of 25 ms."""
    profile, plan = unhurried(device)
    text = explain(profile, plan, {"step_ms": 25.0}, waits_ms=waits_ms)
    assert told in text
    assert ("nothing waits" in text) == (not waits_ms)
    assert "no wait is predicted" in explain(profile, plan)


def test_a_larger_micro_batch_fits_where_memory_is_known_to_be_free() -> None:
    profile, plan = unhurried("H100")
    assert plan.prediction is not None
    peak = plan.prediction.peak_bytes
    assert "micro-batch" not in explain(profile, plan)  # a CPU: nobody counts it
    assert "micro-batch" not in explain(profile, plan, free_bytes=peak // 2)
    told = explain(profile, plan, free_bytes=10**10)
    assert "10.00 GB of device memory are free, so a larger micro-batch would fit" in (
        told
    )
