"""Where a normalization's epsilon comes from: [Note: epsilon]."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.counters import Fallback, StepReport
from ssdtrain.remat.constants import ModuleConstants
from ssdtrain.remat.producer import Epsilon

WIDTH = 8
NAME = "NativeLayerNormBackward0"


class Net(nn.Module):
    """A norm, however the body applies it, between two linears."""

    def __init__(self, body: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.rms = nn.RMSNorm(WIDTH)
        self.plain = nn.LayerNorm(WIDTH, eps=1e-6, bias=False)
        self.bare = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, self.first(x))).square().sum()


def report_of(net: Net) -> StepReport:
    """What recipes did; the gradients must be those of the plain run."""
    x = torch.randn(4, WIDTH)

    def gradients() -> list[Tensor]:
        net.zero_grad()
        net(x).backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    theirs = gradients()
    with ssdtrain.offload(net, target="host", plan="keep-all", min_bytes=0) as session:
        ours = gradients()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return session.steps[0]


def recipes_of(net: Net) -> dict[str, int]:
    """Bytes by recipe."""
    return report_of(net).recipes


@pytest.mark.parametrize("name", ["norm", "plain"])
def test_owner_tells(name: str) -> None:
    assert recipes_of(Net(lambda net, a: getattr(net, name)(a)))[NAME] > 0


def unowned(net: Net, a: Tensor) -> Tensor:
    return F.layer_norm(a, (WIDTH,), net.weight, None, 1e-5)


def no_weight(net: Net, a: Tensor) -> Tensor:
    return net.bare(a)


@pytest.mark.parametrize("body", [unowned, no_weight])
def test_without_an_owner_it_is_refused(body: Any) -> None:
    report = report_of(Net(body))
    assert NAME not in report.recipes
    assert report.fallbacks[Fallback.RECIPE_REFUSED.value] == 1


def test_two_owners_that_disagree_are_refused() -> None:
    net = Net(lambda net, a: net.norm(a))
    net.plain = nn.LayerNorm(WIDTH, eps=1e-5)
    net.plain.weight = net.norm.weight
    assert NAME not in recipes_of(net)
    net.plain.eps = net.norm.eps
    assert recipes_of(net)[NAME] > 0


def test_a_guess_could_not_be_verified() -> None:
    """Why there is no search for an epsilon that fits."""
    x = torch.randn(64, 512)
    tiny, small = (F.layer_norm(x, (512,), eps=eps) for eps in (1e-12, 1e-8))
    assert torch.equal(tiny, small)


def test_epsilon_of_none_is_known_and_is_none() -> None:
    constants, rms = ModuleConstants(), nn.RMSNorm(WIDTH)
    constants.collect([rms])
    assert constants.epsilon(rms.weight) == Epsilon(None)
    assert constants.epsilon(nn.Parameter(torch.ones(WIDTH))) is None


def test_epsilon_follows_a_replaced_weight() -> None:
    constants, norm = ModuleConstants(), nn.LayerNorm(WIDTH, eps=0.25)
    constants.collect([norm])
    before = norm.weight
    assert constants.epsilon(before) == Epsilon(0.25)
    norm.weight = nn.Parameter(torch.ones(WIDTH))
    assert constants.epsilon(norm.weight) == Epsilon(0.25)
