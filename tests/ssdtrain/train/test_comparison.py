"""How much longer a step takes is told where steps are alike, and explained."""

import json
import time
from pathlib import Path

import pytest

from ssdtrain.train import comparison
from ssdtrain.train.comparison import compare, explained, later
from ssdtrain.train.processors import Processors
from ssdtrain.train.tally import Tally


def tally(step_ms: list[float], own_ms: float = 0.0, idle_ms: float = 0.0) -> Tally:
    count = len(step_ms)
    return Tally(
        step_ms=tuple(step_ms), own_ms=(own_ms,) * count, idle_ms=(idle_ms,) * count
    )


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
    assert found.ratio is None and "100 to 140 ms" in found.why_not
    told = explained([pair[0]], [pair[1]], on_cpu=True)
    assert "not compared" in told and " x " not in told
    less = tally([100.0] * 7 + [130.0])
    assert compare([quiet], [less], on_cpu=True).ratio == 1.0


def test_the_difference_is_work_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on two processors: 60 ms of work for each, and 30 ms of waits."""
    monkeypatch.setattr(comparison, "num_processors", lambda: 2)
    without = [tally([100.0] * 8, own_ms=90.0, idle_ms=20.0)] * 2
    with_ = [tally([195.0] * 8, own_ms=150.0, idle_ms=80.0)] * 2
    told = explained(without, with_, on_cpu=True)
    assert "x 1.950" in told and "Of these 95 ms" in told
    assert "took the processors 60 ms, and 30 ms they waited" in told
    assert "That explains 95 %" in told
    assert "explains" not in explained(without, with_, on_cpu=False)
    busy = [tally([195.0] * 8, own_ms=150.0, idle_ms=40.0)] * 2
    found = compare(without, busy, on_cpu=True)
    assert found.ratio is None and "other programs had 13 %" in found.why_not
    assert compare(without, busy, on_cpu=False).ratio == pytest.approx(1.95)
    assert "explains" not in explained(without, without, on_cpu=True)


def test_processors_count_work_and_idling(tmp_path: Path) -> None:
    processors = Processors()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        json.dumps({})
    worked = processors.take()
    assert worked.own_ms >= 190.0
    time.sleep(0.3)
    slept = processors.take()
    assert slept.own_ms < 100.0 and slept.idle_ms >= 0.0
    stat = tmp_path / "stat"
    stat.write_text("cpu 1 2 3 400 50 0\n")
    told = Processors(stat)
    stat.write_text("cpu 1 2 3 420 60 0\n")
    assert told.take().idle_ms == pytest.approx(300.0, rel=0.5), "30 ticks"
    assert Processors(tmp_path / "none").take().idle_ms == 0.0
