"""The planner's tables: what they say of known results."""

from typing import Any

import pytest

from recipes.bench.planner import tables
from tests.recipes.written import data_of


@pytest.fixture
def table() -> Any:
    return tables


def target(keep: list[float], auto: list[float]) -> dict[str, Any]:
    plan = {"step_ms": 101.0, "peak_gb": 5.0}
    own = {"step_ms": 102.0, "peak_gb": 5.1, "max_overhead": 0.01, "plan": plan}
    return {
        "8192x4/keep": {"step_ms": 100.0, "peak_gb": 20.0, "losses": keep},
        "8192x4/auto": {**own, "losses": auto},
    }


@pytest.mark.parametrize(
    ("keep", "auto", "equal"),
    [
        ([1.0, 0.9], [1.0, 0.9, 0.8], True),
        ([1.0, 0.9, 0.8], [1.0, 0.9], True),
        ([1.0, 0.9], [1.0, 0.8, 0.8], False),
        ([], [1.0], False),
    ],
)
def test_losses_of_the_shared_steps_are_compared(
    table: Any, keep: list[float], auto: list[float], equal: bool
) -> None:
    text = table.targets(data_of(target(keep, auto)))
    row = next(line for line in text.splitlines() if line.startswith("| 8192x4 |"))
    assert row.endswith(f"1.01x, 7.1 GB | {equal} |")


def plan(predicted_ms: float, step_ms: float, policy: str = "") -> dict[str, Any]:
    return {
        "policy": policy,
        "predicted_ms": predicted_ms,
        "predicted_keep_ms": 100.0,
        "step_ms": step_ms,
        "predicted_peak_bytes": 99,
        "peak_bytes": 100,
    }


def test_overheads_are_right_to_a_quarter_or_a_hundredth(table: Any) -> None:
    keep = plan(100.0, 110.0, "keep-all")
    plans = [keep, plan(150.0, 180.0), plan(101.0, 112.0), plan(120.0, 187.0)]
    found = table.scores(plans)
    assert found["overheads"] == 0.75
    assert found["peak_error"] == pytest.approx(0.01)
    assert found["widest"] == pytest.approx(1.7)


def test_declining_is_told(table: Any) -> None:
    data = data_of({"decline": {"ratio": 1.004}})
    assert "takes 1.004x a plain step" in table.regret(data)


def test_the_rok_says_what_offloading_buys(table: Any) -> None:
    def point(strategy: str, batch: int, peak_gb: float, speed: float) -> Any:
        times = {"forward_ms": 1.0, "backward_ms": 2.0}
        more = {"tokens_per_s": speed, "tflops": speed, "peak_gb": peak_gb}
        return {"strategy": strategy, "batch": batch, **times, **more}

    points = [
        point("keep", 8, 12.0, 99.0),
        point("keep", 16, 24.0, 100.0),
        point("offload", 8, 5.0, 98.5),
        point("offload", 16, 9.0, 99.8),
        point("offload", 48, 24.0, 104.0),
        point("recompute", 48, 30.0, 80.0),
    ]
    cells = {f"m/{p['strategy']}/{p['batch']}": p for p in points}
    text = table.rok(data_of(cells, memory_gb=40))
    assert "up to 3.0 times keep's batch" in text
    assert "runs at 0.995x keep's throughput" in text
    assert "at its largest (48) at 1.30x recomputing's at its largest (48)" in text
