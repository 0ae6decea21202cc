"""Times of an observed step in those of the plain one."""

import pytest

from ssdtrain.curves import Curve, Links
from ssdtrain.plan.calibrate import PlainTimes, calibrated, with_reruns
from ssdtrain.plan.profile import Item, Mark, Phase, Profile
from ssdtrain.plan.simulate import Simulation, keep_all
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan.test_regions import KIND, NUM_REGIONS, layers


def profile() -> Profile:
    """Two tensors: forward takes 1 + 2 * 4 ms, backward and the tail 2 * 5 + 1."""
    rate = Curve.straight(1e-5, 1e9)
    return Profile(
        lanes=("model/0",),
        kinds={"model/0": (Item(name="a", num_bytes=8), Item(name="b", num_bytes=8))},
        marks=(
            Mark(lane=0, phase=Phase.FORWARD, item=0, ms=4.0, other_bytes=3),
            Mark(lane=0, phase=Phase.FORWARD, item=1, ms=4.0),
            Mark(lane=0, phase=Phase.BACKWARD, item=1, ms=5.0),
            Mark(lane=0, phase=Phase.BACKWARD, item=0, ms=5.0),
        ),
        links=Links(d2h=rate, h2d=rate),
        head_ms=1.0,
        tail_ms=1.0,
    )


def test_keeping_everything_takes_the_plain_step() -> None:
    found = calibrated(profile(), PlainTimes(step_ms=10.0, forward_ms=3.0))
    assert found.forward_ms == pytest.approx(3.0)
    assert found.compute_ms == pytest.approx(10.0)
    timeline = Timeline(found)
    assert Simulation(timeline, keep_all(timeline)).run().step_ms == pytest.approx(10.0)
    assert [mark.ms for mark in found.marks] == pytest.approx(
        [4 / 3, 4 / 3, 35 / 11, 35 / 11]
    )
    assert found.marks[0].other_bytes == 3
    assert found.notes["plain_step_ms"] == "10.000"


@pytest.mark.parametrize(
    "times",
    [
        PlainTimes(step_ms=200.0, forward_ms=3.0),
        PlainTimes(step_ms=10.0, forward_ms=0.0),
    ],
)
def test_another_step_changes_nothing(times: PlainTimes) -> None:
    assert calibrated(profile(), times) == profile()


def test_another_number_of_reruns_is_not_believed() -> None:
    """The step that was measured with them had another forward."""
    profile = layers()
    for times in ((9.0,) * (NUM_REGIONS - 1), (9.0,) * (NUM_REGIONS + 1), ()):
        assert with_reruns(profile, {KIND: times}, {KIND: times}) == profile
