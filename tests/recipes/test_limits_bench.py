"""The benchmarks of memory limits, changing lengths and predictions, on a CPU."""

import dataclasses
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from recipes.bench.harness import processes as gpus
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import run as bench
from recipes.bench.harness.processes import answer_of
from recipes.bench.models import fits, grid, lengths, predictions, tables
from recipes.bench.models.real_row import Trainer
from recipes.bench.models.stock import (
    STOCK,
    Case,
    build,
    case_of,
    inputs_of,
    smaller,
)
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.search import Answer
from tests.recipes.written import data_of

CPU = torch.device("cpu")
REAL = [name for name in STOCK if not name.startswith("tiny")]


# -- cases -----------------------------------------------------------------------------


def test_a_case_is_its_name() -> None:
    assert case_of("qwen3-4b:6/lora/2x8k") == Case("qwen3-4b", 6, "lora", 2, 8192)
    assert case_of("qwen3-4b:6/lora/2x8k").is_fused
    assert not case_of("qwen3-4b:6/full/1x8k").is_fused
    assert not case_of("t5-large:8/full/64x1k").is_fused
    for wrong in (
        "qwen4:6/full/1x8k",
        "moe:6/half/1x8k",
        "moe/full/1x8k",
        "moe:6/full",
    ):
        with pytest.raises(ValueError, match="expects"):
            case_of(wrong)


def test_there_are_twenty_cases_and_not_of_one_family() -> None:
    cases = [case_of(name) for name in fits.CASES]
    assert len(set(cases)) == 20
    assert {case.model for case in cases} >= set(REAL) - {"bert-large"}
    assert {case.stock.inputs for case in cases} == {"tokens", "images", "sound"}
    widths = {case.config(tiny=False).hidden_size for case in cases}
    assert len(widths) > 6 and min(widths) >= 1024


@pytest.mark.parametrize("model", REAL)
def test_each_architecture_trains_and_its_layers_are_regions(model: str) -> None:
    """Unmodified; what checkpointing would run again, ours would as well."""
    import ssdtrain

    case = smaller(Case(model, 2, "full", 2, 32))
    net = build(case, CPU, tiny=True)
    given = inputs_of(case, net, CPU)
    with ssdtrain.offload(
        net, max_overhead=0.01, recompute="regions", min_bytes=1
    ) as session:
        net(**given).loss.backward()
        net(**given).loss.backward()
        assert not session.regions_refused
    fits.checkpointed(net)
    assert torch.isfinite(net(**given).loss)


# -- fits ------------------------------------------------------------------------------


