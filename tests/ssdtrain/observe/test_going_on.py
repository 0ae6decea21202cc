"""A session that goes on with the plan of an earlier run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.observe.memorygoal import MemoryGoal
from tests.ssdtrain.observe.test_planner import SETTINGS, WIDTH, Net, equal, train

BUDGET_BYTES = 1 << 16
pytestmark = pytest.mark.usefixtures("virtual_time")


def test_an_earlier_runs_plan_is_followed_from_the_first_step() -> None:
    """With its profile; and steps of another size are observed and planned for."""
    _, _, (plan, profile) = train(SETTINGS)
    settled: list[bool] = []

    def goes_on(step: int, session: ssdtrain.Session) -> None:
        if step == 0:
            session.follow(plan, profile)
        settled.append(session.is_settled)

    theirs, _, _ = train(None)
    ours, reports, (followed, _) = train(SETTINGS, hook=goes_on)
    assert equal(ours, theirs)
    assert followed.orders == plan.orders
    assert settled[1:] == [True] * 4
    predicted = plan.prediction.peak_bytes
    assert [report.saved_peak_bytes for report in reports] == [predicted] * 5

    class Deeper(Net):
        def __init__(self) -> None:
            super().__init__(4)

    theirs, _, _ = train(None, build=Deeper, num_steps=8)
    ours, reports, (other, _) = train(SETTINGS, build=Deeper, hook=goes_on, num_steps=8)
    assert equal(ours, theirs)
    assert len(other.orders["model/0"]) > len(plan.orders["model/0"])
    assert reports[-1].saved_peak_bytes == other.prediction.peak_bytes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.sin(self.up(x)))
        return result


class Layered(Net):
    """Its layers run again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.loss(x)


def test_ranks_that_meet_in_regions_keep_the_plan_that_all_follow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond their limit as well: they have agreed on no step, and one that ran other
    regions again would wait for the others forever."""
    budget = {"recompute": "regions", "memory_budget_bytes": BUDGET_BYTES}
    settings: dict[str, Any] = {**SETTINGS, **budget}
    del settings["max_overhead"]
    _, _, (plan, profile) = train(settings, build=Layered, num_steps=16)
    meeting = replace(
        profile,
        regions={
            kind: tuple(replace(run, communicates=True) for run in runs)
            for kind, runs in profile.regions.items()
        },
    )
    monkeypatch.setattr(MemoryGoal, "over_bytes", lambda *_: BUDGET_BYTES // 5)
    for seen, stays in (meeting, True), (profile, False):

        def goes_on(step: int, session: ssdtrain.Session, seen: Any = seen) -> None:
            if step == 0:
                session.follow(plan, seen)

        caplog.clear()
        train(settings, build=Layered, hook=goes_on)
        searches = "cannot be reached" in caplog.text
        assert seen.communicates == stays == (not searches)
