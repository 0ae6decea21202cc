"""A sample of the campaign `recipes/bench/safety/graph_programs.py`."""

from typing import Any

import pytest
import torch

from recipes.bench.safety import graph_programs
from tests.hector.graphs.compare import Outcome, far
from tests.hector.graphs.programs import run_program


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
    assert any(run_program(seed)[0] for seed in range(100))