def test_fits_runs_all_columns_and_a_rerun_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "fits.json"
    words = ["--device", "cpu", "--tiny", "--seconds", "2", "--out", str(out)]
    words += ["--budget-s", "900", "--most-seconds", "300"]  # on a busy machine
    words += ["--cases", "vit-large:2/full/2x1", "qwen3-4b:2/lora/1x8k"]
    assert bench(["models.fits", *words, "--columns", "ours"]) == 0
    first = json.loads(out.read_text())["cells"]
    assert bench(["models.fits", *words]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == 6 and not [c for c in cells.values() if "error" in c]
    for name, cell in first.items():
        assert cells[name] == cell
    plain = cells["qwen3-4b:2/lora/1x8k/gc"]["losses"]
    own = cells["qwen3-4b:2/lora/1x8k/ours"]
    assert own["losses"] == plain[: len(own["losses"])] and len(plain) == 5
    assert own["num_planned"] > 0 and own["limit_gb"] == 0.0
    told = fits.summary(cells).splitlines()
    assert told[0] == "gc: 2 of 2"
    assert told[1].startswith("ours: 2 of 2 under a plan, 0 unfinished, ")


def test_a_case_without_a_plan_shows_nothing() -> None:
    cells: dict[str, Any] = {
        "a/ours": {"num_planned": 8, "num_steps": 20, "emptied_in": [3, 17]},
        "e/ours": {"num_planned": 8, "num_steps": 20, "emptied_in": [3, 16]},
        "b/ours": {"num_planned": 7},
        "c/ours": {"error": "took too long"},
        "d/ours": {"error": "OutOfMemoryError: x", "num_planned": 9},
    }
    told = "ours: 2 of 3 under a plan, 2 unfinished, 1 whose cache was emptied at last"
    assert told in fits.summary(cells)


def test_the_gpus_of_a_host_share_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert gpus.visible_gpus() == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpus.visible_gpus() == ["0", "1"]
    both = threading.Barrier(2, timeout=60)
    done: list[tuple[str, str]] = []

    def work(name: str, gpu: str) -> None:
        both.wait()  # never more than one on each, and both at once
        done.append((name, gpu))

    gpus.on_gpus(["a", "b"], work, ["3", "5"])
    assert {name for name, _ in done} == {"a", "b"}
    assert {gpu for _, gpu in done} == {"3", "5"}


def test_what_ends_a_step_is_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fits.Run(device="cpu", tiny=True, seconds=5)
    loop = fits.Loop(case_of("qwen3-4b:2/full/1x8k"), run)

    def full() -> None:
        raise torch.OutOfMemoryError("20 MiB are missing")

    monkeypatch.setattr(loop, "step", full)
    found = fits.ours(loop, {}, run)
    assert "OutOfMemoryError: 20 MiB" in found["error"] and found["num_steps"] == 0


def test_ours_is_given_what_checkpointing_reserved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, int | None]] = []

    def answered(work: Any, given: Any, *_: Any) -> dict[str, Any]:
        asked.append((given[1], given[2].limit_bytes))
        return {"reserved_gb": 2.0}

    monkeypatch.setattr(fits, "answer_of", answered)
    cells = Cells(tmp_path / "fits.json", 60.0)
    fits.run_case("a", ["ours"], fits.Run(), cells)
    limit = int(1.03 * 2e9)
    assert asked == [("gc", None), ("ours", limit)]
    assert cells["a/ours"]["limit_gb"] == pytest.approx(2.06)
    assert "limit_gb" not in cells["a/gc"]
    asked.clear()
    fits.run_case("a", ["ours", "ours fit"], fits.Run(), cells)
    assert asked == [("ours fit", limit)]  # the others are known
    asked.clear()
    fits.run_case("b", ["ours"], fits.Run(), Cells(tmp_path / "none.json", 1.0))
    assert not asked  # no time left


@pytest.mark.parametrize("left_s", [0.0, 1.0])
def test_what_the_end_of_all_cases_cut_off_is_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_s: float
) -> None:
    cells = Cells(tmp_path / "fits.json", 60.0)

    def answered(*_: Any) -> dict[str, Any]:
        monkeypatch.setattr(cells, "left_s", lambda: left_s)
        return {"error": fits.TOO_LONG}

    monkeypatch.setattr(fits, "answer_of", answered)
    fits.run_case("a", ["ours"], fits.Run(), cells)
    assert ("a/gc" in cells) is (left_s > 0)


def leaves(code: int) -> dict[str, Any]:
    """Ends its process."""
    import os

    os._exit(code)


def test_a_process_that_ends_or_takes_too_long_is_a_result() -> None:
    assert answer_of(leaves, (3,), 60) == {"error": "the process ended early, exit 3"}
    found = answer_of(len, ("ab", 1), 60)  # type: ignore[arg-type]
    assert "TypeError" in found["error"] and found["traceback"]
    assert answer_of(leaves, (3,), 0.0) == {"error": "took too long"}


def test_the_table_of_fits_counts_what_trained() -> None:
    plain = {"reserved_gb": 10.0, "allocated_gb": 9.0}
    good = {"reserved_gb": 9.5, "num_planned": 8}
    cells = {
        "a/gc": plain,
        "a/ours": good,
        "a/ours fit": {"error": "OutOfMemoryError:\n CUDA | out of memory"},
        "b/gc": plain,
        "b/ours": {**good, "num_planned": 1},
    }
    text = tables.fits(data_of(cells, room=1.03))
    assert "`ours` 1 of 1 (1 unfinished), `ours fit` 0 of 1 trained" in text
    lines = text.splitlines()
    told = "OutOfMemoryError: CUDA / out of memory"
    assert f"| a | 9.0, 10.0 GB | 9.5 GB | {told} |" in lines
    assert "| b | 9.0, 10.0 GB | 9.5 GB, unfinished | - |" in lines


