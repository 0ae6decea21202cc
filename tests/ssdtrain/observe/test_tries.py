"""Plans that are tried in training, in virtual time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache.bypass import Unhooked
from ssdtrain.errors import ConfigError
from ssdtrain.observe import observation, planner, trials
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.searching import Searching
from ssdtrain.observe.trials import Stopwatch
from ssdtrain.plan.choose import QUICK_MARKS, SEARCH_MARKS
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.search import Answer, Request
from ssdtrain.plan.unsearched import all_again, all_again_moving, fewest_again
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.observe.slow_blocks import (
    FORWARD_S,
    ROWS,
    WIDTH,
    run,
)
from tests.ssdtrain.plan.profiles import links
from tests.ssdtrain.virtual_time import VirtualTime


@pytest.mark.parametrize("wait_s", [0.0, 4.0])
def test_no_plan_stays_slower_than_all_regions_again(
    wait_s: float, virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads take longer than any probe has seen."""
    theirs, _, _, reports, _ = run(virtual_time, None, num_steps=20)
    budget = reports[-1].saved_peak_bytes // 2
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    waits = CpuDevice.wait

    def wait(device: CpuDevice, *events: Any, **settings: Any) -> None:
        virtual_time.sleep(wait_s)
        waits(device, *events, **settings)

    monkeypatch.setattr(CpuDevice, "wait", wait)
    ours, times, plan, reports, is_settled = run(virtual_time, budget)
    assert same_bits(ours[:20], theirs)
    assert is_settled and plan is not None
    all_again_s = 6 * 4 * 4 * FORWARD_S
    assert (plan.policy == "regions") == (wait_s > 0.0)
    assert times[-1] <= 1.01 * all_again_s
    assert all(report.saved_peak_bytes <= budget for report in reports[10:])


