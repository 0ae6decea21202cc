"""Cells of the benchmarks: an error is a result, and nothing known is lost."""

import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from recipes.bench.harness import cli
from recipes.bench.harness.cases import CASES
from recipes.bench.harness.cells import NOT_ENDED, Cells
from recipes.bench.harness.processes import answer_of
from tests.ranks import SOON_S


def on_disk(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())["cells"]
    return found


def test_a_failure_is_a_result(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.json", 60.0, {})

    def cell() -> dict[str, object]:
        raise ValueError("no")

    cells.run("one", cell)
    assert cells["one"]["error"] == "ValueError: no"
    assert 'raise ValueError("no")' in "".join(cells["one"]["traceback"])
    assert on_disk(cells.path).keys() == {"one"}


def test_a_cell_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.json", 60.0, {})

    def cell() -> dict[str, object]:
        time.sleep(30)
        return {}

    cells.run("slow", cell, limit_s=0.05)
    assert cells["slow"]["error"].startswith("TimeoutError")
    cells.run("next", lambda: {"ok": True}, limit_s=SOON_S)
    assert cells["next"]["ok"] is True


@pytest.mark.parametrize("ended", [True, False])
def test_what_was_not_ended_is_run_again(tmp_path: Path, ended: bool) -> None:
    cells = Cells(tmp_path / "cells.json", 60.0, {})
    if ended:
        cells.run("one", lambda: {"value": 1})
    else:
        cells.record("one", {"error": NOT_ENDED})
    again = Cells(tmp_path / "cells.json", 60.0, {})
    assert ("one" in again) is ended


@pytest.mark.parametrize("budget_s", [0.05, 60.0])
def test_what_the_end_of_a_run_cut_off_is_run_again(
    tmp_path: Path, budget_s: float
) -> None:
    """Behind its own limit a cell has failed; behind that of all cells it has not."""
    cells = Cells(tmp_path / "cells.json", budget_s, {})
    cells.run("one", lambda: time.sleep(30), limit_s=0.1)  # type: ignore[arg-type, return-value]
    again = Cells(tmp_path / "cells.json", 60.0, {})
    assert ("one" in again) is (budget_s > 1.0)


def test_only_what_is_asked_for_is_run(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells.json", 60.0, {}, only=("one/*", "two/a"))
    for name in ("one/a", "one/b", "two/a", "two/b"):
        cells.run(name, lambda: {"ok": True})
    assert list(on_disk(cells.path)) == ["one/a", "one/b", "two/a"]


def leaves(code: int) -> dict[str, Any]:
    """Ends its process."""
    os._exit(code)


def test_a_process_that_ends_or_takes_too_long_is_a_result() -> None:
    assert answer_of(leaves, (3,), 60) == {"error": "the process ended early, exit 3"}
    found = answer_of(len, ("ab", 1), 60)  # type: ignore[arg-type]
    assert "TypeError" in found["error"] and found["traceback"]
    assert answer_of(leaves, (3,), 0.0) == {"error": "took too long"}


def test_options_are_a_function_s_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []

    def main(
        bench: cli.Bench,
        *,
        way: Literal["up", "down"] = "up",
        sizes: tuple[int, ...] = (1,),
        limit_gb: float | None = None,
        fast: bool = False,
    ) -> None:
        """Do it.

        Args:
            limit_gb: 100 % of it
        """
        if sizes == (0,):
            raise cli.UsageError("no size")
        told.append((bench, way, sizes, limit_gb, fast))

    module = type("Module", (), {"main": staticmethod(main)})
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)
    out = tmp_path / "x.json"
    words = [*"x.y --way down --only a* --budget-s 5 --out".split(), str(out)]
    assert cli.run([*words, "--sizes", "2", "3", "--fast", "--device", "cpu"]) == 0
    [(bench, *others)] = told
    assert (bench.out, bench.budget_s, bench.only) == (out, 5.0, ("a*",))
    assert bench.device.type == "cpu"
    assert others == ["down", (2, 3), None, True]
    for wrong in (
        ["x.y", "--way", "left"],
        ["x.y", "--nonsense"],
        ["x.y", "--sizes", "0"],
    ):
        with pytest.raises(SystemExit):
            cli.run(wrong)
    assert "no size" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.run(["x.y", "--help"])
    assert "100 % of it" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_benchmark_says_what_it_can_be_told(
    case: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run([case.name, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m recipes.bench {case.name}" in capsys.readouterr().out
