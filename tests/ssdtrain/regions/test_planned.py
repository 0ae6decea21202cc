"""Regions under a plan: what is predicted is what is metered; the safe start."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache import regions as in_cache
from ssdtrain.counters import Fallback
from ssdtrain.observe import observation
from ssdtrain.observe.measured import NUM_REGION_STEPS
from ssdtrain.plan.choose import options
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import PLAN_FILE, Plan
from ssdtrain.plan.profile import PROFILE_FILE
from ssdtrain.plan.regions import spread, with_regions
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.regions import attention
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.metered import Meter
from tests.ssdtrain.cache.test_peak import (
    LOSS_BYTES,
    ROWS,
    START,
    WIDTH,
    Block,
    Holding,
    net,
    step,
)
from tests.ssdtrain.plan.profiles import links
from tests.ssdtrain.virtual_time import VirtualTime

SETTINGS: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 0,
    "plan": "auto",
}
# A meter is a dispatch mode; it sees the re-run, which runs in the same thread.
TOLERANCE = 0.005
NUM_STEPS = 2 + NUM_REGION_STEPS + 2
"""A warm-up, the observed step, those of regions; two under a plan."""


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch, virtual_time: VirtualTime) -> Meter:
    found = Meter()
    found.install(monkeypatch)
    monkeypatch.setattr(in_cache, "modes_stand", lambda: False)
    monkeypatch.setattr(attention, "OTHERS_STAND", lambda: 0)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1)
    return found


@pytest.mark.parametrize("block", [Block, Holding])
def test_the_peak_of_any_plan_with_regions_is_predicted(
    block: type[Block], meter: Meter, tmp_path: Any
) -> None:
    draw = random.Random(1)
    model, x = net(START, block), torch.randn(ROWS, WIDTH, requires_grad=True)
    with ssdtrain.offload(model, **{**SETTINGS, "max_overhead": 1.0}) as session, meter:
        for _ in range(4):
            step(model, x, meter)
        profile = session.profile
        assert profile is not None and len(profile.regions["model/0"]) == 3
        assert all(len(run.parts) == 1 for run in profile.regions["model/0"])
        PROFILE_FILE.write(tmp_path / "profile.json", profile)
        assert PROFILE_FILE.read(tmp_path / "profile.json") == profile
        timeline = Timeline(profile)
        for number in range(8):
            every = spread(timeline)
            chosen = draw.sample(every, draw.randint(0, len(every)))
            storing = draw.sample(chosen, draw.randint(0, len(chosen)))
            placements = with_regions(
                timeline,
                {
                    kind: [draw.choice(options(timeline, item)) for item in items]
                    for kind, items in profile.kinds.items()
                },
                chosen,
                storing,
            )
            window = draw.choice([None, 1 << 18, 1 << 20])
            orders = schedule(timeline, placements, Style(window_bytes=window))
            plan = Plan(orders=orders, policy="random")
            PLAN_FILE.write(tmp_path / "plan.json", plan)
            assert PLAN_FILE.read(tmp_path / "plan.json") == plan
            session.follow(plan)
            peaks = [step(model, x, meter) for _ in range(3)]
            last = session.last_step
            assert last is not None and not last.fallbacks, number
            assert bool(last.recipes.get("region")) == bool(chosen)
            predicted = simulate(timeline, orders).peak_bytes
            both = LOSS_BYTES if block is Holding else 0
            low, high = (1 - TOLERANCE) * peaks[-1], (1 + TOLERANCE) * peaks[-1] + both
            assert low < predicted < high, (number, chosen, predicted, peaks)


def test_the_first_steps_need_what_checkpointing_with_moved_inputs_needs(
    meter: Meter,
) -> None:
    """Also with host memory that holds no more than the inputs."""
    peaks = {}
    for recompute in ("regions", "auto", "off"):
        model, x = net(START), torch.randn(ROWS, WIDTH, requires_grad=True)
        first = "offload-all" if recompute == "regions" else "auto"
        settings = {**SETTINGS, "plan": first, "recompute": recompute}
        with ssdtrain.offload(model, **settings, window_bytes=1) as session, meter:
            # Up to the observed step.
            peaks[recompute] = max(step(model, x, meter) for _ in range(2))
            moved = session.steps[0].bytes_offloaded
        assert recompute == "off" or moved <= 5 * x.nbytes
    assert peaks["auto"] <= 1.02 * peaks["regions"]


@pytest.mark.usefixtures("virtual_time")
def test_a_budget_that_moves_cannot_meet_is_met_by_regions() -> None:
    """On a link that is no use."""
    torch.manual_seed(0)
    model = nn.Sequential(START, *(Block() for _ in range(6)))
    x = torch.randn(ROWS, WIDTH)
    results = []
    for ours in (False, True):
        own = copy.deepcopy(model)
        torch.manual_seed(1)
        settings = {**SETTINGS, "recompute": "regions"}
        session = ssdtrain.offload(own, **settings) if ours else None
        found = []
        for _ in range(NUM_STEPS):
            own(x).square().mean().backward()
            with torch.no_grad():
                for p in own.parameters():
                    assert p.grad is not None
                    found.append(p.grad.clone())
                    p -= 0.1 * p.grad
                    p.grad = None
        results.append(found)
        if session is not None:
            assert session.plan is not None
            assert session.plan.bytes_by_placement()["rerun"] > 0
            last = session.last_step
            assert last is not None and not last.fallbacks
            assert last.recipes["region"] > 0
            session.close()
    assert same_bits(*results)


class Rotary(nn.Module):
    """Attention's rotation: all blocks are given the same tables, and save them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = START, nn.ModuleList(Turned() for _ in range(3))
        self.speeds = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, table = self.first(x), torch.arange(ROWS).unsqueeze(1) * self.speeds
        for block in self.blocks:
            x = block(x, tables=(table.cos(), table.sin()))
        return x


