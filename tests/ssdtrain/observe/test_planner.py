"""`plan="auto"` and saved plans under real training steps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache.rebuilder import Rebuilder
from ssdtrain.counters import Fallback
from ssdtrain.counters import Span as TraceSpan
from ssdtrain.engines import plain
from ssdtrain.errors import ConfigError
from ssdtrain.observe import searching, trials
from ssdtrain.observe.links import fitted_drive
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.choose import SEARCH_MARKS, choose, options
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import PLAN_FILE, Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.schedule import Late, Style, schedule
from ssdtrain.plan.search import Request, Search
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.memory_storage import MemoryStorage
from tests.ssdtrain.observe.searches import await_what_runs_beside

pytestmark = pytest.mark.usefixtures("virtual_time")

WIDTH = 64
ROWS = 32
SETTINGS: dict[str, Any] = {
    "target": "host",
    "min_bytes": 1,
    "plan": "auto",
    "max_overhead": 1.0,
}

KEPT = {**SETTINGS, "plan": "keep-all", "recompute": "off", "verify": "checksum"}
"""Nothing leaves; verified, as steps without hooks count no bytes."""


class Net(nn.Module):
    """Blocks with recipes (norm, GELU, dropout) and tensors that must be stored."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "up": nn.Linear(WIDTH, 2 * WIDTH),
                    "down": nn.Linear(2 * WIDTH, WIDTH),
                    "dropout": nn.Dropout(0.1),
                }
            )
            for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = F.gelu(block["up"](block["norm"](x)))
            x = x + block["dropout"](block["down"](hidden))
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Casting(Net):
    """What it saves last is rebuilt from a tensor that is saved for that alone."""

    def loss(self, x: Tensor) -> Tensor:
        return x.bfloat16().float().square().mean()


Hook = Callable[[int, ssdtrain.Session], None]


def train(
    settings: dict[str, Any] | None,
    *,
    num_steps: int = 5,
    num_micro_batches: int = 1,
    rows: Callable[[int], int] = lambda step: ROWS,
    hook: Hook | None = None,
    build: type[Net] = Net,
) -> tuple[list[Tensor], list[ssdtrain.StepReport], Any]:
    torch.manual_seed(0)
    net = build()
    session = None if settings is None else ssdtrain.offload(net, **settings)
    seen: list[Tensor] = []
    for step in range(num_steps):
        if hook is not None and session is not None:
            hook(step, session)
        for _ in range(num_micro_batches):
            x = torch.randn(rows(step), WIDTH, requires_grad=True)
            loss = net(x)
            loss.backward()
            seen += [loss.detach(), x.grad]  # type: ignore[list-item]
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    seen.append(parameter.grad.clone())
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    if session is None:
        return seen, [], None
    reports, found = list(session.steps), (session.plan, session.profile)
    session.close()
    return seen, reports, found


def counting(marks: list[int]) -> Hook:
    """Writes down how many marks have been at the start of every step."""
    return lambda _, session: marks.append(session.cache.cursor.mark)


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return same_bits(ours, theirs)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_predicted_memory_is_the_measured_one(num_micro_batches: int) -> None:
    theirs, _, _ = train(None, num_micro_batches=num_micro_batches)
    ours, reports, (plan, profile) = train(
        SETTINGS, num_micro_batches=num_micro_batches
    )
    assert equal(ours, theirs)
    assert len(profile.lanes) == num_micro_batches
    last = reports[-1]
    assert last.saved_peak_bytes == plan.prediction.peak_bytes
    assert last.saved_peak_bytes < 0.6 * reports[0].bytes_saved / num_micro_batches
    assert last.plan_error is not None
    modules = {item.module for items in profile.kinds.values() for item in items}
    assert "blocks.1.dropout" in modules


