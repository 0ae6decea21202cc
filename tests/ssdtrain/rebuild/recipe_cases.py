"""Small models, one for each recipe, and a run that compares bytes."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

import ssdtrain
from ssdtrain.counters import Fallback, StepReport
from tests.ssdtrain.bits import same_bits

ROWS, WIDTH = 6, 16
REFUSED = Fallback.RECIPE_REFUSED.value


class Net(nn.Module):
    """Linear, the operators under test, linear. Shapes: (ROWS, WIDTH) to a scalar."""

    def __init__(self, body: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-3)
        self.rms = nn.RMSNorm(WIDTH, eps=1e-3)
        self.drop = nn.Dropout(0.4)
        self.act = NewGELUActivation()
        self.last = nn.Linear(WIDTH, WIDTH)
        self._body = body

    def forward(self, x: Tensor) -> Tensor:
        y = self._body(self, self.first(x))
        return self.last(y.reshape(-1, WIDTH)).float().square().sum()


def gated(net: Net, a: Tensor) -> Tensor:
    return F.silu(a) * net.last(a)


def cube(net: Net, a: Tensor) -> Tensor:
    return torch.pow(a, 3.0) * a


# Tensors that nobody saves are passed inside pure code: [Note: unsaved tensors].


class Sigmoids(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = torch.sigmoid(a.square())
        return b * b


class Sums(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        total = torch.add(a.square(), F.gelu(a), alpha=2)
        return total * total


class Differences(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        between = torch.sub(a.square(), F.gelu(a), alpha=2)
        return between * between


class Negated(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = -a.square()
        return b * b


class Copied(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = F.gelu(a).view(a.shape[0], 2, -1).transpose(0, 1).contiguous()
        return b * b


class Widened(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a * a.float().square().mean(-1, keepdim=True).bfloat16()


class Transposed(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = F.gelu(a).view(2, 3, -1).transpose(-1, 0).contiguous()
        return b * b


class Permuted(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = F.gelu(a).view(2, 3, -1).permute(2, 0, -2).contiguous()
        return b * b


class Expanded(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = F.gelu(a).unsqueeze(-2).expand(-1, 2, -1).contiguous()
        return b * b


class Unsqueezed(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = F.gelu(a).t().unsqueeze(-1).contiguous()
        return b * b


class MatrixTransposed(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = F.gelu(a).t().contiguous()
        return b * b


def calls(module: nn.Module) -> Callable[[Net, Tensor], Tensor]:
    """A body that calls the module."""
    return lambda net, a: module(a)


def dropped(net: Net, a: Tensor) -> Tensor:
    return net.drop(F.gelu(a))


@dataclass(frozen=True)
class Case:
    """One recipe and a model that needs it."""

    recipe: str
    body: Callable[[Net, Tensor], Tensor]
    autocast: bool = False
    dtype: torch.dtype = torch.float32


# Constants have values that are not their defaults: one that a recipe drops shows.
CASES = {
    "gelu": Case("GeluBackward0", lambda net, a: F.gelu(a)),
    "gelu tanh": Case("GeluBackward0", lambda n, a: F.gelu(a, approximate="tanh")),
    "silu": Case("SiluBackward0", lambda net, a: F.silu(a)),
    "softplus": Case("SoftplusBackward0", lambda n, a: F.softplus(a, 2.0, 1.0)),
    "hardshrink": Case("HardshrinkBackward0", lambda net, a: F.hardshrink(a, 0.25)),
    "softshrink": Case("SoftshrinkBackward0", lambda net, a: F.softshrink(a, 0.25)),
    "elu": Case("EluBackward0", lambda n, a: torch.ops.aten.elu(a, 0.5, 2.0, 3.0)),
    "leaky relu": Case("LeakyReluBackward0", lambda n, a: F.leaky_relu(a, 0.1)),
    "hardswish": Case("HardswishBackward0", lambda net, a: F.hardswish(a)),
    "hardtanh": Case("HardtanhBackward0", lambda n, a: F.hardtanh(a, -0.5, 0.75)),
    "mish": Case("MishBackward0", lambda net, a: F.mish(a)),
    "glu": Case("GluBackward0", lambda net, a: F.glu(torch.cat((a, 2 * a)), 0)),
    "gated product": Case("MulBackward0", gated),
    "power": Case("PowBackward0", cube),
    "sigmoid": Case("SigmoidBackward0", calls(Sigmoids())),
    "sum": Case("AddBackward0", calls(Sums())),
    "difference": Case("SubBackward0", calls(Differences())),
    "negated": Case("NegBackward0", calls(Negated())),
    "unfused gelu: tanh": Case("TanhBackward0", lambda net, a: net.act(a)),
    "unfused gelu: one more": Case("AddBackward0", lambda net, a: net.act(a)),
    "unfused gelu": Case("MulBackward0", lambda net, a: net.act(a)),
    "layer norm": Case("NativeLayerNormBackward0", lambda net, a: net.norm(a)),
    "rms norm": Case("MulBackward0", lambda net, a: net.rms(a)),
    "copy": Case("CloneBackward0", calls(Copied())),
    "dropout mask": Case("dropout mask", lambda net, a: net.drop(a)),
    "dropout output": Case("MulBackward0", dropped),
    "cast weight": Case("ToCopyBackward0", lambda net, a: a, autocast=True),
    "cast norm": Case("ToCopyBackward0", lambda net, a: net.norm(a), autocast=True),
    "widened": Case(
        "ToCopyBackward0",
        calls(Widened()),
        False,
        torch.bfloat16,
    ),
}


@dataclass(frozen=True)
class Result:
    """What a run gave."""

    gradients: list[Tensor]
    reports: list[StepReport]

    def equals(self, other: "Result") -> bool:
        return same_bits(self.gradients, other.gradients)


def run(case: Case, num_steps: int = 1, **settings: Any) -> Result:
    """Forward and backward with these settings; none: without ssdtrain."""
    net = Net(case.body).to(case.dtype)
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=case.dtype)
    session = ssdtrain.offload(net, target="host", **settings) if settings else None
    gradients, reports = [], []
    for _ in range(num_steps):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
            loss = net(x)
        loss.backward()
        gradients += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    if session is not None:
        reports = list(session.steps)
        session.close()
    return Result(gradients, reports)
