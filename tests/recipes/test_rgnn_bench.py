"""The relational layer benchmark: resuming, failures, and what the tables say."""

import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_geometric")

from hector.train import LayerKind
from recipes.bench.harness.cells import limited
from recipes.bench.harness.cli import run as bench
from recipes.bench.rgnn import layers as rgnn
from recipes.bench.rgnn import measure as rgnn_measure
from recipes.bench.rgnn import tables as rgnn_table
from recipes.bench.rgnn.cells import (
    Cell,
    Contender,
    Phase,
    Task,
    name_of,
    plan,
)
from recipes.bench.rgnn.contenders import Graphs, build
from recipes.bench.rgnn.measure import OutOfTimeError
from recipes.bench.rgnn.records import Records, compare, geometric_mean
from tests.ranks import SOON_S

ARGS = (
    "--device cpu --scale 0.0001 --phases main bfloat16 --only mag/rgcn/*/sorted-* "
    "--budget-s 600 --limit-s 300"
).split()


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each record, whose time is not looked at."""
    monkeypatch.setattr(rgnn_measure, "NUM_TIMED", ((math.inf, 2),))


def record(
    contender: str, ms: float | None, run: int = 0, **key: Any
) -> dict[str, Any]:
    cell = {"graph": "g", "model": "rgcn", "task": "training", "dtype": "float32"}
    full = {**cell, "width": 64, "what": "time", **key, "contender": contender}
    timed = {"status": "ok", "ms": ms} if ms else {"status": "oom", "reason": "x"}
    return {"key": full, "run": run, **timed}


def results_of(*records: dict[str, Any]) -> dict[str, Any]:
    graph = {"entity_compaction_ratio": 0.25, "average_degree": 4.0}
    runs = [{"device": "a", "uuid": "1"}, {"device": "a", "uuid": "2"}]
    graphs = {"g": graph, "h": graph}
    return file_of(runs, list(records), graphs)


def file_of(
    runs: list[dict[str, Any]],
    records: list[dict[str, Any]],
    graphs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A results file of the benchmark."""
    cells = {name_of(r["key"]): r for r in records}
    about = {"environment": {}, "settings": {}, "runs": runs, "graphs": graphs or {}}
    return {**about, "cells": cells}


def test_a_cut_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert bench(["rgnn.layers", *ARGS, "--out", str(out), "--budget-s", "0"]) == 0
    assert "0 records, 6 left" in capsys.readouterr().out
    bench(["rgnn.layers", *ARGS, "--out", str(out)])
    data = json.loads(out.read_text())
    assert len(data["cells"]) == 6
    assert {r["status"] for r in data["cells"].values()} == {"ok"}
    assert data["graphs"]["mag"]["num_edge_types"] == 4
    times = [r["ms"] for r in data["cells"].values()]
    words = ["rgnn.layers", *ARGS, "--out", str(out)]
    assert bench([*words, "--again", "*/training/*"]) == 0
    again = json.loads(out.read_text())
    same = [r for r in again["cells"].values() if r["ms"] in times]
    assert {r["key"]["task"] for r in same} == {"inference"} and len(
        again["cells"]
    ) == 6
    assert again["graphs"] == data["graphs"] and len(again["runs"]) == 3


def test_a_lost_device_ends_the_run_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"

    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    with monkeypatch.context() as patch:
        patch.setattr(rgnn, "build", lost)
        assert bench(["rgnn.layers", *ARGS, "--out", str(out)]) == 1
    [record] = json.loads(out.read_text())["cells"].values()
    assert record["status"] == "lost"
    assert bench(["rgnn.layers", *ARGS, "--out", str(out)]) == 0
    found = [r["status"] for r in json.loads(out.read_text())["cells"].values()]
    assert found == ["lost", *["ok"] * 5]


def test_failures_are_recorded_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"

    def broken(*_: object) -> None:
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(rgnn, "build", broken)
        bench(["rgnn.layers", *ARGS, "--out", str(out)])
    found = json.loads(out.read_text())["cells"].values()
    assert {(r["status"], r["reason"]) for r in found} == {
        ("failed", "RuntimeError: no kernel")
    }
    bench(["rgnn.layers", *ARGS, "--out", str(out)])
    found = json.loads(out.read_text())["cells"].values()
    assert {r["status"] for r in found} == {"ok"}


def test_out_of_memory_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 9 GiB. GPU 0 has")

    monkeypatch.setattr(rgnn, "measure", large)
    bench(["rgnn.layers", *ARGS, "--out", str(tmp_path / "r.json")])
    found = json.loads((tmp_path / "r.json").read_text())["cells"].values()
    assert {(r["status"], r["reason"]) for r in found} == {
        ("oom", "Tried to allocate 9 GiB")
    }