class Turned(Block):
    """Its first tensor is not its input, and the tables are saved as views."""

    def forward(self, x: Tensor, tables: Any = None) -> Tensor:  # type: ignore[override]
        q = self.proj(torch.sigmoid(x))
        cos, sin = (each.unsqueeze(0) for each in tables)
        return super().forward((q * cos + q.flip(-1) * sin).squeeze(0))


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_shared_inputs_keep_their_place_in_a_plan(share: float, meter: Meter) -> None:
    """Where the region that stores them first is not chosen, they come later."""
    torch.manual_seed(0)
    model, x = Rotary(), torch.randn(ROWS, WIDTH, requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with ssdtrain.offload(model, **SETTINGS, recompute="off") as plain, meter:
        for _ in range(3):
            step(model, x, meter)
    assert plain.plan is not None and plain.plan.prediction is not None
    budget = int(share * plain.plan.prediction.keep_peak_bytes)
    settings = {**SETTINGS, "memory_budget_bytes": budget}
    with ssdtrain.offload(model, **settings) as session, meter:
        for _ in range(7):
            step(model, x, meter)
        timeline = Timeline(session.profile)  # type: ignore[arg-type]
        for chosen in ([], spread(timeline)[:1], spread(timeline)[1:]):
            keep = {
                kind: [Placement.KEEP for _ in items]
                for kind, items in timeline.profile.kinds.items()
            }
            orders = schedule(timeline, with_regions(timeline, keep, chosen))
            session.follow(Plan(orders=orders, policy="some"))
            for _ in range(2):
                step(model, x, meter)
        assert not any(
            Fallback.PLAN_MISMATCH.value in report.fallbacks for report in session.steps
        )


class Counting(nn.Module):
    """Counts its calls, from a moment on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.number = 0
        self.counts = True

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.number += 1
        return x + self.down(torch.sigmoid(self.up(torch.tanh(x))))


def counting_steps(
    first: int, num_steps: int, **options: Any
) -> tuple[int, list[ssdtrain.StepReport]]:
    """Train under half of what all saves; layers count from this step on. Return the
    budget and a report a step."""
    torch.manual_seed(0)
    model = nn.Sequential(START, *(Counting() for _ in range(4)))
    layers = [layer for layer in model if isinstance(layer, Counting)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {**SETTINGS, "plan": "keep-all", "recompute": "off", "verify": "checksum"}
    x = torch.randn(ROWS, WIDTH)
    with ssdtrain.offload(model, **kept) as session:
        model(x).square().mean().backward()
        budget = session.steps[0].saved_peak_bytes // 2
    settings = {**SETTINGS, "memory_budget_bytes": budget, "window_bytes": 1, **options}
    with ssdtrain.offload(model, **settings) as session:
        for number in range(num_steps):
            for layer in layers:
                layer.counts = number >= first
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return budget, list(session.steps)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, virtual_time: VirtualTime) -> None:
    """Memory has an end: all regions run again in the first steps. Links are so slow
    that no plan moves a tensor in time."""
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1)
    monkeypatch.setattr(observation, "fitted_links", lambda *measured: links(0.01))


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("recompute", ["auto", "regions"])
def test_no_plan_counts_on_a_region_that_turned_out_to_have_side_effects(
    recompute: str,
) -> None:
    """Nothing is known of it before its forward has ended, in the observed step too."""
    budget, reports = counting_steps(0, 2 + NUM_REGION_STEPS + 4, recompute=recompute)
    assert Fallback.NO_REGION.value in reports[1].fallbacks
    for report in reports[-4:]:
        assert report.saved_peak_bytes <= budget
        assert Fallback.PLAN_MISMATCH.value not in report.fallbacks


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_a_plan_whose_regions_are_refused_later_is_made_anew(verify: str) -> None:
    first = 2 + NUM_REGION_STEPS + 2
    options = {"recompute": "regions", "verify": verify}
    budget, reports = counting_steps(first, first + 8, **options)
    assert reports[first - 1].recipes["region"] > 0
    assert reports[first - 1].saved_peak_bytes <= budget
    refused = reports[first : first + 5]
    assert any(Fallback.PLAN_MISMATCH.value in each.fallbacks for each in refused)
    for report in reports[first + 6 :]:
        assert report.saved_peak_bytes <= budget
        assert Fallback.PLAN_MISMATCH.value not in report.fallbacks


class Reader(nn.Module):
    """A layer that reads what all of them read, as a decoder's cross attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        return x + torch.tanh(self.own(x) + self.shared(states))


class Readers(nn.Module):
    """An encoder that ends in a norm, and layers that read its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Reader() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        states = self.norm(x)
        for layer in self.layers:
            x = layer(x, states)
        return x.square().mean()


def test_a_shared_input_that_a_recipe_makes_is_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd saves it as well where no region runs again: a plan that took it for
    the regions' alone predicted less than steps held."""
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    model, x = Readers(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def one() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    with ssdtrain.offload(model, **SETTINGS) as session:
        for _ in range(4):
            one()
        profile = session.profile
        assert profile is not None
        (kind,) = profile.lanes
        _, shared = profile.regions[kind][1].inputs
        item = profile.kinds[kind][shared]
        assert item.recipe == "NativeLayerNormBackward0"
        assert item.serves < 0 and item.floats
        timeline = Timeline(profile)
        placed = [Placement.KEEP] * len(profile.kinds[kind])
        placed[shared] = Placement.RECOMPUTE
        orders = schedule(timeline, {kind: placed})
        session.follow(Plan(orders=orders, policy="by hand"))
        for _ in range(3):
            one()
        last = session.last_step
        assert last is not None and not last.fallbacks
        assert last.recipes == {"NativeLayerNormBackward0": item.num_bytes}
        assert last.saved_peak_bytes == simulate(timeline, orders).peak_bytes
