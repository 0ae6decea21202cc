"""A step of regions in which the device is held: what it takes, and what it leaves."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache.course import NO_WAY, LaneCourse, Unobserved
from ssdtrain.cache.regions import REGION, Choice
from ssdtrain.jsonfile import decode, in_parts, joined
from ssdtrain.observe import observer
from ssdtrain.observe.heldregions import HeldRegions, longest_ms
from ssdtrain.observe.measured import Measured
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.paced import HOLD_FACTOR, HOLD_MS
from ssdtrain.observe.planner import Planner
from ssdtrain.plan import search
from ssdtrain.plan.calibrate import RegionTime, rebuild_key
from ssdtrain.plan.search import PART, Answer, Request
from ssdtrain.remat.clock import Clock
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.observe.test_paced import Net, train
from tests.ssdtrain.plan.profiles import chain

pytestmark = pytest.mark.usefixtures("virtual_time")
HELD_S = 1.0


class Sum(nn.Module):
    """Saves what a recipe makes, and what none does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x.cumsum(-1).sin()))


class Sums(Net):
    """Regions that must run again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Sum() for _ in range(4))


class Scripted(Clock):
    """A clock that goes on when it is told to, and its device."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.at_ms = 0.0
        self.holds: list[float] = []

    def now(self) -> float:
        return self.at_ms

    def ms_between(self, start: float, end: float) -> float:
        return end - start

    def run(self, ms: float) -> None:
        self.at_ms += ms

    def hold(self, ms: float) -> None:
        self.holds.append(ms)
        self.at_ms += 1000.0

    def span(self, recipe: str, place: Any, num_bytes: int, ms: float) -> None:
        begun = self.begin()
        assert begun is not None
        self.run(ms)
        self.end(begun, recipe, place, num_bytes)


def test_what_lies_between_reruns_is_a_regions_backward() -> None:
    """Without the rebuilds in it, and without the holds."""
    clock: Any = Scripted()
    held = HeldRegions(clock, clock, chain(4))
    held.start()
    for number in (1, 0):
        clock.run(0.5)
        clock.span(REGION, ("model/0", REGION, number), 0, 2.0 + number)
        clock.run(1.0)
        clock.span("silu", number, 64, 0.25 + number)
        clock.run(3.0)
    clock.cut()
    held.stop()
    assert held.region_times() == {
        "model/0": (
            RegionTime(forward_ms=2.0, backward_ms=0.0),
            RegionTime(forward_ms=3.0, backward_ms=4.5),
        )
    }
    assert held.rebuild_ms(0.125) == {rebuild_key("silu", 64): 0.625}
    assert len(clock.holds) == 8
    assert all(ms > longest_ms(chain(4)) for ms in clock.holds)
    clock.span("silu", 0, 64, 1.0)
    assert len(clock.holds) == 8


def test_what_lies_between_beginnings_is_a_regions_forward() -> None:
    """The launches of eager re-runs hide behind what the device still has to do, those
    of forwards do not; and a re-run ends earlier."""
    clock: Any = Scripted()
    held = HeldRegions(clock, clock, chain(4))
    held.start()
    held.lane(LaneCourse(0, NO_WAY), "model/0")
    for number in range(3):
        held.region(0, number, "")
        clock.run(4.0 + number)
    for number in (2, 1, 0):
        clock.span(REGION, ("model/0", REGION, number), 0, 2.0)
        clock.run(6.0)
    clock.cut()
    times = held.region_times()["model/0"]
    # Behind the last one is what is no region's: as much more than its re-run as usual.
    assert [time.forward_ms for time in times] == [4.0, 5.0, 4.5]
    assert len(clock.holds) == 9


def test_a_forward_between_two_backwards_is_no_part_of_either() -> None:
    """Two micro-batches of a step: the first region's backward ends before it."""
    clock: Any = Scripted()
    held = HeldRegions(clock, clock, chain(4))
    held.start()
    for _ in range(2):
        clock.run(100.0)
        for number in (1, 0):
            clock.span(REGION, ("model/0", REGION, number), 0, 2.0)
            clock.run(3.0)
    clock.cut()
    first, second = held.region_times()["model/0"]
    assert (first.backward_ms, second.backward_ms) == (0.0, 3.0)


def test_a_rerun_in_another_tells_nothing() -> None:
    clock: Any = Scripted()
    held = HeldRegions(clock, clock, chain(4))
    held.start()
    clock.begin()
    clock.span(REGION, ("model/0", REGION, 0), 0, 1.0)
    clock.cut()
    assert held.region_times() == {}


def test_regions_are_held_where_the_plain_step_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, virtual_time: Any
) -> None:
    """Under a memory limit, too, what a graph's plan is made of is not the launches'
    time. The step's gradients are plain's."""
    holds: list[float] = []
    asked: list[Request] = []

    def answers(request: Request) -> Iterator[Answer]:
        asked.append(request)
        return search.answers(request)

    def hold(self: CpuDevice, ms: float) -> None:
        if ms not in (observer.HOLD_MS, observer.RERUN_HOLD_MS):  # the observed step's
            holds.append(ms)
        virtual_time.sleep(HELD_S)

    monkeypatch.setattr("ssdtrain.observe.searching.answers", answers)
    monkeypatch.setattr(CpuDevice, "hold", hold)
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda self, profile: False)
    monkeypatch.setattr(Measured, "_may_hold", lambda self: True)
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *settings: Choice.ALL)
    theirs, net = train(Sums(), 12), Sums()
    with ssdtrain.offload(net, target="host", min_bytes=1) as session:
        assert same_bits(train(net, 12), theirs)
        assert session.plan is not None
        # Steps that are observed again have no long one behind them.
        num_asked, before = len(asked), list(holds)
        monkeypatch.setattr(Planner, "_follow", vars(Planner)["_observe"])
        train(net, 12)
        assert len(asked) > num_asked and holds == before
        cache = session.cache
        assert type(cache.course.observer) is Unobserved
        clock = cache.ledger.clock
        assert clock.before_rebuild is None and clock.after_rebuild is None
    profile, by = asked[-1].profile, asked[-1].corrections
    ((kind, runs),) = profile.regions.items()
    assert len(by.held_regions[kind]) == len(runs) > 1
    for time in by.held_regions[kind]:
        assert 0.0 < time.forward_ms < HELD_S * 1e3
        assert time.backward_ms < HELD_S * 1e3
    assert any(time.backward_ms > 0.0 for time in by.held_regions[kind])
    made = [item for item in profile.kinds[kind] if item.recipe is not None]
    keys = {rebuild_key(item.recipe or "", item.num_bytes) for item in made}
    assert set(by.rebuild_ms) == keys and len(keys) > 0
    assert max(by.rebuild_ms.values()) < HELD_S * 1e3
    most_ms = HOLD_MS + HOLD_FACTOR * longest_ms(asked[0].profile)
    assert any(ms == pytest.approx(most_ms) for ms in holds)
    text = "\n".join(in_parts(asked[-1], PART))
    assert decode(Request, joined(text.splitlines())) == asked[-1]
