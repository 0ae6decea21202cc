"""What is stored narrow in the place of a widened tensor comes back bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.rebuild.recipes import narrow
from tests.ssdtrain.bits import same_bits

EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
"""All patterns of 16 bits."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_comes_back(dtype: torch.dtype) -> None:
    matrix = EVERY.view(dtype).view(256, 256)
    scalar = matrix[-1, -1]
    for source in (EVERY.view(dtype), matrix, matrix.t(), matrix[5:], scalar):
        wide = source.float()
        before, found = wide.clone(), narrow(wide, dtype)
        assert found.dtype == dtype and found.stride() == wide.to(dtype).stride()
        assert found.untyped_storage().nbytes() == 2 * wide.numel()
        assert same_bits([found.float()], [wide]) and same_bits([wide], [before])


SETTINGS: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 0,
    "recompute": "auto",
    "verify": "shadow",
}


class Widened(nn.Module):
    """Its float32 product is saved, and its bfloat16 source is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
        return y.float().square().sum()


@pytest.mark.parametrize("plan", ["keep-all", "offload-all", "auto"])
def test_a_step_that_is_no_number_is_the_plain_runs(plan: str) -> None:
    """NaN has many bits, and a CPU's cast to bfloat16 knows one."""
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = Widened()
        session = ssdtrain.offload(net, plan=plan, **SETTINGS) if ours else None
        for number in range(5):
            x = torch.randn(4, 8)
            if number > 2:
                x[0, 0] = float("nan")
            net(x).backward()
        found.append([p.grad for p in net.parameters()])
        if session is not None:
            reports = session.steps
            session.close()
            assert any("ToCopyBackward0" in one.recipes for one in reports)
    assert same_bits(*found)
