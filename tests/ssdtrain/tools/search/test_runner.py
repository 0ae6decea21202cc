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
from tests.ranks import run_ranks

HERE = Path(__file__).parent


def test_four_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_ranks([HERE / "sample_ranks.py", out], tmp_path, num_ranks=4)
    found = json.loads(out.read_text())
    mlp, halo = found["planned"]["mlp"], found["planned"]["halo"]
    assert max(mlp["worst"], halo["worst"]) < 1e-12
    assert mlp["cut"] == 2
    assert mlp["sent_bytes"] == mlp["expected_bytes"] > 0
    assert found["losses"][-1] < found["losses"][0]


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
