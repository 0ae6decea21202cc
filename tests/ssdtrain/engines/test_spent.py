"""Steps end though an output that no loss used is alive: [Note: spent lanes] in
ssdtrain/engines/hints.py."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from tests.ssdtrain.bits import same_bits

WIDTH, NUM_STEPS = 16, 12
SETTINGS: dict[str, Any] = {"target": "host", "min_bytes": 1, "max_overhead": 0.5}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.pool = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)
        self.begin: Callable[[], Any] = int

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.begin()
        for block in self.blocks:
            x = block(x)
        return self.head(x), torch.tanh(self.pool(x))


class Loop:
    """Steps whose graphs live on in an attribute."""

    def __init__(self) -> None:
        self.alive: Any = None

    def unused_output(self, model: nn.Module, x: Tensor) -> None:
        self.alive = model(x)
        self.alive[0].square().mean().backward()

    def retained_loss(self, model: nn.Module, x: Tensor) -> None:
        logits, pooled = model(x)
        self.alive = logits.square().mean()
        self.alive.backward(retain_graph=True)
        pooled.square().mean().backward()

    def comes_back(self, model: nn.Module, x: Tensor) -> None:
        """The optimizer raises no version, so torch does not mind."""
        loss = model(x)[0].square().mean()
        if self.alive is not None:
            self.alive.backward()
        loss.backward(retain_graph=True)
        self.alive = loss

    def comes_back_first(self, model: nn.Module, x: Tensor) -> None:
        """Before the next forward has saved anything."""
        if self.alive is not None:
            model.begin = self.alive.backward
        self.alive = model(x)[0].square().mean()
        bias = model.head.bias  # what no layer runs again for
        (bias.grad,) = torch.autograd.grad(self.alive, bias, retain_graph=True)

    def output_is_next_input(self, model: nn.Module, x: Tensor) -> None:
        """So what is alive is saved again, as by a critic that has stepped alone."""
        if self.alive is not None:
            x = self.alive[1].detach()
        self.alive = model(x)
        self.alive[0].square().mean().backward(retain_graph=True)


Step = Callable[[Loop, nn.Module, Tensor], None]
STEPS = [
    Loop.unused_output,
    Loop.retained_loss,
    Loop.comes_back,
    Loop.comes_back_first,
    Loop.output_is_next_input,
]


def train(step: Step, settings: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model, loop = TwoHeads(), Loop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    session = None if settings is None else ssdtrain.offload(model, **settings)
    gradients = []
    for _ in range(NUM_STEPS):
        step(loop, model, torch.randn(8, WIDTH))
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.close()
    return [*gradients, *map(Tensor.detach, model.parameters())], session


@pytest.mark.parametrize("recompute", ["auto", "regions"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_steps_end_and_a_plan_is_made(
    step: Step, recompute: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, _ = train(step, None)
    with caplog.at_level(logging.WARNING):
        ours, session = train(step, {**SETTINGS, "recompute": recompute})
    assert same_bits(ours, theirs)
    assert len(session.steps) >= NUM_STEPS - 1
    assert session.plan is not None
    assert "no step is reported or planned" not in caplog.text


def test_what_others_hold_of_a_spent_lane_is_in_the_profile(roomy: None) -> None:
    """Though its step is over when the profile is made of it."""
    _, session = train(Loop.unused_output, SETTINGS)
    profile = session.profile
    assert profile is not None
    assert any(item.frame_marks for items in profile.kinds.values() for item in items)
