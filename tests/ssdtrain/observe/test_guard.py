"""All regions again against the plan in force, by the clock."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.observe import observation
from ssdtrain.observe.guard import MOST_TRIES, SURELY_FASTER, Guard, fastest_that_fits
from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.adapt import ALIKE_STEPS, GAIN, JUDGED_STEPS, NEW_STEPS
from ssdtrain.plan.agree import Alone
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile, RegionRun
from ssdtrain.plan.search import Answer
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.observe.parts import promise
from tests.ssdtrain.plan.profiles import MB, chain, links
from tests.ssdtrain.virtual_time import VirtualTime

NUM_REGIONS = 4
AGAIN_MS = 28.0 + 3.0
"""A step of `blocks` in which all regions run again."""
NEEDED = 2 * MB + MB // 20


def blocks() -> Profile:
    """Four regions of two tensors each."""
    profile = chain(2 * NUM_REGIONS)
    items = tuple(
        replace(item, region=number // 2)
        for number, item in enumerate(profile.kinds["model/0"])
    )
    runs = (RegionRun(ms=1.0),) * NUM_REGIONS
    return replace(profile, kinds={"model/0": items}, regions={"model/0": runs})


class Compared:
    """A `Guard` beside plans made by hand."""

    def __init__(self, budget: int | None = NEEDED, peers: Any = None) -> None:
        self.profile = self.larger = blocks()
        self.goal = Tightened(Goal(memory_budget_bytes=budget))
        self.guard = Guard(self.goal, peers or Alone())

    def follow(self, plan: Plan, ms: float, num_steps: int | None = None) -> Any:
        """Steps of a plan; what is offered."""
        self.guard.planned(plan, has_regions=True)
        for _ in range(num_steps or NEW_STEPS + ALIKE_STEPS):
            found = self.guard.step(ms, plan, lambda: (self.profile, self.larger))
            if found is not None:
                return found
        return None


def offered(answer: Answer | None) -> Plan:
    assert answer is not None and answer.plan is not None and not answer.stays
    return answer.plan


def test_the_shorter_one_stays() -> None:
    own = Compared()
    searched = promise(20.0)
    tried = offered(own.follow(searched, ms=40.0))
    assert tried.policy == "regions" and not own.guard.is_judged
    assert tried.prediction is not None
    again_ms = tried.prediction.step_ms
    stays = own.follow(tried, ms=39.0)
    assert stays.stays and stays.plan.prediction.step_ms == 39.0
    assert own.guard.is_in_force and own.guard.is_judged
    assert again_ms == pytest.approx(AGAIN_MS)


@pytest.mark.parametrize("takes_ms", [40.0 * (1 - GAIN / 2), 50.0])
def test_the_plan_comes_back_where_it_is_no_longer(takes_ms: float) -> None:
    own = Compared()
    searched = promise(20.0)
    tried = offered(own.follow(searched, ms=40.0))
    assert offered(own.follow(tried, ms=takes_ms)) is searched
    assert own.follow(searched, ms=40.0) is None
    assert own.guard.is_judged and not own.guard.is_in_force


def test_a_plan_that_is_surely_shorter_is_not_compared() -> None:
    own = Compared()
    assert own.follow(promise(20.0), ms=0.99 * SURELY_FASTER * AGAIN_MS) is None
    assert own.guard.is_judged
    assert own.follow(promise(20.0), ms=1.01 * SURELY_FASTER * AGAIN_MS) is not None


def test_what_a_try_took_is_remembered() -> None:
    own = Compared()
    first = promise(20.0)
    own.follow(offered(own.follow(first, ms=40.0)), ms=45.0)
    assert own.follow(promise(21.0), ms=44.0) is None
    tried = offered(own.follow(promise(22.0), ms=50.0))
    own.follow(tried, ms=52.0)
    for _ in range(MOST_TRIES):
        assert own.follow(promise(23.0), ms=90.0) is None
    own.guard.forget()
    assert own.follow(promise(24.0), ms=90.0) is not None


@pytest.mark.parametrize("budget", [NEEDED - MB, None])
def test_nothing_is_tried_beyond_the_limit(budget: int | None) -> None:
    own = Compared(budget)
    assert own.follow(promise(20.0), ms=90.0) is None and own.guard.is_judged


def test_the_whole_budget_may_be_used_and_the_largest_batch_counts() -> None:
    profile, goal = blocks(), Goal(memory_budget_bytes=NEEDED)
    own = fastest_that_fits(profile, profile, Guard(Tightened(goal), Alone()).goal)
    assert own is not None and own.prediction is not None
    exact = Goal(memory_budget_bytes=own.prediction.peak_bytes)
    assert fastest_that_fits(profile, profile, exact) is None
    exact = Guard(Tightened(exact), Alone()).goal
    assert fastest_that_fits(profile, profile, exact) is not None
    items = tuple(
        replace(item, num_bytes=2 * item.num_bytes) for item in profile.kinds["model/0"]
    )
    larger = replace(profile, kinds={"model/0": items})
    assert fastest_that_fits(profile, larger, exact) is None


def test_a_try_beyond_memory_ends_and_there_is_no_other() -> None:
    own = Compared()
    searched = promise(20.0)
    tried = offered(own.follow(searched, ms=40.0))
    own.guard.planned(tried, has_regions=True)
    assert offered(own.guard.refuse()) is searched
    assert own.follow(searched, ms=40.0) is None
    assert own.follow(promise(21.0), ms=90.0) is None


def test_ranks_that_see_no_peak_keep_the_reserve() -> None:
    class Together(Alone):
        is_alone = False

    goal = Goal(memory_budget_bytes=2 * MB)
    assert Guard(Tightened(goal), Together()).goal == goal
    own = fastest_that_fits(blocks(), blocks(), Guard(Tightened(goal), Alone()).goal)
    assert own is not None and fastest_that_fits(blocks(), blocks(), goal) is None


def test_a_try_that_never_came_is_offered_again() -> None:
    """An observed step drops what was offered, and the plan goes on."""
    own, searched = Compared(), promise(20.0)
    for _ in range(MOST_TRIES + 1):
        assert offered(own.follow(searched, ms=40.0)).policy == "regions"


def test_it_stays_in_force_when_its_prediction_is_told_anew() -> None:
    own = Compared()
    tried = offered(own.follow(promise(20.0), ms=40.0))
    stays = own.follow(tried, ms=35.0)
    own.guard.planned(
        replace(tried, prediction=stays.plan.prediction), has_regions=True
    )
    assert own.guard.is_in_force


def test_steps_without_a_time_end_the_comparison() -> None:
    own = Compared()
    plan, every = promise(20.0), lambda: (own.profile, own.larger)
    own.guard.planned(plan, has_regions=True)
    for _ in range(NEW_STEPS + JUDGED_STEPS):
        assert not own.guard.is_judged
        assert own.guard.step(None, plan, every) is None
    assert own.guard.is_judged


def test_without_regions_nothing_is_compared() -> None:
    own = Compared()
    own.guard.planned(promise(20.0), has_regions=False)
    assert own.guard.is_judged


def test_a_rank_that_follows_compares_nothing() -> None:
    class Follower(Alone):
        leads = False

    own = Compared(peers=Follower())
    assert own.follow(promise(20.0), ms=90.0) is None and own.guard.is_judged


# -- in training --------------------------------------------------------------------

WIDTH, ROWS = 64, 32
FORWARD_S = 1.0


class Slowly(torch.autograd.Function):
    """Saves what it is given, and takes so long in virtual time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: VirtualTime) -> Tensor:
        ctx.save_for_backward(x)
        ctx.clock = clock
        clock.sleep(FORWARD_S)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.clock.sleep(2 * FORWARD_S)
        return gradient * x.cos(), None


class Block(nn.Module):
    """Four operators that nothing but a re-run of the whole makes again."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self._clock = weakref.ref(clock)  # nobody compares its insides

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(4):
            x = Slowly.apply(x, self._clock())
        return x


def run(clock: VirtualTime, budget: int | None, num_steps: int = 60) -> Any:
    torch.manual_seed(0)
    start = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(start, *(Block(clock) for _ in range(6)))
    settings: dict[str, Any] = {"target": "host", "min_bytes": 1, "plan": "auto"}
    if budget is None:
        settings.update(plan="keep-all", recompute="off", verify="checksum")
    else:
        settings.update(memory_budget_bytes=budget)
    found, times, x = [], [], torch.randn(ROWS, WIDTH)
    with ssdtrain.offload(model, **settings) as session:
        for _ in range(num_steps):
            begun = clock.monotonic()
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
            times.append(clock.monotonic() - begun)
        return found, times, session.plan, session.steps, session.is_settled


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
