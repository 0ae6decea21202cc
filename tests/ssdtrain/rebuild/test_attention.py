"""Attention from query, key and value."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from tests.ssdtrain.bits import same_bits

BATCH, HEADS, SEQUENCE, SIZE = 2, 2, 16, 64
WIDTH = HEADS * SIZE


class Net(nn.Module):
    """Causal attention and a projection."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).view(BATCH, SEQUENCE, 3, HEADS, SIZE)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, is_causal=True)
        y = self.proj(y.transpose(1, 2).reshape(BATCH, SEQUENCE, WIDTH))
        return self.drop(y).float().square().sum()


def gradients(net: Net, x: Tensor, num_steps: int) -> list[Tensor]:
    torch.manual_seed(3)
    found = []
    for _ in range(num_steps):
        net.zero_grad()
        net(x).backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [*found, torch.rand(3, device=x.device)]


@pytest.mark.gpu
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_fused_attention_and_masks_on_cuda(rate: float) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    net = Net(rate).to("cuda", torch.bfloat16)
    x = torch.randn(BATCH, SEQUENCE, WIDTH, device="cuda", dtype=torch.bfloat16)
    theirs = gradients(net, x, 2)
    settings: dict[str, Any] = {"target": "host", "plan": "keep-all", "min_bytes": 0}
    settings["recompute"] = "full"
    with ssdtrain.offload(net, **settings) as session:
        ours = gradients(net, x, 2)
    recipes = session.steps[0].recipes
    assert recipes["dropout mask"] > 0
    # With dropout it would have to rewind the process-wide generator.
    assert any("Attention" in name for name in recipes) == (rate == 0), recipes
    assert same_bits(ours, theirs)
