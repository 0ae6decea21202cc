"""What DGL's users come for, and message passing: cells of all kinds, on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_geometric")

from recipes.bench.harness.cli import run as bench
from recipes.bench.rgnn import batches, block_models, counters, dgl, messages
from recipes.bench.rgnn.mag import WIDTH, mag_graph


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, of sparse tensors
def test_all_cells_have_equal_values_and_a_failure_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "r.json", dgl.second_cell

    def second(name: str, *more: Any) -> dict[str, Any]:
        if name == "hgt":
            raise RuntimeError("no kernel")
        return real(name, *more)

    monkeypatch.setattr(dgl, "second_cell", second)
    once = batches.milliseconds
    monkeypatch.setattr(batches, "milliseconds", lambda step, rounds=8: once(step, 1))
    words = ["--device", "cpu", "--shrink", "4000", "--out", str(out)]
    assert bench(["rgnn.dgl", *words]) == 0
    cells = json.loads(out.read_text())["cells"]
    wrong = cells.pop("second/hgt")
    assert wrong["error"] == "RuntimeError: no kernel"
    kinds = [f"second/{n}" for n in (*messages.LAYERS, "rgcn", "rgat")]
    kinds += [f"blocks/{n}" for n in block_models.KINDS]
    assert list(cells) == kinds
    for name, cell in cells.items():
        assert cell["ratio"] > 0, name
        found = [v for k, v in cell.items() if k.endswith("error")]
        assert found and max(found) < 1e-5, name


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, of sparse tensors
def test_layers_on_one_type_and_on_typed_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, times = batches.milliseconds, messages.times_ms
    monkeypatch.setattr(batches, "milliseconds", lambda step, rounds=8: once(step, 1))
    monkeypatch.setattr(messages, "times_ms", lambda *which: times(*which[:2], 2))
    out = tmp_path / "r.json"
    words = ["--device", "cpu", "--shrink", "4000", "--out", str(out)]
    some = ("pubmed/*", "pubmed 16 columns/*", "random 32768 nodes 0.08 % 32 *")
    assert bench(["rgnn.messages", *words, "--only", *some]) == 0
    assert len(json.loads(out.read_text())["cells"]) == 4 + 3 + 3
    for cell in json.loads(out.read_text())["cells"].values():
        ways = [cell[way] for way in messages.WAYS]
        errors = [v for way in ways for k, v in way.items() if k.endswith("error")]
        assert cell["ratio"] > 0 and max(errors) < 1e-5
    graph = mag_graph(torch.device("cpu"), 4000)
    rows = torch.randn(graph.num_nodes, WIDTH)
    for kind in batches.KINDS:
        cell = batches.batch_cell(kind, graph, rows, 4)
        assert cell["ratio"] > 0 and cell["largest_loss_error"] < 1e-5


def test_a_wrong_value_of_either_side_is_seen() -> None:
    made = torch.tensor([[1.0, -4.0]])
    assert messages.difference(made + torch.tensor([1.0, 0.0]), made) == 0.25


def test_kernels_by_direction_and_family(tmp_path: Path) -> None:
    names = ("hector_gemm_a", "hector_traversal_b", "spin_kernel(long)", "ampere_sgemm")
    values = [(n, "1,000", *"12345") for n in (*names, "hector_traversal_b_sum")]
    values.append(("hector_traversal_b", "3,000", *"56789"))
    head = ("Kernel Name", counters.TIME, *counters.METRICS.values())
    rows = [dict(zip(head, row, strict=True)) for row in values]
    found = counters.by_family(rows)
    assert list(found) == [
        *("forward gemm", "forward traversal", "backward other", "backward traversal")
    ]
    assert found["backward traversal"] == {
        **{"launches": 2, "ms": 0.004, "ipc": 4.0, "compute_percent": 5.0},
        **{"l1_percent": 6.0, "l2_percent": 7.0, "dram_percent": 8.0},
    }
    out = tmp_path / "counters.json"
    words = ["--scale", "0.0005", "--device", "cpu", "--out", str(out)]
    assert bench(["rgnn.counters", *words]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert cells["am/none"]["loss"] == cells["am/compaction"]["loss"] > 0
