"""What the foresight benchmarks measure on a CPU, and compute from recorded numbers."""

import json
from pathlib import Path

import pytest

from recipes.bench.foresight import kernels, steps
from recipes.bench.foresight.collectives import fabric_of, sizes
from recipes.bench.foresight.tables import last, runs
from recipes.bench.harness.cli import run
from recipes.bench.harness.records import Data, read
from ssdtrain.tools.foresight.call import KernelFamily
from ssdtrain.tools.foresight.collectives import Collective, load_fabric
from ssdtrain.tools.foresight.tracing import step_us


def test_steps_are_measured_and_then_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded file is priced again in the same way."""
    monkeypatch.setattr(steps, "step_us", lambda step, **_: step_us(step, seconds=0.0))
    out, into = tmp_path / "steps.json", tmp_path / "predicted.json"
    words = ["foresight.steps", "--shapes", "tiny", "--device", "cpu"]
    run([*words, "--only", "gpt/1", "dlrm/*", "--out", str(out)])
    assert read(out)["cells"].keys() == {"gpt/1", "dlrm/16", "dlrm/32"}
    run([*words, "--out", str(out), "--by", "h100", "--into", str(into)])
    found = read(into)
    assert found["settings"] == {"shapes": "tiny", "device_file": "shipped"}
    for row in found["cells"].values():
        assert row["predicted_us"] >= row["kernels_us"] > 0 < row["constant_us"]
    run([*words, "--out", str(into), "--by", "h100"])
    assert read(into) == found


def step(model: str, batch: int, off_by: float) -> Data:
    return {
        **{"model": model, "batch": batch, "measured_us": 1000.0},
        **{"predicted_us": 1000.0 * (1 + off_by), "kernels_us": 500.0},
        **{"constant_us": 3000.0, "peak_bytes": 100, "predicted_peak_bytes": 101},
    }


def test_errors_are_told_by_model_and_written_for_every_run() -> None:
    rows = [step("bert", 1, 0.5), step("bert", 2, -0.02), step("gpt", 1, 0.04)]
    held: Data = {
        "environment": {"device": "a device"},
        "settings": {"shapes": "held3", "device_file": "calibrated"},
        "cells": {f"{row['model']}/{row['batch']}": row for row in rows},
    }
    tiny = {**held, "settings": {"shapes": "tiny", "device_file": "shipped"}}
    text = runs(held, tiny)
    assert "| a device, `held3` | a minute's calibration | 3 |" in text
    assert "(18.7, 50.0) |" in text and "tiny" not in text
    text = last(held, tiny)
    assert "(26.0, 50.0) |" in text, "of BERT alone"
    assert "| bert | 1 | 1.0 ms | 1.500 | 0.500 | 3.000 | 1.010 |" in text


def test_kernel_times_are_kept_without_loss() -> None:
    found = kernels.recorded("h100")
    assert set(found) == set(KernelFamily)
    kept = json.loads(kernels.path_of("h100").read_text())
    again = kernels.compact(found)
    for family, table in kept.items():
        assert len(again[family]["rows"]) == len(table["rows"])
        for now, before in zip(again[family]["rows"], table["rows"], strict=True):
            both = dict(zip(table["columns"], before, strict=True))
            both.pop("skew", None)
            assert list(both.values()) == now


def test_collectives_are_judged_at_sizes_held_out_and_slow_kernels_as_before() -> None:
    """Two protocols: 5 us and 20 GB/s, or 15 us and 200 GB/s."""
    powers = [4096 << step for step in range(16)]
    links = [
        {"kind": "all_reduce", "bytes": m, "us": min(5 + m / 2e4, 15 + m / 2e5)}
        for m in powers
    ]
    fabric, errors = fabric_of({"ranks": 2, "links": links}, "nvlink")
    shipped = load_fabric("nvlink")
    changed = {k for k, own in fabric.curves.items() if own != shipped.curves[k]}
    assert changed == {Collective.ALL_REDUCE}
    [found] = errors.values()
    assert found < 0.01
    for m, row in zip(powers, links, strict=True):
        us = fabric.microseconds(Collective.ALL_REDUCE, m, 2)
        assert us == pytest.approx(row["us"])
    assert fabric.compute_slowdown == shipped.compute_slowdown > 0.0
    assert list(sizes(1 << 14)) == [4096, 6144, 8192, 12288, 16384]


def test_two_ranks_time_collectives(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    words = ["--ranks", "2", "--device", "cpu", "--rounds", "1", "--out", str(out)]
    run(["foresight.collectives", *words])
    cell = read(out)["cells"]["collectives"]
    kinds = {row["kind"] for row in cell["links"]}
    assert "error" not in cell and kinds == {kind.value for kind in Collective}
    assert all(row["us"] > 0 for row in cell["links"])
