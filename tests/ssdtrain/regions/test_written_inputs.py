"""A region that writes to its argument does not run again: past the version counter, or
from a moment on, when it is trusted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from tests.ssdtrain.graphs.unusual import Written

NUM_STEPS, TURN = 6, 4


class Layer(nn.Module):
    """Writes as a kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.changes = False

    def forward(self, x: Tensor) -> Tensor:
        x = Written.apply(x, 1.5)
        return x + self.b(torch.tanh(self.a(x)))


class Later(Layer):
    """Changes its argument in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x * 1.0))
        if self.changes:
            x.mul_(1.5)
        return x + self.b(y)


def gradients(kind: type[Layer], settings: dict[str, Any] | None) -> list[Tensor]:
    """Of every step; layers begin to change their argument at `TURN`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(kind() for _ in range(3)))
    session = None if settings is None else ssdtrain.offload(model, **settings)
    found = []
    for number in range(NUM_STEPS):
        for layer in model[1:]:
            layer.changes = number >= TURN  # type: ignore[assignment]
        model(torch.randn(4, 32, 64)).square().mean().backward()
        found += [each.grad.clone() for each in model.parameters()]
        model.zero_grad()
    if session is not None:
        session.close()
    return found


@pytest.mark.parametrize("kind", [Layer, Later])
@pytest.mark.parametrize("plan", ["offload-all", "keep-all"])
def test_a_written_argument_is_not_read_again(kind: type[Layer], plan: str) -> None:
    settings = {"target": "host", "plan": plan, "recompute": "regions", "min_bytes": 0}
    ours, theirs = gradients(kind, settings), gradients(kind, None)
    assert all(map(torch.equal, ours, theirs))
