"""What forwards take that were seen under hooks alone."""

from dataclasses import replace

import pytest

from ssdtrain.curves import Curve, Links
from ssdtrain.plan.calibrate import WITHOUT_RERUNS, PlainTimes, calibrated
from ssdtrain.plan.forwards import LEFT_OUT, without_hooks
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