def test_ranks_plan_for_the_least_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for its own, they would follow plans of their own."""

    class Smaller(Peers):
        def longest(
            self, own: Sequence[float], topic: str, step: int
        ) -> tuple[float, ...]:
            smaller = topic == "capacity"
            return tuple(max(each, -(1 << 20)) if smaller else each for each in own)

    seen: list[int | None] = []

    def chosen(profile: Profile, goal: Goal, *more: Any) -> Plan:
        seen.append(goal.capacity_bytes)
        return choose(profile, goal, *more)

    monkeypatch.setattr("ssdtrain.plan.search.choose", chosen)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 21)
    monkeypatch.setattr(plain, "peers_of", lambda ranks, alone: Smaller())
    train(SETTINGS)
    assert set(seen) == {1 << 20}


def test_the_first_steps_need_no_more_than_full_offloading() -> None:
    _, full, _ = train({**SETTINGS, "plan": "offload-all"}, num_steps=3)
    _, ours, _ = train(SETTINGS, num_steps=3)
    for step in range(2):
        assert ours[step].saved_peak_bytes <= full[step].saved_peak_bytes
    assert ours[2].saved_peak_bytes <= full[2].saved_peak_bytes


def test_a_full_drive_is_not_probed() -> None:
    full = MemoryStorage(capacity_bytes=1 << 20)
    assert fitted_drive(full, [], num_threads=2) is None
    spans = [
        TraceSpan(row, row, n * 1_000_000, (n + 1) * 1_000_000, 1_000_000)
        for row in ("write", "read")
        for n in range(4)
    ]
    told = fitted_drive(full, spans, num_threads=2)
    assert told is not None
    assert told.write.bytes_per_second == pytest.approx(1e9)
    assert told.duplex_slowdown == 1.0  # as of one medium, until it is known


@pytest.mark.parametrize("build", [Net, Casting])
def test_any_plan_gives_the_same_gradients_and_the_predicted_memory(
    tmp_path: Path, build: type[Net]
) -> None:
    """Where events have a price, too: then loads come in batches."""
    num_batched = 0
    theirs, _, _ = train(None, num_steps=3, build=build)
    _, _, (_, profile) = train(SETTINGS, num_steps=3, build=build)
    timeline = Timeline(profile)
    draw = random.Random(0)
    for number in range(25):
        placements = {
            kind: [draw.choice(options(timeline, item)) for item in items]
            for kind, items in profile.kinds.items()
        }
        style = Style(
            window_bytes=draw.choice([None, 20_000, 100_000]),
            late=draw.choice(list(Late)),
        )
        links = replace(profile.links, event_ms=0.01 * (number % 2), batch_share=0.3)
        orders = schedule(Timeline(replace(profile, links=links)), placements, style)
        away = [o for own in orders.values() for o in own if o.load_batch]
        num_batched += len(away) - len({(o.load_at, o.load_batch) for o in away})
        path = tmp_path / f"{number}.json"
        PLAN_FILE.write(path, Plan(orders=orders, policy="random"))
        marks: list[int] = []
        ours, reports, (plan, _) = train(
            {**SETTINGS, "plan": str(path)},
            num_steps=3,
            build=build,
            hook=counting(marks),
        )
        assert plan.orders == orders
        assert marks[1] - marks[0] == len(profile.marks), "what is not saved counts"
        assert equal(ours, theirs), orders
        predicted = simulate(timeline, orders)
        for report in reports:
            assert not report.fallbacks
            assert report.bytes_reloaded == predicted.links["h2d"].num_bytes
        # A norm asks for its input and two numbers a row, and holds all till it ends.
        assert any(mark.goes_on for mark in profile.marks)
        peaks = {report.saved_peak_bytes for report in reports}
        assert peaks == {predicted.peak_bytes}
    assert num_batched > 0


@pytest.mark.parametrize("refused_at", [3, 5])
def test_a_recipe_that_is_refused_under_a_plan_leaves_it_in_force(
    monkeypatch: pytest.MonkeyPatch, refused_at: int
) -> None:
    """What would have been stored for its sake is not there then. Once a table is
    compiled nothing is searched for: what it asked is asked again, and answered."""

    class CastingEarly(Casting):
        def loss(self, x: Tensor) -> Tensor:
            y = x.bfloat16().float().square()
            return (y * y.sigmoid()).mean()

    def rebuild_all(step: int, session: ssdtrain.Session) -> None:
        profile = session.profile
        if step == 3:
            assert profile is not None
            owned = [i.owner for items in profile.kinds.values() for i in items]
            assert max(owned) >= 0
            timeline = Timeline(profile)
            placements = {
                kind: [options(timeline, item)[-1] for item in items]
                for kind, items in profile.kinds.items()
            }
            orders = schedule(timeline, placements, Style())
            session.follow(Plan(orders=orders, policy="rebuilt"))
        if step == refused_at:
            monkeypatch.setattr(Rebuilder, "_find", lambda *args: None)
            if step == 3:  # nor does what the observed step found hold
                monkeypatch.setattr(Rebuilder, "_asked_again", lambda *args: None)

    theirs, _, _ = train(None, num_steps=7, build=CastingEarly)
    ours, reports, _ = train(
        SETTINGS, num_steps=7, build=CastingEarly, hook=rebuild_all
    )
    assert equal(ours, theirs)
    assert (reports[4].bytes_recomputed > 0) == (refused_at == 5)
    # Generators move on: a mask's recipe is found anew at every pack.
    answered = {k: v for k, v in reports[4].recipes.items() if k != "dropout mask"}
    for report in reports[refused_at:]:
        assert report.recipes == answered
        assert Fallback.PLAN_MISMATCH.value not in report.fallbacks


def test_a_plan_of_another_model_is_left_and_counted(tmp_path: Path) -> None:
    _, _, (plan, _) = train(SETTINGS)
    path = tmp_path / "plan.json"
    PLAN_FILE.write(path, plan)
    settings = {**SETTINGS, "plan": str(path)}
    theirs, _, _ = train(None, rows=lambda step: 5 * ROWS)
    ours, reports, _ = train(settings, rows=lambda step: 5 * ROWS)
    assert equal(ours, theirs)
    assert reports[-1].fallbacks[Fallback.PLAN_MISMATCH.value] == 1


@pytest.mark.parametrize(("factor", "is_observed"), [(2, False), (5, True)])
def test_longer_sequences(factor: int, is_observed: bool) -> None:
    """Up to four times the tokens are the same plan's; more are planned again."""

    num_short = 14  # a step is observed again before: the clock is not the plan's

    def rows(step: int) -> int:
        return ROWS if step < num_short else factor * ROWS

    theirs, _, _ = train(None, num_steps=20, rows=rows)
    ours, reports, (plan, profile) = train(SETTINGS, num_steps=20, rows=rows)
    assert equal(ours, theirs)
    mismatches = reports[num_short].fallbacks.get(Fallback.PLAN_MISMATCH.value, 0)
    assert mismatches == is_observed
    assert (reports[num_short].num_resized > 0) == (not is_observed)
    assert not reports[-1].fallbacks
    observed = factor * ROWS if is_observed else ROWS
    largest = max(item.num_bytes for item in profile.kinds["model/0"])
    assert largest == observed * 2 * WIDTH * 4
    scale = 1 if is_observed else factor
    assert reports[-1].saved_peak_bytes == scale * plan.prediction.peak_bytes


