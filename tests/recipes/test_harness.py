"""Cells of the benchmarks: an error is a result, and nothing known is lost."""

import json
import time
from pathlib import Path

import pytest

from recipes.bench.common.cells import NOT_ENDED, Cells
from tests.ranks import SOON_S


def on_disk(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())["cells"]
    return found


def test_a_failure_keeps_what_was_noted(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.json", 60.0, {})

    def cell() -> dict[str, object]:
        cells.note("one", {"first": 1})
        assert on_disk(cells.path)["one"] == {"first": 1, "error": NOT_ENDED}
        raise ValueError("no")

    cells.run("one", cell)
    assert cells["one"]["first"] == 1
    assert cells["one"]["error"] == "ValueError: no"
    assert 'raise ValueError("no")' in "".join(cells["one"]["traceback"])


def test_a_cell_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.json", 60.0, {})

    def cell() -> dict[str, object]:
        time.sleep(30)
        return {}

    cells.run("slow", cell, 0.05)
    assert cells["slow"]["error"].startswith("TimeoutError")
    cells.run("next", lambda: {"ok": True}, SOON_S)
    assert cells["next"]["ok"] is True


@pytest.mark.parametrize("ended", [True, False])
def test_what_was_not_ended_is_run_again(tmp_path: Path, ended: bool) -> None:
    cells = Cells(tmp_path / "cells.json", 60.0, {})
    if ended:
        cells.run("one", lambda: {"value": 1})
    else:
        cells.note("one", {"value": 1})
    again = Cells(tmp_path / "cells.json", 60.0, {})
    assert ("one" in again) is ended


@pytest.mark.parametrize("budget_s", [0.05, 60.0])
def test_what_the_end_of_a_run_cut_off_is_run_again(
    tmp_path: Path, budget_s: float
) -> None:
    """Behind its own limit a cell has failed; behind that of all cells it has not."""
    cells = Cells(tmp_path / "cells.json", budget_s, {})
    cells.run("one", lambda: time.sleep(30), 0.1)  # type: ignore[arg-type, return-value]
    again = Cells(tmp_path / "cells.json", 60.0, {})
    assert ("one" in again) is (budget_s > 1.0)
