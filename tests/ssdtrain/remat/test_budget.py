"""Which recipes fit in the overhead: [Note: recipe budget]."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain import api
from ssdtrain.counters import Fallback
from ssdtrain.remat import budget as budgets
from ssdtrain.remat.budget import NoBudget, OverheadBudget, Span

GELU = Span("gelu", "a", 400, 0.4)
MASK = Span("mask", "b", 50, 0.25)
ATTENTION = Span("attention", "c", 100, 0.6)


def observed(max_overhead: float, *steps: tuple[float, list[Span]]) -> OverheadBudget:
    budget = OverheadBudget(max_overhead)
    for step_ms, spans in steps:
        budget.observe(step_ms, spans)
    return budget


def allowed(budget: OverheadBudget) -> str:
    return "".join(place for place in "abc" if budget.allows(place))


@pytest.mark.parametrize(
    ("overhead", "expected"),
    [(0.0, ""), (0.003, "b"), (0.005, "a"), (0.008, "ab"), (0.015, "abc")],
)
def test_cheapest_bytes_first(overhead: float, expected: str) -> None:
    """100 ms without recipes; 85 % of the overhead is theirs."""
    step = (101.25, [GELU, MASK, ATTENTION])
    assert allowed(observed(overhead, step, step)) == expected


def test_everything_is_measured_before_anything_is_dropped() -> None:
    slow_first = (900.0, [Span("gelu", "a", 400, 90.0)])
    budget = observed(0.01, slow_first)
    assert allowed(budget) == "abc"
    budget.observe(100.4, [GELU])
    assert allowed(budget) == "abc"
    budget = observed(0.01, slow_first, slow_first)
    assert allowed(budget) == "bc"


def test_lanes_of_one_name_add_up() -> None:
    two = (101.0, [GELU, GELU])
    assert allowed(observed(0.008, two, two)) == "bc"
    assert allowed(observed(0.01, two, two)) == "abc"


def test_watching_ends() -> None:
    budget = OverheadBudget(0.01)
    going_on = [budget.observe(100.0, [GELU]) for _ in range(budgets.NUM_WATCHED_STEPS)]
    assert going_on == [True] * (budgets.NUM_WATCHED_STEPS - 1) + [False]
    assert not NoBudget().observe(1.0, [])


class Net(nn.Module):
    """Two GELUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.first(x))
        return self.last(F.gelu(self.last(y))).sum()


@pytest.mark.parametrize("overhead", [0.0, 1e9])
def test_session_within_a_budget(
    monkeypatch: pytest.MonkeyPatch, overhead: float
) -> None:
    """With no time for any, every recipe is measured and then stored, and counted."""
    monkeypatch.setattr(api, "NoBudget", lambda: OverheadBudget(overhead))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings: dict[str, Any] = {"target": "host", "plan": "keep-all", "min_bytes": 0}
    with ssdtrain.offload(net, **settings) as session:
        for _ in range(4):
            net(torch.randn(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    used = [len(report.recipes) for report in session.steps]
    skipped = [
        report.fallbacks.get(Fallback.RECIPE_TOO_SLOW.value, 0)
        for report in session.steps
    ]
    if overhead:
        assert (used, skipped) == ([1, 1, 1, 1], [0, 0, 0, 0])
    else:
        assert (used, skipped) == ([1, 1, 0, 0], [0, 0, 2, 2])
