"""What DGL's users come for: all cells of the benchmark, tiny, on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_geometric")

from recipes.bench.harness.cli import run as bench
from recipes.bench.rgnn import batches, block_models, dgl, messages


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
    once, times = batches.milliseconds, messages.times_ms
    monkeypatch.setattr(batches, "milliseconds", lambda step, rounds=8: once(step, 1))
    monkeypatch.setattr(messages, "times_ms", lambda *which: times(*which[:2], 2))
    words = ["--device", "cpu", "--shrink", "4000", "--out", str(out)]
    assert bench(["rgnn.dgl", *words]) == 0
    cells = json.loads(out.read_text())["cells"]
    wrong = cells.pop("second/hgt")
    assert wrong["error"] == "RuntimeError: no kernel"
    kinds = [f"second/{n}" for n in (*dgl.ALIKE, "rgcn", "rgat")]
    kinds += [
        f"one type/{g}/{n}" for g in ("pubmed", "flickr") for n in messages.LAYERS
    ]
    kinds += [f"blocks/{n}" for n in block_models.KINDS]
    kinds += [f"typed/{n}" for n in batches.KINDS]
    assert list(cells) == kinds
    for name, cell in cells.items():
        assert cell["ratio"] > 0, name
        sides = [cell[w] for w in messages.WAYS] if "one type" in name else [cell]
        found = [v for s in sides for k, v in s.items() if k.endswith("error")]
        assert found and max(found) < 1e-5, name


def test_a_wrong_value_of_either_side_is_seen() -> None:
    made = torch.tensor([[1.0, -4.0]])
    assert messages.difference(made + torch.tensor([1.0, 0.0]), made) == 0.25