# -- grid ------------------------------------------------------------------------------


def test_all_limits_of_the_grid_leave_its_models_room() -> None:
    assert len(grid.CELLS) == len(set(grid.CELLS)) == 24
    for name in grid.CELLS:
        case, limit = grid.split(name)
        state = (8 if case.tuned == "full" else 2) * grid.num_weights(case, case.layers)
        own = grid.limit_bytes(case, limit)
        assert state < own <= limit * 10**9
        whole = dataclasses.replace(case, layers=grid.WHOLE)
        assert grid.limit_bytes(whole, limit) == limit * 10**9
    assert grid.num_weights(case_of("qwen3-8b:36/lora/1x8k"), 36) == pytest.approx(
        8.19e9, rel=0.01
    )
    with pytest.raises(ValueError, match="CASE@GB"):
        grid.split("qwen3-4b:12/full/1x8k")


def test_a_cell_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(profile: Any, goals: list[Goal], limit_s: float) -> list[Answer]:
        none = Answer(error="none fits")
        return [*(Answer(plan=choose(profile, goal, 1)) for goal in goals[1:]), none]

    monkeypatch.setattr(grid, "searched", searched)
    run = grid.Run(device="cpu", tiny=True, seconds=1, grid=True)
    cell = grid.measure("qwen3-4b:2/full/1x8k@40", run)
    assert "error" not in cell and cell["num_planned"] >= 8
    *planned, last = cell["budgets"].values()
    assert len(planned) == 4 and last["error"] == "none fits"
    assert grid.best_ms(cell) == min(each["step_ms"] for each in planned)


def test_a_grid_has_time_behind_the_steps_that_it_is_compared_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[float] = []

    def answered(work: Any, given: Any, limit_s: float, *_: Any) -> dict[str, Any]:
        limits.append(limit_s)
        return {}

    monkeypatch.setattr(grid, "answer_of", answered)
    words = ["--device", "cpu", "--tiny", "--out", str(tmp_path / "grid.json")]
    words += ["--grid", "1", "--budget-s", "1000", "--most-seconds", "30"]
    assert bench(["models.grid", *words, "--names", *grid.CELLS[:2]]) == 0
    assert sorted(limits) == [90.0, 150.0]


def test_what_became_of_the_cells_of_the_grid() -> None:
    good = {"num_planned": 8, "limit_gb": 40.0, "reserved_gb": 39.0, "step_ms": 103.0}
    grids = {"a": {"step_ms": 100.0}, "b": {"error": "out of memory"}}
    cells: dict[str, Any] = {
        "a": {**good, "budgets": grids},
        "b": {**good, "reserved_gb": 41.0},
        "c": {"error": "ConfigError: 3 bytes", "num_steps": 1},
        "d": {"error": "ConfigError: 3 bytes", "num_steps": 2},
        "e": {"num_planned": 3},
    }
    told = [grid.verdict(cell) for cell in cells.values()]
    assert told == ["fits", "failed", "refused", "failed", "unfinished"]
    lines = grid.summary(cells).splitlines()
    assert lines[0] == "1 fits, 1 refused, 1 unfinished, 2 failed"
    assert lines[1:] == ["a: 1.030 of the grid's best, 100 ms"]


