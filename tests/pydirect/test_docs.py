"""The code blocks of the documentation run as they stand."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pydirect.sampling import GraphStatistics, generate_graph

DOCS = Path(__file__).resolve().parents[2] / "docs"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = GraphStatistics(num_nodes=300, num_edges=2000, num_classes=4)


def blocks(page: str) -> list[str]:
    """The Python blocks of one page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def sampler() -> Iterator[tuple[torch.Tensor, int]]:
    for number in range(3):
        yield torch.tensor([5, number, 299]), number


@pytest.fixture
def names(pyg: ModuleType) -> dict[str, Any]:
    """What a reader has at hand when the blocks begin."""
    graph, labels = generate_graph(SMALL, seed=0)
    features = torch.randn(300, 16)
    data = pyg.data.Data(x=features.clone(), edge_index=graph.to_edge_index())
    seen: list[torch.Tensor] = []
    return {
        "load": lambda: features.clone(),
        "sampler": sampler(),
        "train": lambda x, batch: seen.append(x.cpu()),
        "seen": seen,
        "features": features,
        "graph": graph,
        "labels": labels,
        "train_nodes": torch.arange(200),
        "device": DEVICE,
        "model": pyg.nn.GraphSAGE(16, 8, 2, 4).to(DEVICE),
        "loss": torch.nn.functional.cross_entropy,
        "data": data,
        "node_ids": torch.tensor([7, 0, 7]),
        "index": torch.tensor([3, 299, 3], device=DEVICE),
        "side": torch.cuda.Stream() if DEVICE.type == "cuda" else None,
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_unified_page(names: dict[str, Any]) -> None:
    features = names["features"].clone()
    found = blocks("pydirect.md")
    assert len(found) == 5
    for number, block in enumerate(found):
        scope = dict(names)
        exec(block, scope)
        if number == 0:
            assert [x.tolist() for x in names["seen"]] == [
                features[[5, k, 299]].tolist() for k in range(3)
            ]
        elif number == 1:
            assert all(p.grad is not None for p in names["model"].parameters())
        elif number == 2:
            assert torch.equal(scope["rows"].cpu(), features[:4])
        elif number == 3:
            assert scope["data"].x.is_unified
            assert torch.equal(scope["rows"].cpu(), features[[7, 0, 7]])
        else:
            assert torch.equal(scope["rows"].cpu(), features[[7, 0, 7]])
            assert not torch.equal(scope["embedding"].weight[0], features[0])


def test_the_gather_page(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = blocks("pydirect-gather.md")
    exec(first, names)
    assert torch.equal(names["rows"].cpu(), names["features"][[3, 299, 3]])
    exec(second, names)
    assert "requests a row" in capsys.readouterr().out