def test_a_base_that_was_slow_at_first_is_timed_again(
    virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until another plan is tried everything takes three times as long."""
    _, _, _, reports, _ = run(virtual_time, None, num_steps=20)
    budget = reports[-1].saved_peak_bytes // 2
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    waits, sleeps, factor = CpuDevice.wait, virtual_time.sleep, [3.0]

    def wait(device: CpuDevice, *events: Any, **settings: Any) -> None:
        sleeps(4.0)
        waits(device, *events, **settings)

    class Timed(Stopwatch):
        def __init__(self, expected_ms: float) -> None:
            super().__init__(expected_ms)
            factor[0] = 1.0

    monkeypatch.setattr(CpuDevice, "wait", wait)
    monkeypatch.setattr(planner, "Stopwatch", Timed)
    monkeypatch.setattr(virtual_time, "sleep", lambda s: sleeps(factor[0] * s))
    _, times, plan, _, is_settled = run(virtual_time, budget)
    assert is_settled and plan is not None and plan.policy == "regions"
    assert times[-1] <= 1.01 * 6 * 4 * 4 * FORWARD_S


@pytest.mark.parametrize("share", [0.35, 0.25])
def test_the_base_moves_what_must_leave(
    share: float, virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all regions again need more than the budget, some of what they read leaves;
    a plan that was searched for and is slower goes back to that one."""
    theirs, _, _, reports, _ = run(virtual_time, None, num_steps=20)
    budget = int(share * reports[-1].saved_peak_bytes)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    waits = CpuDevice.wait

    def wait(device: CpuDevice, *events: Any, **settings: Any) -> None:
        virtual_time.sleep(1.0)
        waits(device, *events, **settings)

    monkeypatch.setattr(CpuDevice, "wait", wait)
    ours, times, plan, reports, is_settled = run(virtual_time, budget)
    assert same_bits(ours[:20], theirs)
    assert is_settled and plan is not None
    assert plan.policy == "regions" and not plan.moves_nothing
    assert reports[-1].bytes_offloaded > 0
    assert times[-1] <= 1.1 * 6 * 4 * 4 * FORWARD_S
    assert all(report.saved_peak_bytes <= budget for report in reports[3:])


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_base_that_needs_less_than_was_told_moves_nothing(
    is_seen: bool, virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the observed step needed hides what a step of re-runs needs; the clock says
    that nothing else is faster."""
    theirs, _, _, reports, _ = run(virtual_time, None, num_steps=20)
    budget = reports[-1].saved_peak_bytes // 2
    hidden = budget // 2
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    waits, told = CpuDevice.wait, list[int]()

    def wait(device: CpuDevice, *events: Any, **settings: Any) -> None:
        virtual_time.sleep(1.0)
        waits(device, *events, **settings)

    monkeypatch.setattr(CpuDevice, "wait", wait)

    def shy(seen: Any, larger: Any, goal: Goal) -> Any:
        most = replace(goal, spare_bytes=goal.spare_bytes + hidden)
        return all_again(seen, larger, most)

    def moving(seen: Any, larger: Any, goal: Goal) -> Any:
        most = replace(goal, spare_bytes=goal.spare_bytes + hidden)
        found = all_again_moving(seen, larger, most)
        assert found is not None and found.prediction is not None
        told.append(found.prediction.peak_bytes)
        return found

    monkeypatch.setattr(planner, "all_again", shy)
    monkeypatch.setattr(planner, "all_again_moving", moving)
    monkeypatch.setattr(
        MemoryGoal,
        "needed_bytes",
        lambda goal: told[-1] - hidden if is_seen else None,
    )
    ours, times, plan, reports, is_settled = run(virtual_time, budget)
    assert same_bits(ours[:20], theirs)
    assert is_settled and plan is not None and plan.policy == "regions"
    assert plan.moves_nothing == is_seen
    if is_seen:
        assert times[-1] <= 1.01 * 6 * 4 * 4 * FORWARD_S
    assert all(report.saved_peak_bytes <= budget for report in reports[3:])


class Phases(nn.Sequential):
    """Adds a layer now and then, as progressive growing does."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        skipped = max(0, 2 - self.num_calls // 40)
        self.num_calls += 1
        for layer in self[: len(self) - skipped]:
            x = layer(x)
        return x


def test_steps_that_change_now_and_then_are_planned_for(
    virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, _, reports, _ = run(virtual_time, None, num_steps=20)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    budget = reports[-1].saved_peak_bytes // 2
    *_, plan, _, is_settled = run(virtual_time, budget, num_steps=120, kind=Phases)
    assert is_settled and plan is not None


@pytest.mark.parametrize("over_bytes", [0, 1000])
def test_all_regions_are_tried_before_a_budget_is_refused(
    over_bytes: int, virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told to need a little more than the budget; what they need decides."""
    again = {"plan": "keep-all", "recompute": "regions", "verify": "checksum"}
    theirs, _, _, reports, _ = run(virtual_time, None, num_steps=20, **again)
    budget = int(reports[-1].saved_peak_bytes / 1.02)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(MemoryGoal, "over_bytes", lambda memory, goal: over_bytes)
    monkeypatch.setattr(planner, "all_again_moving", lambda *given: None)
    none = Answer(error="the budget cannot be reached")
    monkeypatch.setattr(Searching, "begin", lambda *given: none)
    if over_bytes:
        with pytest.raises(ConfigError, match=none.error):
            run(virtual_time, budget)
        return
    ours, _, plan, _, is_settled = run(virtual_time, budget)
    assert same_bits(ours[:20], theirs)
    assert is_settled and plan.policy == "regions" and plan.moves_nothing


@pytest.mark.parametrize("goal", [{}, {"memory_budget": "1GB"}])
def test_what_fits_runs_without_hooks(goal: dict[str, Any]) -> None:
    """From the third step on, and nothing is searched for; a batch that is larger than
    any before has hooks, which see what it needs."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ssdtrain.offload(model, min_bytes=0, **goal) as session:
        seen = []
        for rows in (ROWS, ROWS, ROWS, ROWS // 2, ROWS, 2 * ROWS):
            model(torch.randn(rows, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = session.last_step
            assert report is not None
            seen.append(report.bytes_saved > 0)
            if len(seen) == 4:
                assert session.is_settled and isinstance(session.cache.bypass, Unhooked)
                assert "everything fits" in session.summary()
        assert seen == [True, True, False, False, False, True]


def test_regions_that_the_budget_has_room_for_stay_while_a_plan_is_searched_for(
    virtual_time: VirtualTime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Copies are slow, so nothing is better; what needs no price is in force early."""
    theirs, _, _, reports, _ = run(virtual_time, None, num_steps=20)
    kept_bytes = reports[-1].saved_peak_bytes
    again = {"plan": "keep-all", "recompute": "regions"}
    _, _, _, reports, _ = run(virtual_time, None, num_steps=5, **again)
    budget = (kept_bytes + reports[-1].saved_peak_bytes) // 2
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(CpuDevice, "runs_beside", True)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    caplog.set_level("INFO", logger=planner.__name__)
    ours, times, plan, reports, _ = run(virtual_time, budget)
    assert same_bits(ours[:20], theirs)
    assert plan is not None
    second = next(line for line in caplog.messages if "plan 2: " in line)
    number = int(second.removesuffix(" regions run again").split()[-1])
    assert 1 < number < 6
    assert times[-1] <= 1.01 * (6 * 3 + number) * 4 * FORWARD_S
    assert all(report.saved_peak_bytes <= budget for report in reports[3:])


def test_a_search_for_more_room_is_not_begun_anew(
    virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps are beyond the limit, and the search takes longer than training."""
    _, _, _, reports, _ = run(virtual_time, None, num_steps=5)
    budget = reports[-1].saved_peak_bytes // 2
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    monkeypatch.setattr(MemoryGoal, "over_bytes", lambda memory, goal: 1000)
    efforts = list[int]()

    def begin(searching: Searching, request: Any, effort: int) -> None:
        efforts.append(effort)

    monkeypatch.setattr(Searching, "begin", begin)
    monkeypatch.setattr(Searching, "is_under_way", property(lambda _: bool(efforts)))
    _, _, plan, _, is_settled = run(virtual_time, budget, num_steps=20)
    assert plan is not None and not is_settled
    assert efforts == [planner.QUICK_MARKS]


def test_a_limit_that_no_plan_keeps_is_told(
    virtual_time: VirtualTime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, _, _, reports, _ = run(virtual_time, None, num_steps=5)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(MemoryGoal, "over_bytes", lambda memory, goal: 1000)
    run(virtual_time, reports[-1].saved_peak_bytes // 2, num_steps=20)
    told = [line for line in caplog.messages if "1000 bytes more than" in line]
    assert len(told) == 1 and "memory_budget=" in told[0]


@pytest.fixture
def with_room(virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> int:
    """A budget that has room for some regions; copies are slow."""
    _, _, _, reports, _ = run(virtual_time, None, num_steps=20)
    kept_bytes = reports[-1].saved_peak_bytes
    again = {"plan": "keep-all", "recompute": "regions"}
    _, _, _, reports, _ = run(virtual_time, None, num_steps=5, **again)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(CpuDevice, "runs_beside", True)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(1e6))
    return (kept_bytes + reports[-1].saved_peak_bytes) // 2


class Answering:
    """Stands in for the searches, which last some steps each."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Request], Answer]
    ) -> None:
        self.efforts = list[int]()
        self._answer_to = answer
        self._request: Request | None = None
        self._num_steps = 0
        monkeypatch.setattr(Searching, "begin", lambda _, *asked: self._begin(*asked))
        monkeypatch.setattr(Searching, "answer", lambda _, has_plan: self._answer())
        monkeypatch.setattr(Searching, "stop", lambda _: self._stop())
        awaits = property(lambda _: self._request is not None)
        monkeypatch.setattr(Searching, "is_under_way", awaits)

    def _begin(self, request: Request, effort: int) -> None:
        assert self._request is None, "the search before it is left"
        self.efforts.append(effort)
        self._request, self._num_steps = request, 0

    def _stop(self) -> None:
        self._request = None

    def _answer(self) -> Answer | None:
        request = self._request
        self._num_steps += 1
        if request is None or self._num_steps < 12:
            return None
        self._request = None
        return self._answer_to(request)


def staying(request: Request) -> Answer:
    """The plan in force is the best."""
    assert request.plan is not None
    return Answer(plan=replace(request.plan, orders={}), stays=True)


def test_what_was_tried_meanwhile_tells_nothing_of_the_plan_that_comes_back(
    with_room: int, virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search has found nothing better than what was tried, and was not faster."""
    monkeypatch.setattr(trials, "GAIN", 1.0)
    Answering(monkeypatch, staying)
    *_, plan, _, is_settled = run(virtual_time, with_room, num_steps=40)
    assert is_settled and plan.policy == "regions"
    assert plan.prediction.step_ms == pytest.approx(6 * 4 * 4e3 * FORWARD_S, rel=1e-3)


def failing(request: Request) -> Answer:
    """None fits."""
    return Answer(error="the budget cannot be reached")


def keeping_one(request: Request) -> Answer:
    """Another plan, which all regions again are not compared with: they do not fit."""
    plan = fewest_again(request.profile, request.profile, request.goal)
    assert plan is not None
    return Answer(plan=plan)


@pytest.mark.parametrize("answer", [staying, failing, keeping_one])
def test_a_search_that_was_short_is_followed_by_a_longer_one(
    answer: Callable[[Request], Answer],
    with_room: int,
    virtual_time: VirtualTime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The base goes beyond the limit once."""
    over = iter([1000])
    monkeypatch.setattr(MemoryGoal, "over_bytes", lambda *given: next(over, 0))
    searches = Answering(monkeypatch, answer)

    def first(*asked: Any) -> Any:
        return None if searches.efforts else all_again(*asked)

    monkeypatch.setattr(planner, "all_again", first)
    monkeypatch.setattr(planner, "all_again_moving", lambda *asked: None)
    *_, plan, _, is_settled = run(virtual_time, with_room, num_steps=60)
    assert is_settled and plan is not None
    assert searches.efforts == [QUICK_MARKS, SEARCH_MARKS]