def test_the_table_of_the_grid_has_a_column_for_each_limit() -> None:
    good = {"num_planned": 8, "limit_gb": 13.0, "reserved_gb": 12.5, "step_ms": 103.0}
    short = "ConfigError: device_memory=1 cannot be reached: short by 2500000000 bytes"
    cells = {
        "m:2/full/1x8k@80": {**good, "budgets": {"a": {"step_ms": 100.0}}},
        "m:2/full/1x8k@40": {"error": short, "num_steps": 1},
        "n:2/lora/1x8k@40": {"error": "OutOfMemoryError:\n CUDA | x", "num_steps": 5},
        "n:2/lora/1x8k@80": {**good, "num_planned": 1},
    }
    least = short.replace("by ", "by at least ")
    cells["o:2/full/1x8k@40"] = {"error": least, "num_steps": 0}
    text = tables.grid(data_of(cells))
    assert "1 failed, 1 fits, 2 refused, 1 unfinished" in text
    assert "`m:2/full/1x8k@80` 1.030 of 100 ms" in text
    lines = text.splitlines()
    assert "|  | 40 GB | 80 GB |" in lines
    assert "| m:2/full/1x8k | refused, 2.5 GB | 12.5 of 13.0 GB |" in lines
    assert "| o:2/full/1x8k | refused, 2.5 GB | - |" in lines
    failed = "failed: OutOfMemoryError: CUDA / x"
    assert f"| n:2/lora/1x8k | {failed} | 12.5 of 13.0 GB, unfinished |" in lines


# -- lengths ---------------------------------------------------------------------------


def test_lengths_that_change(tmp_path: Path) -> None:
    out, documents = tmp_path / "lengths.json", tmp_path / "documents.json"
    documents.write_text(json.dumps([30, 12, 5, 60, 22, 17, 9, 40, 33]))
    words = ["--device", "cpu", "--model", "tiny", "--most", "64", "--limit-s", "1"]
    words += ["--documents", str(documents), "--out", str(out)]
    assert bench(["models.lengths", *words]) == 0
    data = json.loads(out.read_text())
    assert list(data["cells"]) == ["constant", "drawn", "packed"]
    for name, cell in data["cells"].items():
        assert cell["planned"] and len(cell["tokens"]) == lengths.NUM_STEPS[name]
        assert len(cell["steps_ms"]) == cell["num_passes"] * len(cell["tokens"])
        assert len(cell["peaks_gb"]) == len(cell["steps_ms"])
    assert set(data["cells"]["constant"]["tokens"]) == {64}
    assert min(data["cells"]["drawn"]["tokens"]) >= 16
    assert "| drawn, " in tables.lengths(data)


