"""hector's campaign and tables: what they find, and what they print."""

from typing import Any

import pytest
import torch

from recipes.bench.rgnn.tables import batches
from recipes.bench.safety import graph_programs
from recipes.bench.safety.graph_compare import Outcome, far
from tests.recipes.written import ENVIRONMENT


def test_graph_programs_agree() -> None:
    found = graph_programs.run_block(0)
    assert found["graphs"] == 100 and found["different"] == []
    met = found["features"]
    assert met["inference_mode"] and met["indices: .data"] and met["optimizer step"]
    assert met["edge attributes"] and met["hgt"]


def test_loops_tell_what_is_not_exact() -> None:
    outputs = torch.tensor([1.0, 1000.0], dtype=torch.float64)
    exact = Outcome([outputs], [torch.ones(2), None])
    near = Outcome([outputs + 1e-7], [torch.ones(2), torch.zeros(2)])
    assert far(near, exact) is None
    other = Outcome(exact.outputs, [torch.zeros(2), None])
    assert (
        far(other, exact) == "part 1: error 1" and far(other, exact, tied=True) is None
    )
    wrong = (torch.ones(3), torch.full((2,), torch.nan), None)
    assert all(far(Outcome([one], exact.gradients), exact) for one in wrong)


@pytest.mark.parametrize("blind", ["graphs", "indices", "features"])
def test_graph_programs_see_a_stale_result(
    blind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hector import graph_cache
    from hector.message import edges, frame

    if blind == "graphs":
        monkeypatch.setattr(graph_cache, "_up_to_date", lambda entry, tensors: True)
    elif blind == "indices":
        monkeypatch.setattr(edges.Edges, "unchanged", lambda self: True)
    else:
        known: dict[Any, Any] = {}
        plain = frame.EdgeFrame.sorted

        def kept(self: Any, name: str, now: Any) -> Any:
            return known.setdefault((id(self), name), plain(self, name, now))

        monkeypatch.setattr(frame.EdgeFrame, "sorted", kept)
    assert any(graph_programs.run_program(seed)[0] for seed in range(100))


def test_tables() -> None:
    drawn: dict[str, Any] = {"nodes": 10, "edges": 20, "hector_ms": 1.0, "pyg_ms": 3.0}
    cells = {
        "batch/rgcn": {**drawn, "ratio": 3.0, "largest_loss_error": 1e-7},
        "captured/hgt/aifb": {**drawn, "captured_ms": 0.5, "ratio": 6.0},
        "captured/hgt/mutag": {"error": "out of time"},
        "first": {"empty_s": 2.5, "kept_s": 0.4},
    }
    settings = {"seeds": 8, "fanouts": [3, 2]}
    data = {"cells": cells, "settings": settings, "environment": ENVIRONMENT}
    text = batches(data)
    assert "| rgcn | 10 | 20 | 1.000 | 3.000 | 3.00 | 1.0e-07 |" in text
    assert "| hgt aifb | 1.000 | 0.500 | 3.000 | 6.00 |" in text
    assert "2.5 s with empty caches, 0.4 s" in text and "mutag" not in text
