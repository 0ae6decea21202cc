"""Waits that a plan did not foresee: what they say of the links."""

from dataclasses import replace

import pytest

from ssdtrain.observe.waits import (
    FIRST_STEP,
    MOST_SLOWDOWN,
    NUM_STEPS,
    Slower,
    WaitWatch,
)
from ssdtrain.plan.plan import LinkLoad, Prediction, Wait
from ssdtrain.transfer.device import CpuDevice, Stalled

SAID = Prediction(
    step_ms=400.0,
    peak_bytes=1,
    stall_ms=2.0,
    recompute_ms=0.0,
    keep_ms=390.0,
    keep_peak_bytes=2,
    links={
        "d2h": LinkLoad(num_bytes=1, busy_ms=100.0),
        "h2d": LinkLoad(num_bytes=1, busy_ms=50.0),
    },
    waits={Wait.COPY_OUT.value: 2.0},
)


class Timed(CpuDevice):
    """Says for how many steps somebody asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def time_waits(self, num_steps: int) -> None:
        self.asked.append(num_steps)


@pytest.fixture
def watch() -> WaitWatch:
    device = Timed()
    device.close()
    return WaitWatch(device)


def judged(watch: WaitWatch, waits: list[Stalled], said: Prediction) -> Slower | None:
    """What is found behind these waits of the steps that are timed."""
    watch.planned()
    found: list[Slower | None] = []
    steps = [Stalled(300.0, 300.0)] * FIRST_STEP + waits + [Stalled(300.0, 0.0)] * 4
    for each in steps:
        found.append(watch.step(lambda each=each: each, said))  # type: ignore[misc]
    assert watch.has_judged
    assert not any(found[: FIRST_STEP + NUM_STEPS])
    assert not any(found[FIRST_STEP + NUM_STEPS + 1 :])
    return found[FIRST_STEP + NUM_STEPS]


def test_what_is_waited_for_beyond_the_plan_is_a_slower_link(watch: WaitWatch) -> None:
    """12 ms of copies out where 2 were foreseen, of 100; one step waited by chance."""
    long, usual = Stalled(90.0, 80.0), Stalled(12.0, 12.0)
    found = judged(watch, [long, usual, usual, long], SAID)
    assert found == Slower(pytest.approx(0.1), 0.0)
    both = Stalled(17.0, 12.0)
    found = judged(watch, [both] * NUM_STEPS, SAID)
    assert found == Slower(pytest.approx(0.1), pytest.approx(0.1))


def test_one_step_without_waits_is_chance_as_well(watch: WaitWatch) -> None:
    least, usual = Stalled(0.0, 0.0), Stalled(12.0, 12.0)
    assert judged(watch, [usual, least, usual, usual], SAID) is not None


def test_what_was_foreseen_or_hardly_shows_is_left_alone(watch: WaitWatch) -> None:
    assert judged(watch, [Stalled(4.0, 4.0)] * NUM_STEPS, SAID) is None
    foreseen = replace(SAID, waits={Wait.COPY_OUT.value: 50.0})
    assert judged(watch, [Stalled(50.0, 50.0)] * NUM_STEPS, foreseen) is None


def test_a_link_is_never_taken_for_dead(watch: WaitWatch) -> None:
    found = judged(watch, [Stalled(390.0, 390.0)] * NUM_STEPS, SAID)
    assert found == Slower(MOST_SLOWDOWN, 0.0)
    idle = replace(SAID, links={})
    assert judged(watch, [Stalled(390.0, 390.0)] * NUM_STEPS, idle) == Slower(0.0, 0.0)


def test_each_plan_is_timed_once() -> None:
    device = Timed()
    device.close()
    watch = WaitWatch(device)
    for plan in (1, 2):
        judged(watch, [Stalled(0.0, 0.0)] * NUM_STEPS, SAID)
        assert device.asked == [NUM_STEPS] * plan
