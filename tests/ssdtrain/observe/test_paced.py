"""A step timed mark by mark: what it counts, what it finds, and what it leaves."""

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ssdtrain
from ssdtrain.cache.regions import Choice
from ssdtrain.observe.measured import Measured
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.paced import (
    STRIDE,
    SYNCHRONIZES,
    Moment,
    Paced,
    heard,
    leads_ms,
    looked_at,
)
from ssdtrain.plan.calibrate import (
    AHEAD_MS,
    Corrections,
    Pace,
    PlainTimes,
    Segment,
    corrected,
    without_readings,
)
from ssdtrain.plan.calibrate import paced as with_pace
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Wait
from ssdtrain.plan.profile import Phase, Profile
from ssdtrain.plan.simulate import keep_all, simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.plan.profiles import MB, chain

pytestmark = pytest.mark.usefixtures("virtual_time")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(8)]
        self.parts = nn.ModuleList(parts)
        self.reads: Callable[[], bool] = lambda: False
        self.pause: Callable[[], None] = lambda: None
        """Between two parts: the host's time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
            self.pause()
        if self.reads():  # as torch says it
            warnings.warn(SYNCHRONIZES, stacklevel=1)
        return x.sum()


def train(net: Net, steps: int) -> list[list[torch.Tensor]]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.linspace(-1, 1, 32).view(4, 8)).backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        optimizer.step()
    return found


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> list[Pace | None]:
    """What paced steps find; there is room for them."""
    found: list[Pace | None] = []
    told = Paced.pace

    def pace(self: Paced) -> Pace | None:
        found.append(told(self))
        return found[-1]

    monkeypatch.setattr(Paced, "pace", pace)
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda self, profile: True)
    return found


@pytest.mark.parametrize("choice", [Choice.NONE, Choice.ALL])
def test_a_paced_step_stands_behind_the_plain_ones(
    paces: list[Pace | None], monkeypatch: pytest.MonkeyPatch, choice: Choice
) -> None:
    """Its gradients are plain's, and it finds every moment; also where all regions ran
    again in the observed step."""
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *settings: choice)
    theirs, net = train(Net(), 8), Net()
    with ssdtrain.offload(net, target="host", min_bytes=1) as session:
        assert same_bits(train(net, 8), theirs)
        (found,) = paces
        profile = session.profile
    assert found is not None and profile is not None
    assert len(found.segments) > len(profile.marks) // (2 * STRIDE)
    assert found.end > 0.8 * len(profile.marks)
    assert bool(profile.regions) == (choice is Choice.ALL)
    assert found.num_marks == len(profile.marks)
    assert "plain_step_ms" in profile.notes


def test_time_in_the_hooks_is_not_the_programs(
    paces: list[Pace | None], monkeypatch: pytest.MonkeyPatch, virtual_time: Any
) -> None:
    """However it is spread over them: less than no time would be no answer, and the
    search would refuse it."""
    turns = itertools.cycle([0.0, 0.0, 1.0])

    def may_meddle() -> bool:
        virtual_time.sleep(next(turns))
        return False

    monkeypatch.setattr("ssdtrain.observe.paced.may_meddle", may_meddle)
    with ssdtrain.offload(net := Net(), target="host", min_bytes=1):
        train(net, 8)
    (found,) = paces
    assert found is not None
    # Each look at the clock takes some of it.
    assert all(0.0 <= segment.host_ms < 1.0 for segment in found.segments)


class Behind:
    """A device that comes to everything `lag_ms` behind its host, and its clock."""

    runs_beside = True

    def __init__(self, host: Any) -> None:
        self._host, self.lag_ms = host, 0.0

    def now(self) -> float:
        return float(self._host.monotonic() * 1e3 + self.lag_ms)

    def ms_between(self, start: float, end: float) -> float:
        self._host.sleep(max(0.0, end / 1e3 - self._host.monotonic()))
        return end - start


def test_how_far_the_host_is_ahead_is_seen_at_each_moment(virtual_time: Any) -> None:
    device: Any = Behind(virtual_time)
    moments = []
    for lag_ms in (30.0, 0.0, 4.0):
        device.lag_ms = lag_ms
        came, entered_ns = device.now(), int(virtual_time.monotonic() * 1e9)
        moments.append(Moment(0, came, 0, came, entered_ns))
        virtual_time.sleep(0.05)
    found = leads_ms(moments, device, device)
    assert found == pytest.approx([30.0, 0.0, 4.0], abs=0.01)
    device.runs_beside = False  # a CPU's host is its device
    assert leads_ms(moments, device, device) == [AHEAD_MS] * 3


def test_a_step_is_held_where_the_host_bounds_it() -> None:
    plain = PlainTimes(step_ms=30.0, forward_ms=10.0, host_forward_ms=9.9)
    assert plain.is_hosted
    long = plain._replace(step_ms=300.0)
    assert long.is_hosted and not long._replace(host_forward_ms=9.0).is_hosted
    # It may bound the backward of a short one, or parts.
    assert plain._replace(host_forward_ms=9.0).is_hosted
    assert not plain._replace(host_forward_ms=4.0).is_hosted


def test_what_the_host_waits_for_is_not_what_bounds_the_step() -> None:
    """A forward of 7.25 ms, of which 6 are behind a reading: what is left took the
    device 1.25 ms, and the host 0.4."""
    profile, pace = uneven()
    plain = PlainTimes(step_ms=17.0, forward_ms=7.25, host_forward_ms=7.2)
    own = without_readings(plain, pace, profile)
    assert plain.is_hosted and not own.is_hosted
    assert (own.forward_ms, own.step_ms) == (pytest.approx(1.25), 17.0)
    assert own.host_forward_ms == pytest.approx(0.4)
    # The other way round: the readings are what the host is ahead by.
    waits = plain._replace(host_forward_ms=2.0)
    slow = tuple(
        replace(one, host_ms=one.host_ms if one.reads_back else one.ms)
        for one in pace.segments
    )
    assert not waits.is_hosted
    assert without_readings(waits, replace(pace, segments=slow), profile).is_hosted
    # Where nothing is read back, or another step was timed, it is as it was.
    silent = tuple(replace(one, reads_back=False) for one in pace.segments)
    assert without_readings(plain, replace(pace, segments=silent), profile) == plain
    assert without_readings(plain, replace(pace, num_marks=9), profile) == plain


@pytest.mark.parametrize("is_hosted", [True, False])
def test_what_is_read_back_has_no_say_in_whether_a_step_is_held(
    is_hosted: bool,
    paces: list[Pace | None],
    monkeypatch: pytest.MonkeyPatch,
    virtual_time: Any,
) -> None:
    own = PlainTimes(step_ms=1.0, forward_ms=1.0, host_forward_ms=float(is_hosted))
    told: list[Any] = []

    def without(*about: Any) -> PlainTimes:
        told.extend(about)
        return own

    monkeypatch.setattr("ssdtrain.observe.measured.without_readings", without)
    monkeypatch.setattr(Measured, "may_hold", lambda _, *, is_hosted: is_hosted)
    monkeypatch.setattr(CpuDevice, "hold", lambda own, ms: None)
    net = Net()
    net.pause = lambda: virtual_time.sleep(0.002)
    with ssdtrain.offload(net, target="host", min_bytes=1):
        train(net, 9)
    assert (len(paces) > 1) == is_hosted
    assert told[1] is paces[0]


class Saving(torch.autograd.Function):
    """Squares, and saves its input, by Python: a function mode is still there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Doubling(TorchFunctionMode):
    """Doubles what `detach` gives."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.Tensor.detach else found


@pytest.mark.parametrize("around", [Doubling, nullcontext])
def test_no_mode_meets_what_it_keeps(
    paces: list[Pace | None], around: Callable[[], Any]
) -> None:
    class Moded(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[0](x)
            with around():
                x = Saving.apply(x)
            return super().forward(x)

    theirs, net = train(Moded(), 8), Moded()
    with ssdtrain.offload(net, target="host", min_bytes=1):
        assert same_bits(train(net, 8), theirs)
    assert len(paces) == 1


def test_another_program_has_no_pace(paces: list[Pace | None]) -> None:
    class Shorter(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(session.cache.bypass, Paced):
                return self.parts[0](x).sum()  # type: ignore[no-any-return]
            return super().forward(x)

    net = Shorter()
    settings: dict[str, Any] = {"target": "host", "min_bytes": 1, "recompute": "off"}
    with ssdtrain.offload(net, **settings) as session:
        train(net, 7)
        assert paces == [None] and session.plan is not None


def test_where_the_clock_is_read() -> None:
    """All along, where backward starts, and around the one that takes long."""
    profile = chain(30)
    marks = list(profile.marks)
    marks[11] = replace(marks[11], ms=50.0)
    long = replace(profile, marks=tuple(marks))
    packs = [min(2 * n, 60) for n in range(1, 61)]  # a parameter each
    to_pack, to_use = looked_at(long, packs)
    assert {0, 11, 12} <= set(to_pack.values())
    assert all(packs[mark] == number for number, mark in to_pack.items())
    assert 30 in to_use.values()
    assert all(packs[59 - mark] == number for number, mark in to_use.items())
    found = sorted([*to_pack.values(), *to_use.values()])
    assert all(after - one <= STRIDE for one, after in itertools.pairwise(found))


def test_what_has_no_call_of_its_own_is_not_looked_at() -> None:
    packs = [1, 1, 1, 2, 2, 2, 2, 2]
    to_pack, to_use = looked_at(chain(4), packs)
    assert to_pack == {1: 0, 2: 3} and set(to_use) <= {1, 2}


def uneven() -> tuple[Profile, Pace]:
    """Four marks of 1 ms and four of 2 ms; really the third takes 6 ms, and reads."""
    profile = chain(4)
    parts = [(0, 0.5, 0.1), (2, 6.0, 5.0), (3, 0.5, 0.1), (4, 4.0, 1.0)]
    segments = tuple(
        Segment(start=start, ms=ms, host_ms=host, reads_back=start == 2)
        for start, ms, host in parts
    )
    pace = Pace(num_marks=8, head_ms=0.25, head_host_ms=0.2, segments=segments, end=6)
    return profile, pace


def test_marks_take_what_their_segment_took() -> None:
    profile, pace = uneven()
    found = with_pace(profile, pace, step_ms=17.0)
    assert [mark.ms for mark in found.marks] == [
        0.25,
        0.25,
        6.0,
        0.5,
        2.0,
        2.0,
        2.0,
        2.0,
    ]
    assert [mark.reads_back for mark in found.marks].index(True) == 2
    assert found.head_ms == 0.25 and found.tail_ms == 17.0 - 15.25
    assert found.compute_ms == pytest.approx(17.0)
    by = Corrections(plain=(17.0, 7.25, 0.0, 0.0), pace=pace)
    assert corrected(profile, by).marks[:6] == found.marks[:6]


@pytest.mark.parametrize("step_ms, num_marks", [(7.0, 8), (17.0, 9)])
def test_a_pace_that_cannot_be_is_not_taken(step_ms: float, num_marks: int) -> None:
    profile, pace = uneven()
    pace = Pace(**{**vars(pace), "num_marks": num_marks})
    assert with_pace(profile, pace, step_ms) == profile


def test_a_result_that_is_read_back_waits_for_the_copies_out() -> None:
    """Four copies of 3 ms, forward of 4 ms: the third mark comes when 9 ms are over."""
    slow = chain(4, num_bytes=3 * MB, gb_per_s=1.0)
    orders = {
        kind: tuple(replace(order, placement=Placement.OFFLOAD) for order in own)
        for kind, own in keep_all(Timeline(slow)).items()
    }
    free = simulate(Timeline(slow), orders)
    marks = list(slow.marks)
    marks[2] = type(marks[2])(**{**vars(marks[2]), "reads_back": True})
    reads = Profile(**{**vars(slow), "marks": tuple(marks)})
    bound = simulate(Timeline(reads), orders)
    assert free.waits == {}
    # Two copies and the third are on their way when 2 ms are over.
    assert bound.waits[Wait.COPY_OUT.value] == pytest.approx(9.0 - 2.0)
    assert simulate(Timeline(reads), keep_all(Timeline(reads))).waits == {}


@pytest.mark.filterwarnings("error")
def test_a_warning_is_heard_and_nothing_else_changes() -> None:
    filters, show = list(warnings.filters), warnings.showwarning
    told: list[int] = []
    with heard(SYNCHRONIZES, lambda: told.append(1)):
        for _ in range(2):
            warnings.warn(f"item {SYNCHRONIZES} (here)", stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)
    assert told == [1, 1]
    assert warnings.filters == filters and warnings.showwarning is show
    with pytest.raises(UserWarning, match=SYNCHRONIZES):
        warnings.warn(SYNCHRONIZES, stacklevel=1)


class Loss(torch.autograd.Function):
    """A sum that reads its gradient back, as Liger's loss does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reads: Callable[[], bool]) -> torch.Tensor:
        ctx.save_for_backward(torch.ones_like(x))
        ctx.reads = reads
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ones,) = ctx.saved_tensors
        if ctx.reads():
            warnings.warn(SYNCHRONIZES, stacklevel=1)
        return gradients[0] * ones, None


