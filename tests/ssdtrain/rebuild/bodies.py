"""A network whose body is chosen, trained with and without a session."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.counters import StepReport
from tests.ssdtrain.bits import same_bits

ROWS, WIDTH = 6, 16
NUM_STEPS = 6
PLANS: list[dict[str, Any]] = [
    {"plan": "keep-all"},
    {"plan": "offload-all", "window_bytes": 1},
    {"plan": "auto", "max_overhead": 1.0},
]
Body = Callable[["Net", Tensor, int], Tensor]


class Net(nn.Module):
    """Two linears and whatever the body does between them in step `step`."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-5)
        self.rms = nn.RMSNorm(WIDTH, eps=1e-5)
        self.drops = nn.ModuleList(nn.Dropout(0.4) for _ in range(6))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0
        self.body = body
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x, self.step).square().sum()


def source(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def once(net: Net, x: Tensor) -> None:
    net(x).backward()


Train = Callable[[Net, Tensor], None]


def train(
    body: Body, settings: dict[str, Any] | None, step: Train = once
) -> tuple[list[list[Tensor]], list[StepReport]]:
    """Gradients of every step, and the reports."""
    net = Net(body)
    torch.manual_seed(3)
    session = None
    if settings is not None:
        session = ssdtrain.offload(net, target="host", min_bytes=0, **settings)
    found = []
    try:
        for net.step in range(NUM_STEPS):
            net.zero_grad()
            step(net, source(net.step))
            found.append([p.grad for p in net.parameters() if p.grad is not None])
            with torch.no_grad():
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(1e-3 * parameter.grad)
        reports = [] if session is None else list(session.steps)
    finally:
        if session is not None:
            session.close()
    return found, reports


def check(body: Body, step: Train = once) -> list[StepReport]:
    """Equal under every plan; the reports of the last."""
    theirs, _ = train(body, None, step)
    reports: list[StepReport] = []
    for settings in PLANS:
        ours, reports = train(body, settings, step)
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert same_bits(mine, other), (settings, number)
    return reports


class Pure(nn.Module):
    """Temporaries that no other code can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.factor = 1.0
        self.bound = 100.0

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.factor)
        return self.weight * scaled.to(x.dtype)
