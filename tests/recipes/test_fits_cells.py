"""Cells that `ssdtrain fits` foretells before they are measured."""

import json
from pathlib import Path
from typing import Any

from recipes.bench.harness.cli import run as bench
from recipes.bench.models.fits_cells import (
    MODES,
    POINTS,
    PREDICTED,
    compared,
    orders,
    told,
)


def test_every_point_has_committed_predictions() -> None:
    foretold = json.loads(PREDICTED.read_text(encoding="utf-8"))["cells"]
    assert list(foretold) == list(POINTS)
    assert len(POINTS) * len(MODES) >= 30
    for by_mode in foretold.values():
        plain, again, some = (by_mode[mode] for mode in MODES)
        assert plain["step_ms"] < some["step_ms"] <= again["step_ms"]
        assert plain["peak_bytes"] > some["peak_bytes"] > again["peak_bytes"]


def cells(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["cells"]
    return found


def test_cells_run_and_a_rerun_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "cells.json"
    given = ["--tiny", "--out", str(out), "--points", "llama-3.2-1b/full/4k"]
    assert bench(["models.fits_cells", *given]) == 0
    found = cells(out)
    assert [name.rpartition("/")[2] for name in found] == list(MODES)
    assert all(cell["step_ms"] > 0 for cell in found.values())
    assert bench(["models.fits_cells", *given]) == 0
    assert cells(out) == found


def cell(ms: float, peak: float) -> dict[str, Any]:
    return {"step_ms": ms, "peak_bytes": peak}


def test_errors_and_orders() -> None:
    measured = {"a/plain": cell(100, 50), "a/checkpointing": cell(120, 20)}
    foretold = {"a": {"plain": cell(95, 51), "checkpointing": cell(90, 20)}}
    rows = list(compared(measured, foretold))
    assert [round(row["step_error"], 3) for row in rows] == [-0.05, -0.25]
    assert [round(row["peak_error"], 3) for row in rows] == [0.02, 0.0]
    assert orders(rows) == (0, 1)
    text = told(rows)
    assert "2 cells; peak within 3 %: 2, worst 2.0 %" in text
    assert "step within 10 %: 1, median 15.0 %, worst 25.0 %" in text
    assert "0 of 1 right" in text
