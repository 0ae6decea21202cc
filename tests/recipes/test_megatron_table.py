"""The table of the Megatron benchmark, from a small file."""

from typing import Any

from recipes.bench.megatron.tables import megatron, scale
from tests.recipes.written import data_of

ONE = {"peak_gb": [10.0]}
CELLS: dict[str, Any] = {
    "law/gpt/tp2/256x4": {"host_equal": True, "ssd_equal": True},
    "bert/tp2/8x4/keep": {"step_ms": 200.0, "peak_gb": [20.0, 20.1]},
    "bert/tp2/8x4/ours auto": {"step_ms": 201.0, "peak_gb": [8.0, 8.0]},
    "bert/tp2/8x4/full recompute": {
        "error": "rank 0: Traceback:\n  in forward\n out of memory\n | rank 1: also"
    },
    "gpt/tp2/8x4/keep": {"step_ms": 100.0, **ONE, "step_times": [[90.0, 100.0, 110.0]]},
    "gpt/tp2/8x4/keep 2": {"step_ms": 100.0, **ONE, "step_times": [[100.0] * 3]},
    "gpt/tp2/8x4/ours auto": {
        "step_ms": 130.0,
        "peak_gb": [4.0],
        "step_times": [[100.0, 130.0, 140.0]],
    },
    "gpt/tp2/8x4/ours auto 2": {
        "step_ms": 102.0,
        "peak_gb": [5.0],
        "step_times": [[102.0, 102.0, 102.0]],
    },
    "bert/tp2/8x4/estimate": {
        "offloaded_gib": [11.2, 11.2],
        "estimate_gib": [11.0, 11.0],
        "source_gib": [11.13, 11.13],
    },
    "gpt/1f1b/8x4/keep": {"step_ms": 100.0, "peak_gb": [10.0, 7.0]},
    "gpt/1f1b/8x4/ours level": {"step_ms": 101.0, "peak_gb": [7.0, 5.0]},
    "t5/tp2/8x4/keep": {"step_ms": 100.0, **ONE},
    "t5/tp2/8x4/ours at 40 %": {
        "step_ms": 211.0,
        "peak_gb": [4.0, 4.0],
        "step_times": [[211.0], [202.0]],
        "beside": [{"step_times": [200.0]}, {"step_times": [190.0]}],
    },
    "t5/tp2/8x4/ours at 40 % 2": {
        "step_ms": 213.0,
        "peak_gb": [3.9, 3.8],
        "step_times": [[213.0], [202.0]],
        "beside": [{"step_times": [200.0]}, {"step_times": [198.0]}],
    },
}


def test_rows_say_ratio_and_peaks() -> None:
    text = megatron(data_of(CELLS))
    assert "| bert/tp2/8x4 | 1.000x, 20.10 GB | 1.005x, 8.00 GB | - | out" in text
    assert "| - | out of memory | - |" in text
    assert "| gpt/tp2/8x4 | 1.000x, 10.00 GB | 1.020x, 5.00 GB | - | - | - |" in text
    assert "1.000x, 10.00 / 7.00 GB" in text, "every stage has its own peak"
    assert "| - | 1.010x, 7.00 / 5.00 GB | - | - |" in text
    assert "| - | 1.060x, 4.00 GB | - | - |" in text, "over its own run's keep"
    assert "| bert/tp2/8x4 | 11.20 | 11.00 | 11.13 | 1.018 |" in text
    assert "all 1 cells" in text


def test_a_cell_that_is_unequal_is_named() -> None:
    broken = {"law/t5/dp2/256x4": {"host_equal": True, "ssd_equal": False}}
    text = megatron(data_of({**CELLS, **broken}))
    assert "NOT in ['law/t5/dp2/256x4']" in text


def test_what_several_gpus_showed() -> None:
    rank = {"doctor": 50.0, "at once": 45.0, "share": 0.9}
    ways = ("out", "in", "both", "out beside all-reduce", "in beside all-reduce")
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
        "4 ranks/tiering": {"speedup": 1.6, "cells": {}},
    }
    lines = scale(data_of(cells)).splitlines()
    row = "| 4 ranks/megatron tp4 | 100 ms, 9.0 GB | 1.300x, 2.0 GB | 1.240x, 2.0 GB |"
    assert f"{row} 0.954x | - | +24.0%, +1.0% | yes |" in lines
    assert "| 4 ranks/fsdp2 4b | 50 ms, 3.0 GB | - | - | - | - | - | NO |" in lines
    assert "| 4 ranks/links | 0.85 | 0.85 | 0.85 | 0.85 | 0.85 |" in lines
    assert "| 4 ranks/tiering | 1.60x |" in lines