def test_another_number_of_micro_batches_follows_the_same_plan() -> None:
    _, reports, _ = train(SETTINGS, num_steps=4)
    assert not reports[-1].fallbacks
    ours, reports, (plan, _) = train(SETTINGS, num_steps=4, num_micro_batches=4)
    theirs, _, _ = train(None, num_steps=4, num_micro_batches=4)
    assert equal(ours, theirs)
    assert reports[-1].saved_peak_bytes == plan.prediction.peak_bytes


def test_a_budget_is_kept_and_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reports, _ = train(KEPT)
    keep = reports[-1].saved_peak_bytes
    budget = int(0.6 * keep)
    _, reports, _ = train({**SETTINGS, "memory_budget_bytes": budget})
    assert reports[-1].saved_peak_bytes <= budget
    _, reports, (plan, _) = train({**SETTINGS, "memory_budget_bytes": 2 * keep})
    assert plan.policy == "keep-all"
    assert reports[-1].bytes_kept == reports[-1].bytes_saved
    with pytest.raises(ConfigError, match="least reachable peak"):
        train({**SETTINGS, "memory_budget_bytes": 1000})


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Search]:
    """Plans are searched for beside training, as on a GPU: the searches so far."""
    found: list[Search] = []

    class Known(Search):
        def __init__(self, request: Request) -> None:
            super().__init__(request)
            found.append(self)

    monkeypatch.setattr(CpuDevice, "runs_beside", True)
    monkeypatch.setattr(searching, "Search", Known)
    return found


def await_search(searches: list[Search], at: int) -> Hook:
    """Before this step and all behind it: it takes as long as it takes."""

    def wait(step: int, session: ssdtrain.Session) -> None:
        if step >= at:
            assert searches
            await_what_runs_beside(searches, session)

    return wait


@pytest.mark.parametrize("budget", [None, 0.6])
def test_a_plan_that_is_searched_for_beside_training(
    budget: float | None, searches: list[Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps of half a millisecond are as long as the host has it: none disappoints.
    monkeypatch.setattr(trials, "WRONG", float("inf"))
    settings, limit = SETTINGS, None
    if budget is not None:
        _, reports, _ = train(KEPT)
        limit = int(budget * reports[-1].saved_peak_bytes)
        settings = {**SETTINGS, "memory_budget_bytes": limit}
    wait, settled = await_search(searches, 5), []

    def hook(step: int, session: ssdtrain.Session) -> None:
        settled.append(session.is_settled)
        wait(step, session)

    ours, _, (plan, profile) = train(settings, num_steps=20, hook=hook)
    theirs, _, _ = train(None, num_steps=20)
    assert equal(ours, theirs)
    goal = Goal(max_overhead=1.0, memory_budget_bytes=limit)
    assert plan.orders == choose(profile, goal, SEARCH_MARKS).orders
    assert not any(settled[:5]) and settled[-1]


def test_the_search_tells_that_no_plan_reaches_the_goal(searches: list[Search]) -> None:
    settings = {**SETTINGS, "memory_budget_bytes": 1000}
    with pytest.raises(ConfigError, match="least reachable peak"):
        train(settings, num_steps=8, hook=await_search(searches, 4))
