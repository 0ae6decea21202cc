"""Searches against measurements on two ranks: small ones, on a CPU."""

import json
from pathlib import Path

import pytest

from recipes.bench.harness.cli import run
from recipes.bench.search import layout_regret


def test_how_predictions_of_layouts_hold() -> None:
    rows = {
        "a": {"ms": 10.0, "predicted_ms": 7.0, "bytes": 100, "predicted_bytes": 103},
        "b": {"ms": 11.0, "predicted_ms": 6.0, "bytes": 100, "predicted_bytes": 98},
        "c": {"ms": 20.0, "predicted_ms": 9.0, "bytes": 100, "predicted_bytes": 100},
    }
    found = layout_regret.summary(rows)
    assert found["regret"] == pytest.approx(0.1)
    assert found["rank_correlation"] == pytest.approx(0.5)
    assert layout_regret.correlation([1.0, 1.0, 2.0], [3.0, 4.0, 5.0]) == pytest.approx(
        3**0.5 / 2
    )
    assert found["worst_peak_error"] == pytest.approx(0.03)


@pytest.mark.parametrize("name", layout_regret.SUBJECTS)
def test_at_least_six_layouts_of_each_model(name: str) -> None:
    for subjects in (layout_regret.SUBJECTS, layout_regret.SMALL):
        assert len(layout_regret.layouts_of(subjects[name])) >= 6


@pytest.mark.slow
def test_two_ranks_measure_layouts(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["search.layout_regret", "--device", "cpu", "--small", "--out", str(out)]
    names = ["4B: sequence, plain", "ViT: ZeRO-3, ssdtrain 3"]
    assert run([*words, "--only", *names]) == 1  # the others are missing
    cells = json.loads(out.read_text())["cells"]
    assert sorted(cells) == names
    for row in cells.values():
        assert row["ms"] > 0 and row["predicted_ms"] > 0, row
