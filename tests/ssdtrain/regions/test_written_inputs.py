"""A region that writes to its argument does not run again: past the version counter, or
from a moment on, when it is trusted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.errors import InPlaceError
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


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.table = torch.arange(64.0)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table.unsqueeze(0)
        for block in self.blocks:
            x = block(x, rows)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x) * rows.sin())


def test_a_view_of_plain_bytes_is_read_again_unless_they_were_changed() -> None:
    found = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = Scaled()
        session = None
        if offloaded:
            session = ssdtrain.offload(
                model, target="host", plan="keep-all", recompute="regions", min_bytes=0
            )
        gradients = []
        for _ in range(4):
            model(torch.randn(4, 64)).square().mean().backward()
            gradients += [each.grad.clone() for each in model.parameters()]
            model.zero_grad()
        found.append(gradients)
        if session is not None:
            assert session.last_step.bytes_recomputed > 0
            loss = model(torch.randn(4, 64)).square().mean()
            model.table.add_(1.0)
            with pytest.raises(InPlaceError):
                loss.backward()
            session.close()
    assert all(map(torch.equal, *found))
