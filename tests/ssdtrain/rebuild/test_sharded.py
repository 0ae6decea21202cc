"""Recipes under FSDP2: behind its identity functions, and with gathered parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import ssdtrain
from ssdtrain.errors import InPlaceError
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.rebuild.sharded import trained

pytestmark = pytest.mark.usefixtures("mesh")
WIDTH = 16


class Block(nn.Module):
    """Norm, MLP, dropout, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def train(dtype: torch.dtype | None, settings: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for block in model[:2]:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    torch.manual_seed(1)
    return trained(model, lambda: torch.randn(8, WIDTH), settings)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fully_sharded(dtype: torch.dtype | None) -> None:
    theirs, _ = train(dtype, None)
    for settings in ({"plan": "keep-all"}, {"plan": "offload-all", "window_bytes": 1}):
        ours, report = train(dtype, settings)
        assert same_bits(ours, theirs)
        for recipe in ("GeluBackward0", "NativeLayerNormBackward0", "dropout mask"):
            assert report.recipes[recipe] > 0
        assert not report.fallbacks


def test_no_region_runs_again_with_shards_that_an_optimizer_has_written() -> None:
    """Its weights would be gathered from the new ones, and nothing counts that. FSDP2
    itself goes on with the old activations and the new weights."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Block()))
    for block in model[1]:
        fully_shard(block)
    fully_shard(model)
    settings = {"target": "host", "min_bytes": 0, "plan": "keep-all"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, WIDTH)
    with ssdtrain.offload(model, **settings, recompute="regions"):
        model(x).square().mean().backward()
        loss = model(x).square().mean()
        optimizer.step()
        with pytest.raises(InPlaceError, match="changed between its forward and its"):
            loss.backward()
        optimizer.zero_grad()
        model(x).square().mean().backward()


@pytest.mark.parametrize("plan", ["keep-all", "offload-all"])
def test_regions_run_again_with_gathered_weights(plan: str) -> None:
    """A re-run comes behind the gathering before its backward."""
    theirs, _ = train(torch.bfloat16, None)
    ours, report = train(torch.bfloat16, {"plan": plan, "recompute": "regions"})
    assert same_bits(ours, theirs)
    assert report.recipes["region"] > 0 and not report.fallbacks