def test_deadline_rings_and_is_taken_down() -> None:
    with pytest.raises(OutOfTimeError), limited(0.05, OutOfTimeError):
        while True:
            time.sleep(0.01)
    with limited(SOON_S, OutOfTimeError):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_plan_covers_the_issue() -> None:
    works = plan([Phase.MAIN, Phase.BFLOAT16], ["fb15k", "mag"])
    cells = {w.cell for w in works}
    assert len(cells) == 2 * 3 * 2 * 2
    grouped = {w.cell.dtype for w in works if w.contender is Contender.SORTED_GROUPED}
    assert grouped == {"bfloat16"}
    keys = [json.dumps(w.key()) for w in plan(list(Phase), ["fb15k"])]
    assert len(keys) == len(set(keys))
    assert works[0].key()["task"] == Task.INFERENCE.value


def test_speedup_is_over_the_best_other_of_the_same_machine() -> None:
    results = results_of(
        record("hector", 2.0),
        record("pyg", 9.0),
        record("sorted-loop", 6.0),
        record("pyg-compiled", 1.0, run=1),
        record("pyg-fast", None),
        record("hector-none", 1.0),
    )
    key = {"graph": "g", "model": "rgcn", "task": "training", "dtype": "float32"}
    found = compare(Records(results), **key)
    assert (found.speedup, found.num_oom) == (3.0, 1)
    row = rgnn_table.summary(results).splitlines()[2]
    assert row == (
        "| rgcn training float32 | 3.00 | 2.76 | 3.00 (g) | 3.00 (g) | 1 | 0 | 1 |"
    )


def test_summary_counts_our_own_failures() -> None:
    results = results_of(
        record("hector", 2.0),
        record("pyg", 8.0),
        record("hector", None, graph="h"),
        record("pyg", 8.0, graph="h"),
    )
    row = rgnn_table.summary(results).splitlines()[2]
    assert "| 4.00 | 2.76 | 4.00 (g) | 4.00 (g) | 1 | 1 | 0 |" in row


def test_a_graph_comes_back_without_what_was_kept_with_it() -> None:
    """Such as its executables."""
    graphs = Graphs(torch.device("cpu"), 0.01)
    made = graphs.get("aifb")
    cell = Cell(
        graph="aifb",
        model=LayerKind.RGCN,
        task=Task.INFERENCE,
        dtype="tf32",
        width=4,
    )
    layer = build(cell, Contender.HECTOR, made)
    layer.module(layer.x, made)
    assert made.state.executables
    graphs.get("mutag")
    read = graphs.get("aifb")
    assert torch.equal(read.src, made.src) and not read.state.executables
    assert read.node_type_names == made.node_type_names
    torch.backends.cuda.matmul.allow_tf32 = False


def test_ablation_choice_widths_and_memory() -> None:
    hgt = {"model": "hgt"}
    plain = {**record("hector-none", 4.0, **hgt), "peak_bytes": 5 << 20}
    compact = {**record("hector-compaction", 2.0, **hgt), "peak_bytes": 3 << 20}
    plain["resident_bytes"] = compact["resident_bytes"] = 1 << 20
    ours = [
        record("hector", ms, dtype="tf32", **hgt, width=w)
        for w, ms in ((32, 3.0), (64, 4.0), (128, 9.0))
    ]
    results = results_of(plain, compact, *ours, record("hector", 2.5, **hgt))
    assert "0 of 1 cells (0 %). Missed: g hgt training float32 1.25x" in (
        rgnn_table.choice(results)
    )
    told = "Twice the width costs less than twice in 1 of 2 steps."
    assert rgnn_table.widths(results).startswith(told)
    row = rgnn_table.memory(results).splitlines()[2]
    assert row == "| g | 0.25 | 4.0 | - | - | 4 | 0.50 |"
    assert math.isclose(geometric_mean([2.0, 8.0]), 4.0)


def test_a_choice_is_compared_with_settings_measured_beside_it() -> None:
    """The host was slow when the main cells ran: 9 ms for what then took 4."""
    fixed = [record("hector-none", 5.0), record("hector-both", 4.0)]
    elsewhere = record("hector-reordering", 1.0, run=1)
    chosen = {**record("hector", 9.0), "setting": "compact+reorder"}
    results = results_of(*fixed, elsewhere, chosen)
    assert "1 of 1 cells (100 %)." in rgnn_table.choice(results)
    chosen = {**record("hector", 3.0), "setting": "none"}
    results = results_of(*fixed, elsewhere, chosen)
    assert "0 of 1 cells (0 %). Missed: g rgcn training float32 1.25x" in (
        rgnn_table.choice(results)
    )
