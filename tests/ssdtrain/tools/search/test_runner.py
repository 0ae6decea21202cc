"""Found plans and printed layouts run on four ranks; other steps are refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.moves import WorkerAxis
from ssdtrain.tools.search.runner import PlannedStep
from ssdtrain.tools.search.search import partition
from ssdtrain.tools.search.trace import trace
from tests.ranks import ROOT, run_ranks

SCRIPTS = ROOT / "recipes" / "bench" / "search"


def test_losses_of_four_ranks(tmp_path: Path) -> None:
    """More models: `recipes/bench/search/planned_ranks.py`."""
    out, names = tmp_path / "out.json", ["mlp", "halo"]
    run_ranks([SCRIPTS / "planned_ranks.py", out, *names], tmp_path, num_ranks=4)
    found = json.loads(out.read_text())
    assert set(found) == set(names)
    assert all(one["worst"] < 1e-12 for one in found.values())
    assert found["mlp"]["cut"] == 2
    assert found["mlp"]["sent_bytes"] == found["mlp"]["expected_bytes"] > 0


def test_a_printed_layout_trains(tmp_path: Path) -> None:
    """Others: `recipes/bench/search/launch_ranks.py`."""
    out, name = tmp_path / "out.json", "a decoder of its own"
    run_ranks([SCRIPTS / "launch_ranks.py", out, name], tmp_path, num_ranks=4)
    assert set(json.loads(out.read_text())) == {name}


def test_another_step_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
        x = torch.empty(4, 8)
        problem = trace(model, lambda: model(x).square().mean())
        found = partition(problem, [WorkerAxis(2)])
        mesh = object.__new__(DeviceMesh)
        with (
            pytest.raises(ConfigError, match="operator 0 of the plan"),
            PlannedStep(problem, found, mesh),
        ):
            torch.relu(x)
        with (
            pytest.raises(ConfigError, match="the step ran 0"),
            PlannedStep(problem, found, mesh),
        ):
            pass
