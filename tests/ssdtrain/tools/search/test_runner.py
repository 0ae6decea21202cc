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
    planned = found["planned"]
    assert list(planned) == ["mlp", "halo", "attention", "recurrent", "convolutions"]
    assert max(one["worst"] for one in planned.values()) < 1e-12
    for name in ("mlp", "attention", "recurrent", "convolutions"):
        one = planned[name]
        assert one["cut"] >= 1
        assert one["sent_bytes"] == one["expected_bytes"] > 0
    assert list(found["losses"]) == ["FSDP2", "tensor", "DeepSpeed"]
    for losses in found["losses"].values():
        assert losses[-1] < losses[0]


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
