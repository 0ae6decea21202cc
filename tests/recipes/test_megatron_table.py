"""The table of the Megatron benchmark, from a small file."""

from typing import Any

from recipes.bench.megatron.tables import scale
from tests.recipes.written import data_of


def test_what_several_gpus_showed() -> None:
    rank = {"doctor": 50.0, "at once": 45.0, "share": 0.9}
    ways = ("out", "in", "both")
    plans = [
        {"step_predicted": 124.0, "peak_predicted_gb": 1.98},
        {"step_predicted": 100.0, "peak_predicted_gb": 2.0},
    ]
    peaks = {"peak_gb": [2.0, 2.0]}
    layout = {
        "law": {"host_equal": True, "ssd_equal": True},
        "plain": {"step_ms": 100.0, "peak_gb": [9.0, 8.0]},
        "gc": {"step_ms": 130.0, **peaks},
        "=gc": {"step_ms": 124.0, **peaks, "plan": plans},
    }
    cells: dict[str, Any] = {
        "4 ranks/links": {way: [rank, {**rank, "share": 0.85}] for way in ways},
        **{f"4 ranks/megatron tp4/{way}": cell for way, cell in layout.items()},
        "4 ranks/fsdp2 4b/plain": {"step_ms": 50.0, "peak_gb": [3.0]},
        "4 ranks/fsdp2 4b/law": {"equal": False, "host_equal": False},
        "4 ranks/bert 8/estimate": {
            "offloaded_gib": [11.2, 11.1],
            "estimate_gib": [11.0, 11.0],
            "source_gib": [11.13, 11.13],
        },
    }
    lines = scale(data_of(cells)).splitlines()
    row = "| 4 ranks/megatron tp4 | 100 ms, 9.0 GB | 1.300x, 2.0 GB | 1.240x, 2.0 GB |"
    assert f"{row} 0.954x | - | +24.0%, +1.0% | yes |" in lines
    assert "| 4 ranks/fsdp2 4b | 50 ms, 3.0 GB | - | - | - | - | - | NO |" in lines
    assert "| 4 ranks/links | 0.85 | 0.85 | 0.85 |" in lines
    assert "| 4 ranks/bert 8 | 11.20 | 11.00 | 11.13 | 1.018 |" in lines
