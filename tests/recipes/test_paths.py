"""The benchmark of paths to SSDs, without a GPU."""

import json
from pathlib import Path

import pytest
import torch

from recipes.bench.harness.cli import run
from recipes.bench.storage import paths


def test_paths_are_trained_on_in_turns(tmp_path: Path) -> None:
    out = tmp_path / "paths.json"
    words = ["--directory", str(tmp_path), "--width", "192", "--device", "cpu"]
    assert run(["storage.paths", *words, "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert set(cells) == set(paths.TARGETS)
    for cell in cells.values():
        assert cell["equal"] and cell["off_written_bytes"] > 0, cell
        assert cell["auto_path"].startswith("staging + posix: stripe of [")
        assert cell["auto_over_staged"] > 0
    assert [each.name for each in tmp_path.iterdir()] == ["paths.json"]


def test_a_bit_that_differs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(device: object, width: int, settings: object) -> object:
        moved = {"step_ms": [1.0] * 3, "written_bytes": 1, "path": ""}
        return [torch.full((2,), 1.0 if settings is None else 1.0 + 1e-7)], moved

    monkeypatch.setattr(paths, "train", train)
    out = tmp_path / "paths.json"
    run(["storage.paths", "--directory", str(tmp_path), "--out", str(out)])
    for cell in json.loads(out.read_text())["cells"].values():
        assert "losses or weights differ" in cell["error"]
