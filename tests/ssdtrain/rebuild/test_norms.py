"""Where a normalization's epsilon comes from: [Note: epsilon] in frame.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.counters import Fallback, StepReport
from tests.ssdtrain.bits import same_bits

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
    assert same_bits(ours, theirs)
    return session.steps[0]


def recipes_of(net: Net) -> dict[str, int]:
    """Bytes by recipe."""
    return report_of(net).recipes


def another(net: Net, a: Tensor) -> Tensor:
    return F.layer_norm(a, (WIDTH,), net.norm.weight, None, 1e-1)


def unowned(net: Net, a: Tensor) -> Tensor:
    return F.layer_norm(a, (WIDTH,), net.weight, None, 1e-5)


def by_keyword(net: Net, a: Tensor) -> Tensor:
    return F.layer_norm(a, (WIDTH,), weight=net.weight, eps=3e-2)


@pytest.mark.parametrize(
    "body",
    [
        lambda net, a: net.norm(a),
        lambda net, a: net.plain(a),
        another,
        unowned,
        by_keyword,
    ],
)
def test_the_call_tells(body: Any) -> None:
    assert recipes_of(Net(body))[NAME] > 0


def past_the_function(net: Net, a: Tensor) -> Tensor:
    return torch.layer_norm(a, (WIDTH,), net.norm.weight, net.norm.bias, 1e-5)


def test_a_call_past_the_function_is_refused() -> None:
    report = report_of(Net(past_the_function))
    assert NAME not in report.recipes
    assert report.fallbacks[Fallback.RECIPE_REFUSED.value] == 1


def test_without_a_weight_there_is_no_recipe() -> None:
    assert NAME not in recipes_of(Net(lambda net, a: net.bare(a)))


def test_rms_norm_tells_its_epsilon() -> None:
    """Where the device has no fused kernel, its parts are rebuilt."""
    assert recipes_of(Net(lambda net, a: net.rms(a)))["MulBackward0"] > 0


def test_a_guess_could_not_be_verified() -> None:
    """Why there is no search for an epsilon that fits."""
    x = torch.randn(64, 512)
    tiny, small = (F.layer_norm(x, (512,), eps=eps) for eps in (1e-12, 1e-8))
    assert torch.equal(tiny, small)
