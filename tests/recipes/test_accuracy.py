"""Accuracy of mini-batch training: the tests of its differences, and a cut run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hector.datasets.generate import TABLE_3_3, scaled
from hector.datasets.task import generated_task
from recipes.bench.harness.cli import run as bench
from recipes.bench.rgnn import accuracy
from recipes.bench.rgnn.tables import accuracy as table


def test_a_sign_flip_test_is_exact() -> None:
    assert accuracy.sign_flip([1.0] * 10) == 2 / 1024
    assert accuracy.sign_flip([0.0] * 4) == 1.0
    # Of eight choices of signs, those with |sum| >= 4: all of one sign, but for the 1.
    assert accuracy.sign_flip([3.0, 2.0, -1.0]) == 4 / 8


def test_holms_correction_rises_and_stays_below_one() -> None:
    assert accuracy.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert accuracy.holm([0.5, 0.9]) == [1.0, 1.0]


def cells(differences: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {"mag/hgt/full/99": {"accuracy": 0.5}}
    for seed, d in enumerate(differences):
        found[f"aifb/rgcn/full/{seed}"] = {"accuracy": 0.8}
        found[f"aifb/rgcn/batches/{seed}"] = {"accuracy": 0.8 + d}
    return found


def test_seeds_are_compared_that_ran_both_ways() -> None:
    (same,) = accuracy.compared(cells([0.1, -0.1, 0.05, -0.05]))
    assert not same.differs and len(same.differences) == 4
    (worse,) = accuracy.compared(cells([-0.1 - 0.001 * i for i in range(10)]))
    assert worse.differs and worse.batches < worse.full == pytest.approx(0.8)


def test_a_cut_run_goes_on_and_has_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = generated_task(
        scaled(TABLE_3_3["aifb"], 0.02), num_classes=3, num_labelled=40
    )
    object.__setattr__(task, "name", "aifb")
    settings = {**accuracy.SETTINGS, "steps": {"aifb": 4}}
    monkeypatch.setattr(accuracy, "SETTINGS", settings)
    monkeypatch.setattr(accuracy, "load", lambda name, data: accuracy.Work(task))
    monkeypatch.setattr(accuracy.train, "__defaults__", (settings,))
    out = tmp_path / "accuracy.json"
    words = f"rgnn.accuracy --data {tmp_path} --out {out} --sets aifb --models rgcn"
    bench([*words.split(), "--num-seeds", "1"])
    first = json.loads(out.read_text())
    assert [c["steps"] for c in first["cells"].values()] == [4, 4]
    bench([*words.split(), "--num-seeds", "2"])
    data = json.loads(out.read_text())
    assert len(data["cells"]) == 4
    assert {k: data["cells"][k] for k in first["cells"]} == first["cells"]
    text = table(data)
    assert "| aifb rgcn | 2 |" in text and "cut before its 10 seeds" in text


def test_the_part_of_ogbn_mag(tmp_path: Path) -> None:
    """Ids are local to their types; papers beyond the part are left out."""
    made = np.random.default_rng(0)
    for name, sizes in {
        "citing": (50, 50),
        "writing": (9, 50),
        "is-about": (50, 7),
    }.items():
        ends = np.stack([made.integers(0, n, 200) for n in sizes]).astype(np.int32)
        with accuracy.lzma.open(tmp_path / f"{name}_coo_2.npy.xz", "wb") as file:
            np.save(file, ends)
    work = accuracy.mag(tmp_path, num_papers=30)
    graph = work.task.graph
    assert graph.node_type_names == ("paper", "author", "field")
    assert graph.num_nodes == 30 + 9 + 7 and graph.num_edge_types == 7
    assert work.features is not None and len(work.features) == graph.num_nodes
    both = set(work.task.train_nodes.tolist()) & set(work.task.test_nodes.tolist())
    assert not both and int(work.task.train_nodes.max()) < 30