class ReadingNet(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Loss.apply(super().forward(x) + x, self.reads)
        return found


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch is asked for, as on a GPU."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    init = Paced.__init__

    def listening(self: Paced, *args: Any, listens: bool) -> None:
        init(self, *args, listens=True)

    monkeypatch.setattr(Paced, "__init__", listening)
    return found


@pytest.mark.filterwarnings("error")
def test_what_is_read_back_has_its_segment(
    modes: list[str], paces: list[Pace | None]
) -> None:
    """In forward and in backward. On a GPU torch is asked to warn; here the model
    does."""
    net, filters = ReadingNet(), list(warnings.filters)
    with ssdtrain.offload(net, target="host", min_bytes=1, recompute="off") as session:
        net.reads = lambda: isinstance(session.cache.bypass, Paced)
        train(net, 8)
        (found,) = paces
        profile = session.profile
    assert modes == ["warn", "default"] * 2 and warnings.filters == filters
    assert found is not None and profile is not None
    out, back = [one.start for one in found.segments if one.reads_back]
    first = [mark.phase for mark in profile.marks].index(Phase.BACKWARD)
    assert first - 1 - STRIDE <= out < first <= back < first + STRIDE


def test_nothing_is_heard_behind_a_step_that_was_given_up(
    modes: list[str], paces: list[Pace | None]
) -> None:
    """Its backward fails: the session ends, and torch is as it was."""
    net, show = ReadingNet(), warnings.showwarning
    with ssdtrain.offload(net, target="host", min_bytes=1, recompute="off") as session:

        def reads() -> bool:
            if isinstance(session.cache.bypass, Paced) and modes[2:]:
                raise RuntimeError("of the model's own")
            return False

        net.reads = reads
        with pytest.raises(RuntimeError, match="own"):
            train(net, 8)
        assert modes == ["warn", "default", "warn"]
    assert modes[3:] == ["default"] and warnings.showwarning is show
    assert paces == []
