"""Sweeps of Wang's figures, and the joined epoch: subjects, order, one point each."""

import json
from pathlib import Path

import pytest

from recipes.bench.harness.cli import run as bench
from recipes.bench.rgnn import joined, sweeps


def test_subjects_grow_as_they_say() -> None:
    nodes, (src, dst), width = sweeps.subject("density", 0.05, 200, "cpu")
    assert (nodes, len(src), width) == (160, int(160 * 160 * 0.05), 128)
    assert bool((src != dst).all()) and bool((dst.diff() >= 0).all())
    assert sweeps.subject("nodes", 64_000, 200, "cpu")[0] == 320
    assert sweeps.subject("width", 32, 200, "cpu")[2] == 32
    names = list(sweeps.points(["hidden"]))
    assert len(names) == 14 and names[0] == ("hidden", "gcn", 16)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:`torch.jit.script`")
def test_a_point_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sweeps.SIZES, "hidden", (16,))
    out = tmp_path / "sweeps.json"
    words = ["--shrink", "400", "--sweeps", "hidden", "--out", str(out)]
    assert bench(["rgnn.sweeps", *words]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert set(cells) == {"hidden/gcn/16", "hidden/gat/16"}
    for cell in cells.values():
        assert cell["hector"]["ms"] > 0 and cell["width"] == 16
    written = out.read_text()
    assert bench(["rgnn.sweeps", *words]) == 0
    assert json.loads(out.read_text())["cells"] == json.loads(written)["cells"]


def test_a_joined_epoch_has_one_loss_wherever_its_rows_lie(tmp_path: Path) -> None:
    out = tmp_path / "joined.json"
    words = ["--shrink", "2000", "--batches", "3", "--share", "0.3"]
    assert bench(["rgnn.joined", *words, "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert set(cells) == set(joined.PLACES)
    assert len({tuple(cell["losses"]) for cell in cells.values()}) == 1
    for cell in cells.values():
        assert cell["batches"] == 3 and cell["over_longest_stage"] > 0
