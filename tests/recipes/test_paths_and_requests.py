"""The benchmarks of paths to SSDs and of requests against counters, without a GPU."""

import json
from pathlib import Path

import pytest
import torch

from recipes.bench.harness import counters
from recipes.bench.harness.cli import run
from recipes.bench.storage import paths
from recipes.bench.traversal import requests

ONE, TWO = (requests.BEST.format(what) for what in ("requests", "sectors"))
COUNTED = f"""==PROF== Profiling "merged_push_i32"
"ID","Kernel Name","{ONE}.sum","{TWO}.sum","launch__grid_size"
"","","request","sector",""
"0","merged_push_i32","1,900","4,000","264"
"1","merged_push_i32","100","1","264"
"""


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


def test_the_model_next_to_the_counters(tmp_path: Path) -> None:
    told = requests.sums(counters.read(COUNTED.splitlines()))
    assert told == {ONE: 2000, TWO: 4001}
    graph = requests.graph_of(1000)
    model = requests.count_requests(graph, "merged")
    cell = requests.cell(model, told)
    assert cell["requests_ratio"] == round(model.total / 2000, 4)
    assert cell["sectors_ratio"] == round(model.moved_bytes / 32 / 4001, 4)
    out = tmp_path / "requests.json"
    words = ["--shrink", "1000", "--device", "cpu", "--out", str(out)]
    assert run(["traversal.requests", *words]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert cells["lists, merged"]["requests"] == model.total
    assert cells["rows of 512 B"]["sectors"] == 16 * 100
