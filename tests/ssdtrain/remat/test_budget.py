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
from ssdtrain.remat.budget import NoBudget, OverheadBudget, Span, before_peak
from ssdtrain.remat.clock import Clock

GELU = Span("gelu", "a", 400, 0.4)
MASK = Span("mask", "b", 50, 0.25)
ATTENTION = Span("attention", "c", 100, 0.6)


def observed(max_overhead: float, *steps: tuple[float, list[Span]]) -> OverheadBudget:
    budget = OverheadBudget(max_overhead)
    for step_ms, spans in steps:
        budget.observe(step_ms, spans, 0)
    return budget


def measured(max_overhead: float, step_ms: float, spans: list[Span]) -> OverheadBudget:
    return observed(max_overhead, *[(step_ms, spans)] * budgets.NUM_MEASURED_STEPS)


def allowed(budget: OverheadBudget) -> str:
    return "".join(place for place in "abc" if budget.allows(place))


@pytest.mark.parametrize(
    ("overhead", "expected"),
    [(0.0, ""), (0.003, "b"), (0.005, "a"), (0.008, "ab"), (0.015, "abc")],
)
def test_cheapest_bytes_first(overhead: float, expected: str) -> None:
    """100 ms without recipes; most of the overhead is theirs."""
    spans = [GELU, MASK, ATTENTION]
    assert allowed(measured(overhead, 101.25, spans)) == expected


def test_everything_is_measured_before_anything_is_dropped() -> None:
    slow_first = (900.0, [Span("gelu", "a", 400, 90.0)])
    budget = observed(0.01, slow_first)
    assert allowed(budget) == "abc"
    for _ in range(budgets.NUM_MEASURED_STEPS):
        budget.observe(100.4, [GELU], 0)
    assert allowed(budget) == "abc"
    assert allowed(measured(0.01, *slow_first)) == "bc"


def test_lanes_of_one_name_add_up() -> None:
    two = [GELU, GELU]
    assert allowed(measured(0.008, 101.0, two)) == "bc"
    assert allowed(measured(0.01, 101.0, two)) == "abc"


def test_what_is_needed_before_the_peak_is_stored() -> None:
    """Memory is 1000 at the start of backward and 1500 at the peak."""
    spans = [
        Span("cast", "a", 100, 0.1, 1000),
        Span("gelu", "b", 400, 0.4, 1050),
        Span("gelu", "c", 400, 0.4, 1500),
    ]
    assert before_peak(spans, 1500) == {"a"}, "1050 + 100 + 400 is above the peak"
    assert before_peak(spans, 1550) == {"a", "b"}
    assert before_peak(spans, 1000) == set()
    budget = OverheadBudget(1.0)
    for _ in range(budgets.NUM_MEASURED_STEPS):
        assert allowed(budget) == "abc"
        budget.observe(100.0, spans, 1550)
    assert allowed(budget) == "c"
    budget.observe(100.0, spans[2:], 1550)
    assert allowed(budget) == "c", "the choice was made"


def test_watching_ends() -> None:
    budget = OverheadBudget(0.01)
    for _ in range(budgets.NUM_WATCHED_STEPS):
        assert budget.is_watching
        budget.observe(100.0, [GELU], 0)
    assert not budget.is_watching


def test_memory_is_asked_for_a_budget_that_watches_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asking costs the host as much as a saved tensor, at every one of them."""
    asked: list[torch.device] = []

    def allocated(device: torch.device) -> int:
        asked.append(device)
        return 0

    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    clock = Clock(torch.device("cuda", 0))
    clock.watch(NoBudget())
    clock.sample()
    assert asked == [], "a model without recipes would be watched for ever"
    clock.watch(OverheadBudget(0.01))
    clock.sample()
    assert len(asked) == 1


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
        for _ in range(5):
            net(torch.randn(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    used = [len(report.recipes) for report in session.steps]
    skipped = [
        report.fallbacks.get(Fallback.RECIPE_NOT_WORTH.value, 0)
        for report in session.steps
    ]
    if overhead:
        assert (used, skipped) == ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0])
    else:
        assert (used, skipped) == ([1, 1, 1, 0, 0], [0, 0, 0, 2, 2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_what_is_stored_before_the_peak_leaves_it_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blocks() -> nn.Sequential:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)]
        return nn.Sequential(*layers).cuda()

    def peak_and_bytes(overhead: float | None) -> tuple[int, int]:
        limited = OverheadBudget(overhead or 0.0)
        budget = NoBudget() if overhead is None else limited
        monkeypatch.setattr(api, "OverheadBudget", lambda max_overhead: budget)
        net = blocks()
        with ssdtrain.offload(net, target="host", plan="keep-all") as session:
            for _ in range(budgets.NUM_WATCHED_STEPS + 2):
                torch.cuda.reset_peak_memory_stats()
                net(torch.randn(4096, 1024, device="cuda")).sum().backward()
                net.zero_grad()
            report = session.last_step
        assert report is not None
        return torch.cuda.max_memory_allocated(), report.bytes_recomputed

    every, fewer = peak_and_bytes(None), peak_and_bytes(1e9)
    assert fewer[0] <= 1.001 * every[0]
    assert fewer[1] <= every[1]
