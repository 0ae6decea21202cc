"""Stored attention between compiled functions, which put dispatcher state back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from tests.ssdtrain.cache.steps import train
from tests.ssdtrain.regions.test_attention import (
    HEADS,
    NUM_OBSERVED,
    NUM_STEPS,
    SETTINGS,
    Block,
    Net,
    mean,
    planned,
    run_both,
)

# Dynamo looks at `.grad` of whatever it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    return x * angle.cos() + x.flip(-1) * angle.sin()


def feed(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
    found: Tensor = down(F.gelu(up(x)))
    return found


class Rotation(torch.autograd.Function):
    """Saves what it needs behind its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angle: Tensor) -> Tensor:
        ctx.save_for_backward(angle)
        return x * angle

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (angle,) = ctx.saved_tensors
        return grads[0] * angle, None


class Before(Block):
    """What comes before attention, and what comes behind it, may be functions."""

    rotate: Any = staticmethod(rotate)
    feed: Any = staticmethod(feed)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 2 * HEADS, -1)
        q, k, v = parts.transpose(1, 2).split([HEADS, HEADS // 2, HEADS // 2], 1)
        found = self.attend(self.rotate(q, angle), self.rotate(k, angle), v)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, -1))
        result: Tensor = x + self.feed(x, self.up, self.down)
        return result


class BeforeAFunction(Before):
    rotate = Rotation.apply


class BehindCompiled(Before):
    rotate = staticmethod(torch.compile(rotate, backend="aot_eager"))


class BeforeCompiled(Before):
    feed = staticmethod(torch.compile(feed, backend="aot_eager"))


@pytest.mark.parametrize("block", [BeforeAFunction, BehindCompiled, BeforeCompiled])
def test_functions_around_it(
    block: type[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, session = run_both(Net(block, 2), monkeypatch)
    assert told == ["taken"] * 2
    assert session.last_step is not None and not session.last_step.fallbacks
    included = torch._C._dispatch_tls_is_dispatch_key_included
    assert not included(torch._C.DispatchKey.Python)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_inside_compiled_layers_there_is_nothing_to_store() -> None:
    model = Net(num_blocks=2)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with ssdtrain.offload(model, **SETTINGS, recompute="regions") as session:
        for number, _ in enumerate(train(model, mean, NUM_STEPS)):
            if number == NUM_OBSERVED:
                planned(session)
    assert session.profile is not None and session.last_step is not None
    assert not any(run.parts for run in session.profile.regions["model/0"])
    assert not session.last_step.fallbacks
