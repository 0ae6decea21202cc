"""The tables and the chart of the model benchmark, from a small file."""

from typing import Any

from recipes.bench.offload.tables import rivals
from tests.recipes.written import data_of


def data(cells: dict[str, object]) -> dict[str, Any]:
    return data_of(cells, precision="fp16", optimizer="sgd")


def cell(ratio: float, peak: float, equal: bool = True) -> dict[str, object]:
    return {
        "step_ms": 100 * ratio,
        "peak_gb": 20 * peak,
        "step_ratio": ratio,
        "peak_ratio": peak,
        "losses_equal": equal,
        "losses": [2.0, 1.0 if equal else 1.5],
    }


CELLS = {
    "link": {"d2h_gb_per_s": 50},
    "bert 8x4/keep": cell(1, 1),
    "bert 8x4/offloaded": cell(1.01, 0.55),
    "bert 8x4/ssd": {"error": "no drive"},
}


def test_what_did_not_run_is_said() -> None:
    text = rivals(data(CELLS))
    assert "ssd (no drive)" in text
    assert "| offloaded | 1.010x, 11.00 GB |" in text
