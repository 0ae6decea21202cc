"""What forwards take that were seen under hooks alone."""

import math
from dataclasses import replace

import pytest

from ssdtrain.curves import Curve, Links
from ssdtrain.plan.calibrate import WITHOUT_RERUNS, PlainTimes, calibrated
from ssdtrain.plan.forwards import LEFT_OUT, most_host_ms, without_hooks
from ssdtrain.plan.parts import NONE, Part, parts_of
from ssdtrain.plan.profile import Item, Mark, Phase, Profile, RegionRun

KIND = "model/0"
RERUN_MS = 3.0
OWN_MS = RERUN_MS * (1.0 + LEFT_OUT)
REST_MS = 23.0


def profile(
    regions_ms: tuple[float, float] = (10.0, 12.0), num_lanes: int = 1
) -> Profile:
    """An input and a tensor of each of two regions, and one of the loss: forward takes
    a head of 2 ms, the regions' and 5 ms for the loss, in each lane; the rest 23 ms."""
    items = (
        Item(name="in0", num_bytes=8),
        Item(name="a", num_bytes=8, region=0),
        Item(name="in1", num_bytes=8),
        Item(name="b", num_bytes=8, region=1),
        Item(name="loss", num_bytes=8),
    )
    first, second = regions_ms
    times = (1.0, first - 1.0, 2.0, second - 2.0, 5.0)
    marks = [
        Mark(lane=lane, phase=Phase.FORWARD, item=item, ms=ms)
        for lane in range(num_lanes)
        for item, ms in enumerate(times)
    ]
    marks += [
        Mark(lane=lane, phase=Phase.BACKWARD, item=item, ms=5.0 / num_lanes)
        for lane in reversed(range(num_lanes))
        for item in (4, 3, 1)
    ]
    rate = Curve.straight(1e-5, 1e9)
    return Profile(
        lanes=(KIND,) * num_lanes,
        kinds={KIND: items},
        regions={KIND: (RegionRun(inputs=(0,)), RegionRun(inputs=(2,)))},
        marks=tuple(marks),
        links=Links(d2h=rate, h2d=rate),
        head_ms=2.0,
        tail_ms=8.0,
    )


def forward_of(found: Profile) -> list[float]:
    return [mark.ms for mark in found.marks if mark.phase is Phase.FORWARD]


def test_each_mark_is_of_the_region_that_runs() -> None:
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    assert parts_of(profile()) == [
        *(Part(KIND, number, forward) for number in (0, 0, 1, 1, NONE)),
        *(Part(KIND, number, backward) for number in (NONE, 1, 0)),
    ]


def test_regions_take_what_they_took_again() -> None:
    """Their forwards took 10 and 12 ms under hooks, and 3 again; what is outside of
    them takes what was observed."""
    found = without_hooks(profile(), 29.0, 1.0, {KIND: (RERUN_MS, RERUN_MS)})
    first, second = OWN_MS / 10.0, OWN_MS / 12.0
    expected = [first, 9 * first, 2 * second, 10 * second, 5.0]
    assert forward_of(found) == pytest.approx(expected)
    assert found.head_ms == pytest.approx(2.0)
    backward = [mark for mark in found.marks if mark.phase is Phase.BACKWARD]
    assert backward == [m for m in profile().marks if m.phase is Phase.BACKWARD]


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize(
    ("again_ms", "expected_ms"),
    [((3.0, 4.0), 7.0 * (1.0 + LEFT_OUT) + 5.0), ((3.0, 0.0), math.inf)],
)
def test_the_host_takes_for_regions_what_it_took_again(
    again_ms: tuple[float, ...], expected_ms: float, num_lanes: int
) -> None:
    """And for the rest, a head of 2 ms and 5 a lane, what was observed."""
    seen = profile(num_lanes=num_lanes)
    marks = tuple(replace(mark, host_ms=mark.ms) for mark in seen.marks)
    seen = replace(seen, marks=marks, head_host_ms=2.0)
    found = most_host_ms(seen, {KIND: again_ms})
    assert found == pytest.approx(2.0 + num_lanes * expected_ms)
    assert most_host_ms(seen, {}) == math.inf


def test_all_of_them_take_no_longer_than_was_measured() -> None:
    found = without_hooks(profile(), 10.0, 1.0, {KIND: (RERUN_MS, RERUN_MS)})
    assert found.forward_ms == pytest.approx(10.0)
    left = (10.0 - 2 * OWN_MS) / 7.0
    assert forward_of(found)[-1] == pytest.approx(5.0 * left)
    assert found.head_ms == pytest.approx(2.0 * left)


def test_a_region_takes_no_longer_than_it_was_observed() -> None:
    """A clock that is a tenth slower makes it a tenth longer at most."""
    seen, again = profile((2.5, 12.0)), {KIND: (RERUN_MS, RERUN_MS)}
    found = forward_of(without_hooks(seen, 99.0, 1.1, again))
    assert sum(found[:2]) == pytest.approx(2.5 * 1.1)
    assert sum(found[2:4]) == pytest.approx(OWN_MS)
    assert found[4] == pytest.approx(5.0 * 1.1)


@pytest.mark.parametrize("times", [(), (RERUN_MS,), (0.0, 0.0), (40.0, 40.0)], ids=str)
def test_without_them_all_is_shortened_alike(times: tuple[float, ...]) -> None:
    """None, another number of them, none that is known, and more than the forwards of
    that step took."""
    found = without_hooks(profile(), 14.5, 1.0, {KIND: times})
    assert forward_of(found) == pytest.approx(
        [each / 2 for each in forward_of(profile())]
    )
    assert found.head_ms == pytest.approx(1.0)


def test_a_region_that_did_not_run_again_is_like_what_is_outside() -> None:
    found = without_hooks(profile(), 99.0, 1.0, {KIND: (RERUN_MS, 0.0)})
    assert sum(forward_of(found)[:2]) == pytest.approx(OWN_MS)
    assert forward_of(found)[2:] == pytest.approx(forward_of(profile())[2:])


def test_each_lane_takes_as_long() -> None:
    again = {KIND: (RERUN_MS, RERUN_MS)}
    found = forward_of(without_hooks(profile(num_lanes=2), 99.0, 1.0, again))
    own = forward_of(without_hooks(profile(), 99.0, 1.0, again))
    assert found == pytest.approx([*own, *own])


def test_the_step_that_keeps_everything_is_as_much_shorter() -> None:
    seen = profile()
    plain = PlainTimes(step_ms=REST_MS + 29.0, forward_ms=29.0)
    again = {KIND: (RERUN_MS, RERUN_MS)}
    found = calibrated(seen, plain, note=WITHOUT_RERUNS, rerun_ms=again)
    assert found.forward_ms == pytest.approx(7.0 + 2 * OWN_MS)
    assert found.compute_ms == pytest.approx(REST_MS + 7.0 + 2 * OWN_MS)
    assert float(found.notes[WITHOUT_RERUNS]) == pytest.approx(found.compute_ms)
    # A plain step ran without hooks: it is believed.
    kept = calibrated(seen, plain, rerun_ms=again)
    assert kept.forward_ms == pytest.approx(29.0)
    assert replace(kept, notes={}) == replace(seen, notes={})
