"""Steps that measure: their order, and what one that is cut short leaves."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.cache import bypass
from ssdtrain.cache.bypass import Bypass
from ssdtrain.cache.course import Unobserved
from ssdtrain.cache.regions import Choice
from ssdtrain.observe.heldregions import HeldRegions
from ssdtrain.observe.measured import NUM_PACED, NUM_REGION_STEPS, Measured
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.paced import HOLD_FACTOR, HOLD_MS, Paced
from ssdtrain.observe.plainsteps import NUM_STEPS
from ssdtrain.plan.agree import Alone
from ssdtrain.plan.calibrate import (
    WITHOUT_RERUNS,
    Corrections,
    Pace,
    PlainTimes,
    Segment,
)
from ssdtrain.plan.profile import HostCosts
from ssdtrain.transfer.device import CpuDevice

pytestmark = pytest.mark.usefixtures("virtual_time")

PLAIN = ["plain"] * NUM_STEPS + ["paced", "held", "rebuilds"]
REGIONS = ["regions"] * NUM_REGION_STEPS + ["held regions"] * 2


class Net(nn.Module):
    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
        self.parts = nn.ModuleList(parts)
        self._look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._look()
        for part in self.parts:
            x = part(x)
        return x.sum()


def kind_of(cache: Any) -> str:
    """What a step is run for, by what stands in its way."""
    if isinstance(cache.bypass, Paced):
        return "held" if cache.bypass.holds_ms else "paced"
    if isinstance(cache.bypass, Bypass):
        return "plain"
    if cache.timer is not None:
        return "regions"
    if isinstance(cache.course.observer, HeldRegions):
        return "held regions"
    return "rebuilds" if cache.ledger.clock.before_rebuild is not None else ""


def is_clean(cache: Any) -> bool:
    clock = cache.ledger.clock
    own = cache.bypass, cache.timer, cache.meter, clock.before_rebuild
    return (
        all(each is None for each in (*own, clock.after_rebuild))
        and not clock.keep_spans
        and type(cache.course.observer) is Unobserved
    )


def steps(
    monkeypatch: pytest.MonkeyPatch, *, fits: bool, most: int = 20
) -> tuple[list[str], Any]:
    """Train until so many steps have measured, and no other is observed; what each was
    for, and the cache behind it."""
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda own, profile: fits)
    monkeypatch.setattr(Measured, "may_hold", lambda *_, **__: True)
    monkeypatch.setattr(CpuDevice, "hold", lambda own, ms: None)
    choice = Choice.NONE if fits else Choice.ALL
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *settings: choice)
    found: list[str] = []

    def look() -> None:
        found.append(kind_of(session.cache))
        # So long that one step has room for all that is held.
        bypass.time.sleep(0.1)  # type: ignore[attr-defined]

    net = Net(look)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ssdtrain.offload(net, target="host", min_bytes=1) as session:
        for _ in range(most + 2):
            net(torch.ones(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.plan is not None:
                break
    return found, session.cache


@pytest.mark.parametrize(("fits", "kinds"), [(True, PLAIN), (False, REGIONS)])
def test_steps_that_measure_stand_between_the_observed_one_and_the_plan(
    monkeypatch: pytest.MonkeyPatch, fits: bool, kinds: list[str]
) -> None:
    found, cache = steps(monkeypatch, fits=fits)
    assert found == ["", "", *kinds, ""]
    assert is_clean(cache)


@pytest.mark.parametrize(
    ("fits", "kinds"),
    [(True, PLAIN[:n]) for n in (1, NUM_STEPS, len(PLAIN) - 1, len(PLAIN))]
    + [(False, REGIONS[:n]) for n in (1, NUM_REGION_STEPS, len(REGIONS))],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_a_session_that_is_closed_among_them_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, fits: bool, kinds: list[str]
) -> None:
    found, cache = steps(monkeypatch, fits=fits, most=len(kinds))
    assert found == ["", "", *kinds]
    assert is_clean(cache)


@pytest.mark.parametrize("most_ms", [-1e9, math.inf])
def test_reruns_bound_what_forwards_take_the_host(
    monkeypatch: pytest.MonkeyPatch, most_ms: float
) -> None:
    told: list[tuple[float, ...]] = []

    def longest(own: Any, times: Any, topic: str, step: int) -> tuple[float, ...]:
        if topic == "plain times":
            told.append(tuple(times))
        return tuple(times)

    monkeypatch.setattr(Alone, "longest", longest)
    monkeypatch.setattr("ssdtrain.observe.measured.most_host_ms", lambda *_: most_ms)
    steps(monkeypatch, fits=False)
    ((_, _, host_ms, *_),) = told
    assert (host_ms == most_ms) == (most_ms < 0.0) and host_ms < math.inf


@pytest.mark.parametrize("num_disturbed", [1, 100])
def test_a_disturbed_step_is_timed_again(
    monkeypatch: pytest.MonkeyPatch, num_disturbed: int
) -> None:
    told: list[Pace | None] = []

    def is_disturbed(self: Measured, pace: Pace | None, plain: PlainTimes) -> bool:
        told.append(pace)
        return len(told) <= num_disturbed

    monkeypatch.setattr(Measured, "is_disturbed", is_disturbed)
    found, cache = steps(monkeypatch, fits=True)
    at, more = PLAIN.index("paced"), min(num_disturbed, NUM_PACED - 1)
    assert found == ["", "", *PLAIN[:at], *["paced"] * more, *PLAIN[at:], ""]
    assert is_clean(cache)


def test_a_step_of_several_times_a_plain_one_was_disturbed() -> None:
    on_gpu: Any = SimpleNamespace(is_on_gpu=True, is_alone=True)
    measured = Measured(on_gpu, on_gpu, on_gpu, on_gpu)
    plain = PlainTimes(step_ms=100.0, forward_ms=30.0)
    segments = (Segment(start=0, ms=150.0, host_ms=1.0),)
    pace = Pace(num_marks=1, head_ms=10.0, head_host_ms=0.0, segments=segments, end=1)
    assert not measured.is_disturbed(pace, plain)
    assert measured.is_disturbed(replace(pace, head_ms=90.0), plain)
    assert not measured.is_disturbed(None, plain)
    on_gpu.is_on_gpu = False
    assert not measured.is_disturbed(replace(pace, head_ms=90.0), plain)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("others", [0.0, 1.0])
def test_ranks_time_another_step_together(is_long: bool, others: float) -> None:
    """If one of them would not believe its own."""
    told: list[float] = []

    def longest(own: tuple[float, ...], topic: str, step: int) -> tuple[float, ...]:
        told.extend(own)
        return (max(*own, others),)

    ranks: Any = SimpleNamespace(is_on_gpu=True, is_alone=False, longest=longest)
    measured = Measured(ranks, ranks, ranks, ranks)
    plain = PlainTimes(step_ms=100.0, forward_ms=30.0)
    segments = (Segment(start=0, ms=120.0 if is_long else 98.0, host_ms=1.0),)
    pace = Pace(num_marks=1, head_ms=5.0, head_host_ms=0.0, segments=segments, end=1)
    assert measured.is_disturbed(pace, plain) == (is_long or others > 0.0)
    assert measured.is_disturbed(None, plain) == (others > 0.0)
    assert told == [is_long, 0.0]


def test_of_several_timed_steps_the_shortest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paces = [
        Pace(
            num_marks=1,
            head_ms=ms,
            head_host_ms=0.0,
            segments=(Segment(start=0, ms=1.0, host_ms=ms),),
            end=1,
        )
        for ms in (3.0, 1.0, 2.0)
    ]
    left = iter(paces)
    held: list[Any] = []

    class Told(Paced):
        def __init__(self, *what: Any, **more: Any) -> None:
            super().__init__(*what, **more)
            if self.holds_ms:
                held.append(self.holds_ms)

        def pace(self) -> Pace | None:
            return next(left, None)

    monkeypatch.setattr("ssdtrain.observe.measured.Paced", Told)
    monkeypatch.setattr("ssdtrain.observe.heldsteps.Paced", Told)
    monkeypatch.setattr(Measured, "is_disturbed", lambda *_: True)
    found, _ = steps(monkeypatch, fits=True)
    assert found.count("paced") == NUM_PACED == 3
    assert held == [{0: pytest.approx(HOLD_MS + HOLD_FACTOR)}]


def test_what_another_step_tells_is_forgotten() -> None:
    own: Any = None
    measured = Measured(own, own, own, own)
    assert measured.lacks_regions
    pace = Pace(num_marks=0, head_ms=0.0, head_host_ms=0.0, segments=(), end=0)
    measured.corrections = Corrections(
        pace=pace, held_pace=pace, held_regions={"a": ()}, host_costs=HostCosts()
    )
    measured.plain = PlainTimes(1.0, 1.0, 1.0, 0.0)
    measured.slow_copies(0.25)
    measured.slow_copies(0.25)
    measured.observed_anew(is_other=False)
    assert measured.corrections.pace is pace and not measured.lacks_regions
    assert measured.corrections.host_costs is None, "the new profile has its own"
    measured.reprice(HostCosts(region_ms=1.0))
    measured.observed_anew(is_other=True)
    assert measured.corrections == Corrections(copy_slowdown=0.5)
    measured.corrections = Corrections(note=WITHOUT_RERUNS)
    assert measured.lacks_regions
    measured.stop()
