"""The gather and GNN benchmarks: cells, resuming, failures, and what the tables say."""

import copy
import importlib
import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from recipes.bench.harness import records
from recipes.bench.harness.cli import run
from tests.recipes.written import ENVIRONMENT

pytest.importorskip("torch_geometric")
MIB = 1 << 20
MILLION = 1_000_000


@pytest.fixture
def bench() -> Any:
    """Imports a benchmark; PyG warns when imported."""

    def quietly(name: str) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"recipes.bench.{name}")

    return quietly


def test_a_cell_measures_every_way_and_checks_its_rows(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, methods = bench("gather.sweep"), bench("gather.methods")
    flat = torch.randint(0, 255, (MIB,), dtype=torch.uint8)
    sweep = gather.Sweep(flat, peak=10.0, unit=MIB)
    cell = sweep.cell(128, 300, 16)
    assert set(cell["ms"]) == {
        *("ours", "direct", "sorted", "cpu", "alias", "crude sorted"),
        "stock cpu",
    }
    took = cell["ms"]["ours"]
    assert cell["share"]["ours"] == pytest.approx(300 * 128 / took / 1e7, abs=1e-4)
    assert set(sweep.shifted(2052, 40, 1)["ms"]) == {"ours", "alias", "stock cpu"}

    def wrong(table: torch.Tensor, path: Any = None) -> Any:
        return lambda index, out: out.zero_()

    def broken(table: torch.Tensor) -> Any:
        def work(index: torch.Tensor, out: torch.Tensor) -> None:
            raise RuntimeError("no such kernel")

        return work

    monkeypatch.setattr(methods, "ours", wrong)
    monkeypatch.setattr(methods, "stock_alias", broken)
    cell = sweep.cell(128, 300, 1)
    assert cell["errors"]["ours"] == "RuntimeError: the gather returned wrong rows"
    assert cell["errors"]["alias"] == "RuntimeError: no such kernel"
    assert "ours" not in cell["share"] and "stock cpu" in cell["share"]


def test_large_copies_of_the_baseline_go_in_pieces(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = bench("gather.methods")
    monkeypatch.setattr(methods, "STAGING_BYTES", 1000)
    table = torch.randint(0, 255, (50, 100), dtype=torch.uint8)
    index = torch.randint(0, 50, (33,))
    out = torch.empty(33, 100, dtype=torch.uint8)
    methods.StockCpu().on(table)(index, out)
    assert torch.equal(out, table[index])


def sweep_cell(
    memory: str, table: int, batch: int, row: int, **ms: float
) -> dict[str, Any]:
    shares = {name: batch * row / took / 5e7 for name, took in ms.items()}
    return {
        "memory": memory,
        "table_gib": table,
        "batch": batch,
        "row_bytes": row,
        "chosen": "direct",
        "distinct_share": 1.0,
        "ms": ms,
        "share": shares,
    }


def paths(ours: float, best: float, cpu: float) -> dict[str, float]:
    return {"ours": ours, "direct": best, "sorted": 2 * best, "cpu": cpu}


def gather_results() -> dict[str, Any]:
    """A peak of 50 GB/s: 1M rows of 128 bytes at the peak take 2.56 ms."""
    beside = {"stock cpu": 6.4}
    cells = {
        "link": {"dma_peak_gb_s": 50.0},
        "managed/16/1000000/128": sweep_cell(
            "managed", 16, MILLION, 128, **paths(3.2, 3.19, 9.0), **beside
        ),
        "managed/16/1000000/512": sweep_cell(
            "managed", 16, MILLION, 512, **paths(12.8, 10.24, 36.0),
            **{"stock cpu": 36.0},
        ),
        "managed/16/50000/128": sweep_cell(
            "managed", 16, 50_000, 128, **paths(0.16, 0.16, 0.5)
        ),
        "pinned/16/50000/128": sweep_cell(
            "pinned", 16, 50_000, 128, **{"crude sorted": 0.48}
        ),
        "pinned/16/1000000/128": sweep_cell(
            "pinned", 16, MILLION, 128, alias=25.6, **paths(5.0, 5.0, 4.0)
        ),
        "shifted/2052": {
            "row_bytes": 2052,
            "ms": {"ours": 1.0},
            "share": {"ours": 0.9, "alias": 0.5},
        },
        "failed": {"error": "out of memory"},
    }  # fmt: skip
    return {"environment": ENVIRONMENT, "settings": {}, "cells": cells}


def test_the_gather_section(bench: Any) -> None:
    table, data = bench("gather.tables"), gather_results()
    assert table.gather(data | {"cells": {}}) == ""
    assert "| 128 | 0.800 | 0.100 | 0.400 |" in table.gather(data)
    told = "| 128 | 0.800 (3.0x) |"
    assert told in table.batches(data), "50,000 rows, against the crude probe"
    assert "| 2052 | 0.900 | - | - | 0.500 | - |" in table.shifted(data)
    text = table.verdicts(data)
    assert "in 3 of 4 cells (75%); median 1.000, worst 1.25" in text
    assert "slower than CPU gather + DMA in 3 of 4 cells; worst 1.25" in text
    assert (
        "2.81 to 2.81 times CPU gather + DMA (all cores); at least twice in 1" in text
    )


def test_rows_read_once_are_not_called_a_faster_link(bench: Any) -> None:
    table = bench("gather.tables")
    cell = sweep_cell("managed", 1, MILLION, 4096, ours=40.96)
    assert table.share_text(cell) == "2.000"
    repeats = cell | {"distinct_share": 0.25, "chosen": "sorted"}
    assert table.share_text(repeats) == "2.000 (0.500)"
    assert table.share_text({"share": {}, "ms": {}}) == "-"
    stale = cell | {"distinct_share": 0.25}
    assert table.share_text(stale) == "2.000 (0.500)", "no link is twice as fast"


def test_a_path_recorded_too_early_is_not_held_against_the_chooser(bench: Any) -> None:
    table = bench("gather.tables")
    taken = {"ours": 20.2, "direct": 40.9, "sorted": 20.1, "cpu": 64.0}
    cell = sweep_cell("managed", 1, MILLION, 2052, **taken)
    assert table.regret(cell) == pytest.approx(20.2 / 20.1)
    assert table.regret(cell | {"ms": taken | {"ours": 40.0}}) == pytest.approx(
        2.035, 1e-3
    )


def test_short_calls_come_in_bursts_and_long_ones_once(bench: Any) -> None:
    methods = bench("gather.methods")
    seen: list[int] = []

    def work(index: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(index.numel())
        out.copy_(table[index])

    table = torch.randint(0, 255, (5000, 64), dtype=torch.uint8)
    way = methods.Method(name="way", work=work, gbps=40)
    ms, errors = methods.Rounds(table, 2000, [way]).run()
    assert set(ms) == {"way"} and not errors
    assert seen.count(2000) == 1 + 7 * 8, "a checked call, then seven bursts of eight"
    seen.clear()
    slow = methods.Method(name="slow", work=work, gbps=1e-6)
    ms, errors = methods.Rounds(table, 2000, [slow]).run()
    assert set(ms) == {"slow"} and seen == [1000, 2000]


def test_half_a_gather_record_still_prints(bench: Any) -> None:
    data, table = gather_results(), bench("gather.tables")
    for keep in range(len(data["cells"])):
        part = copy.deepcopy(data)
        part["cells"] = dict(list(data["cells"].items())[: keep + 1])
        assert ("16 GiB" in table.gather(part)) == (keep > 0)
        for name in ("batches", "shifted", "verdicts"):
            assert isinstance(getattr(table, name)(part), str)


def gnn_side(copy_s: float, wall_s: float, **more: Any) -> dict[str, Any]:
    bars = {"copy_s": copy_s, "train_s": 0.02, "other_s": 0.1, "batches": 10}
    return {
        "case": {"name": "wide", "model": "GraphSAGE", "num_features": 1024},
        "feature_gib": 9.3,
        "batches_an_epoch": 100.0,
        "bars": {**bars, "first_losses": [4.0, 2.0]},
        "run": {
            "wall_s": wall_s,
            "batches": 20,
            "cpu_percent": 400.0,
            "gpu_idle_share": 0.25,
        },
        "peak_gib": 2.5,
        **more,
    }


def test_the_gnn_section(bench: Any) -> None:
    table = bench("gnn.tables")
    data = {
        "environment": {**ENVIRONMENT, "command": "gnn.py"},
        "settings": {"batch_size": 1024},
        "cells": {
            "wide/data": {"graph_s": 1.0},
            "wide/pyg": gnn_side(0.8, 2.0),
            "wide/pydirect": gnn_side(0.2, 0.5),
            "wide/pyg_overlapped": gnn_side(0.8, 1.5),
            "half/pyg": gnn_side(1.0, 1.0),
            "half/pydirect": {"error": "out of memory"},
        },
    }
    text = table.gnn(data)
    assert (
        "| wide, GraphSAGE | 1024, 9.3 GiB | PyG's way | 80.0 | 2.0 | 10.0 | "
        "10.00 (7.50) | 25% | 400 % | 2.50 GiB |" in text
    )
    assert "|  |  | pydirect | 20.0 | 2.0 | 10.0 | 2.50 | 25% |" in text
    assert "cut by 75% (wide) to 75%; by at least 47% in 1 of 1 cases" in text
    assert "wide 4.00x (3.00x)." in text
    del data["cells"]["wide/pyg_overlapped"]
    assert "wide 4.00x." in table.gnn(data)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gnn_runs_resumes_and_records_failures(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gnn = bench("gnn.epochs")
    out = tmp_path / "gnn.json"
    words = ["--small", "--only", "products", "--out", str(out)]
    stock = gnn.side

    def side(case: Any, data: Any, name: str, args: Any) -> Any:
        if name == "pyg_overlapped":
            raise torch.OutOfMemoryError("too much")
        return stock(case, data, name, args)

    monkeypatch.setattr(gnn, "side", side)
    run(["gnn.epochs", *words])
    cells = json.loads(out.read_text())["cells"]
    assert cells["products/pyg_overlapped"]["error"] == "out of memory"
    ours, theirs = (cells[f"products/{s}"] for s in ("pydirect", "pyg"))
    assert ours["bars"]["first_losses"] == theirs["bars"]["first_losses"]
    monkeypatch.setattr(gnn.Tables, "dataset", None)
    run(["gnn.epochs", *words])
    assert json.loads(out.read_text())["cells"].keys() == cells.keys()
    assert "products" in bench("gnn.tables").gnn(records.read(out))