def test_traces_that_are_run_alone_have_the_same_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process for each of them, on GPUs beside one another."""
    told: list[Any] = []

    class Fake:
        def __init__(self, model: str, traces: dict[str, list[int]], _: Any) -> None:
            told.append(max(itertools.chain(*traces.values())))

        def trace(self, name: str, *_: Any) -> dict[str, Any]:
            told.append(name)
            return {}

    monkeypatch.setattr(lengths, "Side", Fake)
    path = tmp_path / "lengths.json"
    path.write_text("[10, 20]")
    words = ["--documents", str(path), "--most", "64", "--device", "cpu"]
    words += ["--out", str(tmp_path / "out.json"), "--traces", "packed"]
    assert bench(["models.lengths", *words]) == 0
    assert told == [64, "packed"]


class Timed:
    """A step of so many ms."""

    def __init__(self, ms: float, peak_bytes: int = 0) -> None:
        self.ms = ms
        self.peak_bytes = peak_bytes


def test_a_long_step_is_one_beyond_what_its_length_predicts() -> None:
    trace, plain = [8, 16, 8, 32], [10.0, 20.0, 10.0, 40.0]
    first = [Timed(90), Timed(90), Timed(90), Timed(90, 5 * 10**9)]
    second = [Timed(11), Timed(22, 7 * 10**9), Timed(11), Timed(88)]
    last = [Timed(ms, 10**9) for ms in (11, 22, 11, 44)]
    done: Any = [first, second, last]
    found = lengths.compared(trace, plain, done, 4 * 10**9)
    assert found["ratio"] == pytest.approx(1.1)
    assert found["longest_late"] == pytest.approx(2.0) and found["num_long"] == 1
    assert found["longest_settled"] == pytest.approx(1.0)
    assert (found["peak_gb"], found["settled_peak_gb"]) == (7.0, 1.0)
    assert found["over_budget_at"] == [3, 5]
    found["plain_later_s"] = 1.05 * found["plain_s"]
    assert found["peaks_gb"][3:6] == [5.0, 0.0, 7.0]
    text = tables.lengths(
        data_of({"drawn": found, "packed": {"error": "x"}}, model="m", share=0.5)
    )
    figures = "1.00 | 2.00 | 1 of 12 | 7.00 of 4.00 GB |"
    assert f"| drawn, 8 to 32 | 1.100x | +5.0% | {figures}" in text
    assert "| packed | x | - |" in text
    del found["plain_later_s"]  # as older ones
    text = tables.lengths(
        data_of({"drawn": found, "packed": {"error": "x"}}, model="m", share=0.5)
    )
    assert f"| drawn, 8 to 32 | 1.100x | - | {figures}" in text


def test_a_trace_that_takes_too_long_tells_its_peaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: dict[str, Any] = {}
    step, num_steps = Trainer.step, itertools.count()

    def late(trainer: Trainer, num: int) -> Any:
        if next(num_steps) == 3 + 2 * 4 + 2:  # of the session: the third one
            raise TimeoutError("too late")
        return dataclasses.replace(step(trainer, num), peak_bytes=num * 10**8)

    monkeypatch.setattr(Trainer, "step", late)
    side = lengths.Side("tiny", {"drawn": [16, 8, 16, 8]}, CPU)
    with pytest.raises(TimeoutError):
        side.trace("drawn", 0.75, 1.0, noted.update)
    assert noted["peaks_gb"] == [1.6, 0.8] and noted["over_budget_at"] == [0]
    assert noted["budget_gb"] == 1.2 and noted["plans_at"] == []


# -- predictions -----------------------------------------------------------------------


def test_plans_are_followed_one_after_another(tmp_path: Path) -> None:
    out = tmp_path / "predictions.json"
    words = ["--device", "cpu", "--rows", "tiny/full/32", "--steps", "2"]
    words += ["--limit-s", "60", "--budget-s", "900"]  # on a busy machine
    assert bench(["models.predictions", *words, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    (cell,) = data["cells"].values()
    assert len(cell["plans"]) == len(predictions.GOALS)
    for plan in cell["plans"].values():
        assert "error" not in plan
        assert plan["predicted_ms"] > 0 and plan["step_ms"] > 0
    budgets = [plan for plan in cell["plans"].values() if "budget_gb" in plan]
    assert len(budgets) == 5
    assert all(plan["predicted_gb"] <= plan["budget_gb"] for plan in budgets)
    own, later = cell["plain_ms"], cell["plain_later_ms"]
    text = tables.predictions(data)
    assert "| tiny/full/32 | 6 | " in text
    assert f"| {later / own - 1:+.1%} |" in text


def test_sixty_plans_of_which_fifty_have_budgets() -> None:
    budgets = [name for name, _ in predictions.GOALS if name == "budget"]
    assert len(predictions.ROWS) * len(budgets) == 50
    goals = predictions.goals_of(10**9)
    assert goals["budget 0.85"].memory_budget_bytes == 850_000_000
    assert goals["overhead 0.05"].max_overhead == 0.05


def test_errors_and_budgets_are_counted() -> None:
    plans = [
        {"step_ms": 1, "step_error": -0.02, "whole_error": 0.001},
        {"step_ms": 1, "step_error": 0.06, "whole_error": -0.003},
    ]
    plans[0] |= {"budget_gb": 2.0, "peak_gb": 2.1}
    plans[1] |= {"budget_gb": 2.0, "peak_gb": 1.9}
    both = data_of({"a": {"plans": dict(zip("xy", plans, strict=True))}})
    assert "| a | 2 | 4.0%, 6.0% | 0.2%, 0.3% | 1 of 2 |" in tables.predictions(both)
    cells = {"a": {"plans": {"x": plans[0], "y": {"error": "no"}}}, "b": {"error": "e"}}
    text = tables.predictions(data_of(cells))
    assert "| a | 1 | 2.0%, 2.0% |" in text and "| b | e | - |" in text
    assert "| all | 1 |" in text
    assert tables.predictions(data_of({"b": {"error": "e"}})) == ""
