"""How much longer a step takes is told where steps are alike, and explained."""

import pytest

from ssdtrain.train import comparison
from ssdtrain.train.comparison import (
    COPIES,
    QUEUED,
    SLEPT,
    WORKED,
    Comparison,
    compare,
    later,
)
from ssdtrain.train.tally import StepTally, Tally


def step(ms: float, stall_ms: float = 0.0, **clocks: float) -> StepTally:
    return StepTally(
        loss_hex="0x0p+0", step_ms=ms, peak_bytes=0, stall_ms=stall_ms, **clocks
    )


def tally(step_ms: list[float], **clocks: float) -> Tally:
    return Tally(steps=tuple(step(ms, **clocks) for ms in step_ms))


def test_first_steps_do_not_count() -> None:
    assert later([9.0, 9.0, 9.0, 1.0, 1.1, 1.2]) == [1.0, 1.1, 1.2]
    assert later([9.0, 1.0, 1.1]) == [1.0, 1.1]
    assert later([9.0]) == [9.0]
    found = compare(
        [tally([900, 100, 100, 100, 102, 98])],
        [tally([9, 9, 800, 150, 151, 149])],
        on_cpu=True,
    )
    assert found.ratio == pytest.approx(1.5) and not found.why_not


@pytest.mark.parametrize("busy", ["without", "with"])
def test_steps_that_vary_by_more_than_a_third_give_no_ratio(busy: str) -> None:
    quiet, noisy = tally([100.0] * 8), tally([100.0] * 7 + [140.0])
    pair = (noisy, quiet) if busy == "without" else (quiet, noisy)
    found = compare([pair[0]], [pair[1]], on_cpu=True)
    assert found.ratio is None and found.share is None
    assert "100 to 140 ms" in found.why_not
    assert "not compared" in str(found) and " x " not in str(found)
    less = tally([100.0] * 7 + [130.0])
    assert compare([quiet], [less], on_cpu=True).ratio == 1.0


def test_other_programs_give_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "num_processors", lambda: 2)
    quiet = [tally([100.0] * 8, own_ms=90.0, idle_ms=20.0)] * 2
    busy = [tally([195.0] * 8, own_ms=150.0, idle_ms=40.0)] * 2
    found = compare(quiet, busy, on_cpu=True)
    assert found.ratio is None and "other programs had 13 %" in found.why_not
    assert compare(quiet, busy, on_cpu=False).ratio == pytest.approx(1.95)


def test_the_difference_is_told_in_measured_parts() -> None:
    """Two ranks: the first works longer, the second waits for it."""
    without = [
        tally([100.0] * 8, worked_ms=80.0, queued_ms=5.0),
        tally([100.0] * 8, worked_ms=60.0, queued_ms=5.0),
    ]
    with_ = [
        tally([200.0] * 8, worked_ms=120.0, queued_ms=45.0, stall_ms=20.0),
        tally([200.0] * 8, worked_ms=70.0, queued_ms=35.0, stall_ms=10.0),
    ]
    found = compare(without, with_, on_cpu=True)
    parts = {WORKED: 25.0, QUEUED: 35.0, COPIES: 15.0, SLEPT: 25.0}
    assert found.parts_ms == pytest.approx(parts)
    assert found.share == pytest.approx(1.0)
    assert "these +100.0 ms explains 100 %" in str(found)
    assert f"  +35.0 ms: {QUEUED}" in str(found)
    # The reasons are those of the steps whose time is told.
    slow = Tally(steps=(step(100.0), *[step(200.0, 20.0)] * 3, step(260.0, 90.0)))
    assert compare(without, [slow], on_cpu=False).parts_ms[COPIES] == 20.0
    # Steps alike need no reasons.
    assert compare(without, without, on_cpu=True).share is None


def test_what_is_not_measured_is_not_explained() -> None:
    """On a GPU the device's waits are known alone; where the kernel does not tell
    queueing, a thread that did not run has not slept for sure."""
    without = [tally([100.0] * 8, worked_ms=90.0)]
    with_ = [tally([150.0] * 8, worked_ms=100.0, stall_ms=10.0)]
    on_gpu = compare(without, with_, on_cpu=False)
    assert on_gpu.share == pytest.approx(0.2) and "explains 20 %" in str(on_gpu)
    unknown = compare(without, with_, on_cpu=True)
    assert SLEPT not in unknown.parts_ms and unknown.share == pytest.approx(0.4)
    # More than all of it is as wrong as too little.
    over = Comparison(without_ms=100.0, with_ms=110.0, parts_ms={WORKED: 15.0})
    assert over.share == pytest.approx(0.5)
