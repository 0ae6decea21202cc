"""Searches against measurements on two ranks: small ones, on a CPU."""

import json
from pathlib import Path

import pytest

from recipes.bench.harness.cli import run
from recipes.bench.search import layout_regret, table_regret
from ssdtrain.plan.goal import DEVICE_RESERVE
from ssdtrain.tools.foresight.device import load_device

RESULTS_OF_LAYOUTS = (
    Path(layout_regret.__file__).parent.parent / "results/search/layout_regret.json"
)


def test_what_a_choice_of_tables_loses() -> None:
    """The choice is a rule's; what is best may be a random placement."""
    actual = {"naive": 12.0, "size": 11.0, "random 1": 10.0}
    found = table_regret.summary(actual, {"naive": 9.0, "size": 8.0, "random 1": 1.0})
    assert (found["chosen"], found["best"]) == ("size", "random 1")
    assert found["regret"] == pytest.approx(0.1)
    assert found["regret_naive"] == pytest.approx(0.2)


def test_placements_have_room() -> None:
    tables, _ = table_regret.task_of(0, 2, small=True)
    largest = 4.0 * sum(table.rows * table.width for table in tables)
    found = table_regret.placements(tables, 2, 3, largest)
    assert len(found) == 6 + 3
    assert not table_regret.placements(tables, 2, 3, largest / 2 - 1)


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
@pytest.mark.parametrize(("name", "least", "most"), [("4B", 0, 1), ("ViT", -1, 0)])
def test_peaks_that_two_h200s_measured(name: str, least: int, most: int) -> None:
    """In percent; the last rows are what a session asked for instead of less."""
    record = RESULTS_OF_LAYOUTS.read_text(encoding="utf-8")
    cells = json.loads(record)["cells"]
    context = load_device("h200").context_bytes
    compared = 0
    for at, price in layout_regret.predicted(name, False, "h200").items():
        row = cells.get(f"{name}: {at}", {})
        if "bytes" in row and "ssdtrain" not in at:
            error = (price.memory_bytes + context) / row["bytes"] - 1
            assert least <= 100 * error + 0.4 and 100 * error - 0.4 <= most, (at, error)
            compared += 1
        elif "error" in row:
            asked = int(row["error"].split("at least ")[1].split(",")[0])
            used = asked * (1 - DEVICE_RESERVE)
            assert price.memory_bytes + context > 0.965 * used, at
    assert compared >= 4


@pytest.mark.slow
def test_two_ranks_measure_layouts(tmp_path: Path) -> None:
    """First: the process that ranks are forked from imports what these need."""
    out = tmp_path / "found.json"
    words = ["search.layout_regret", "--device", "cpu", "--small", "--out", str(out)]
    names = ["4B: sequence, plain", "ViT: ZeRO-3, ssdtrain 3"]
    assert run([*words, "--only", *names]) == 1  # the others are missing
    cells = json.loads(out.read_text())["cells"]
    assert sorted(cells) == names
    for row in cells.values():
        assert row["ms"] > 0 and row["predicted_ms"] > 0, row


@pytest.mark.slow
def test_two_ranks_measure_tables(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["search.table_regret", "--device", "cpu", "--small", "--out", str(out)]
    assert run([*words, "--tasks", "1", "--others", "1"]) == 0
    [row] = json.loads(out.read_text())["cells"].values()
    assert len(row["us"]) == 7 and row["us"][row["best"]][0] > 0
