"""The tables and the chart of the model benchmark, from a small file."""

from typing import Any

from recipes.bench.models import tables as models_table
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


def test_a_row_says_keep_ours_and_the_cut() -> None:
    text = models_table.models(data(CELLS))
    row = "| bert 8x4 | 100 ms, 20.00 GB | 1.010x, 11.00 GB | 45% | - | - |"
    assert row in text
    assert "equal those of `keep` to the last bit" in text


def test_unequal_losses_are_said() -> None:
    cells = {**CELLS, "bert 8x4/offloaded": cell(1.0, 0.5, equal=False)}
    text = models_table.models(data(cells))
    assert "the first step's in none of them" in text
    assert "not run a second time" in text
    again = {**cells, "bert 8x4/keep again": cell(1, 1, equal=False)}
    assert "itself differs in bert 8x4" in models_table.models(data(again))


def test_what_did_not_run_is_said() -> None:
    text = rivals(data(CELLS))
    assert "ssd (no drive)" in text
    assert "| offloaded | 1.010x, 11.00 GB |" in text


def test_captured_steps_are_told_over_the_plain_graph() -> None:
    row = {
        "step_ratio": 1.02,
        "eager_ratio": 0.4,
        "pool_gb": 2.0,
        "pool_ratio": 0.5,
        "pinned_gb": 1.0,
        "byte_equal": 50,
        "replays": 50,
    }
    cells = {
        "eager": {"step_ms": 100.0},
        "graph": {"step_ms": 40.0, "pool_gb": 4.0},
        "default": row,
        "budget": {**row, "graph_plan": {"step_ms": 41.0, "keep_ms": 40.0}},
        "all": {"error": "CaptureError: none"},
    }
    found = {
        "environment": {"device": "d", "num_devices": 1, "num_cpus": 2, "versions": {}},
        "settings": {"layers": 28, "tokens": 2048, "budget_share": 0.5},
        "cells": cells,
    }
    text = models_table.graphs(found)
    assert "| default | 1.020x (0.40x of eager) | - | 2.00 GB (50%) |" in text
    assert "| budget | 1.020x (0.40x of eager) | 1.025x | 2.00 GB (50%) |" in text
    assert "| all | CaptureError: none |" in text
    del cells["graph"]
    assert models_table.graphs(found) == ""
