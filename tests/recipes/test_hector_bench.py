"""hector's campaign and tables: what they find, and what they print."""

from collections import Counter
from typing import Any

import pytest
import torch

from recipes.bench.rgnn.tables import batches
from recipes.bench.safety import graph_programs
from recipes.bench.safety.graph_compare import Outcome, close, differs
from recipes.bench.safety.graph_loops import REDUCERS, reduced
from recipes.bench.safety.graph_objects import Passing
from tests.recipes.written import ENVIRONMENT


def test_graph_programs_agree() -> None:
    found = graph_programs.run_block(0)
    assert found["graphs"] == 100 and found["different"] == []
    met = found["features"]
    assert met["inference_mode"] and met["indices: .data"] and met["optimizer step"]
    assert met["edge attributes"] and met["hgt"]


def test_a_product_of_rounded_messages_is_as_exact_as_its_condition() -> None:
    """Fifty-five factors in float16: hector and PyG are off by the same 1.5 %."""
    assert graph_programs.run_program(3203)[0] == []
    program = graph_programs.Program(3203)
    graph, dst = program.objects.graph, program.objects.indices[1]
    for frame, name in ((graph.ndata, "h"), (graph.edata, "w")):
        frame[name] = frame[name].detach().double()
    passing = Passing("all", "user", "mul", torch.tensor([0]))
    (exact,) = passing.loop(program.objects, {})
    (allowed,) = passing.rounding(program.objects, torch.float16)
    messages, _, _ = passing.messages(program.objects)
    rounded = reduced(messages.half().double(), dst, len(exact), REDUCERS["mul"])
    error = (rounded - exact).abs()
    assert bool(((error > 0) & (error <= allowed)).any())
    many = torch.bincount(dst) > 50
    # 1.5 roundings of each factor, and of the terms that it is made of.
    assert bool((allowed[many] > 0.05 * exact[many].abs()).all())
    far = Outcome([exact + 2 * allowed + 1], [])
    found = differs(far, Outcome([exact], []), torch.float16, Counter(), [allowed])
    assert found is not None


def test_graph_programs_beyond_the_range_of_a_dtype() -> None:
    """Infinity of the exact value's sign is right, others are not."""
    different, features = graph_programs.run_program(3829)
    assert different == [] and features["beyond the range"]
    exact = torch.tensor([-1e39], dtype=torch.float64)
    for value, right in ((-torch.inf, True), (torch.inf, False), (1.0, False)):
        what = close(torch.tensor([value]), exact, torch.float32)
        assert (what is None) is right
    assert close(torch.tensor([torch.nan]), exact, torch.float32) is not None


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
