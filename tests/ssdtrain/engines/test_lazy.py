"""Lazy modules get their weights and buffers in the first forward, which may come
after `offload`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from tests.ssdtrain.bits import same_bits

WIDTH = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "moved": {"plan": "offload-all"},
    "regions": {"plan": "offload-all", "recompute": "regions"},
    "planned": {},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.LazyLinear(2 * WIDTH), nn.LazyLinear(WIDTH)
        self.norm = nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        return x + self.down(torch.tanh(self.norm(self.up(x))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lazy first": lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d()),
    "blocks": lambda: nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1)),
}


def train(make: Callable[[], nn.Module], settings: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = make()
    session = None
    if settings is not None:
        session = ssdtrain.offload(model, min_bytes=0, **settings)
    found: list[Tensor] = []
    for _ in range(4):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()
    if session is not None:
        session.close()
    assert not any(part._forward_pre_hooks for part in model.modules())
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_a_lazy_model_waits_for_its_first_forward(model: str, settings: str) -> None:
    theirs = train(MODELS[model], None)
    assert theirs
    assert same_bits(train(MODELS[model], SETTINGS[settings]), theirs)


def test_closing_before_the_first_forward_leaves_nothing() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d())
    before = [len(part._forward_pre_hooks) for part in model.modules()]
    ssdtrain.offload(model, max_overhead=0.01, min_bytes=0).close()
    assert before == [len(part._forward_pre_hooks) for part in model.modules()]
