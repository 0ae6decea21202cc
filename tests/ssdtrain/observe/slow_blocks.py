"""Layers that take their time in virtual time, and training them."""

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain
from tests.ssdtrain.virtual_time import VirtualTime

WIDTH, ROWS = 64, 32
FORWARD_S = 1.0


class Slowly(torch.autograd.Function):
    """Saves what it is given, and takes so long in virtual time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: VirtualTime) -> Tensor:
        ctx.save_for_backward(x)
        ctx.clock = clock
        clock.sleep(FORWARD_S)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.clock.sleep(2 * FORWARD_S)
        return gradient * x.cos(), None


class Block(nn.Module):
    """Four operators that nothing but a re-run of the whole makes again."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self._clock: Future[VirtualTime] = Future()  # nobody compares its insides
        self._clock.set_result(clock)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(4):
            x = Slowly.apply(x, self._clock.result())
        return x


def run(
    clock: VirtualTime,
    budget: int | None,
    num_steps: int = 60,
    kind: type[nn.Sequential] = nn.Sequential,
    **others: Any,
) -> Any:
    torch.manual_seed(0)
    start = nn.Linear(WIDTH, WIDTH)
    model = kind(start, *(Block(clock) for _ in range(6)))
    settings: dict[str, Any] = {
        "max_overhead": 0.01,
        "target": "host",
        "min_bytes": 1,
        "plan": "auto",
    }
    if budget is None:
        settings.update(plan="keep-all", recompute="off", verify="checksum")
    else:
        settings.update(memory_budget_bytes=budget)
    settings |= others
    found, times, x = [], [], torch.randn(ROWS, WIDTH)
    with ssdtrain.offload(model, **settings) as session:
        for _ in range(num_steps):
            begun = clock.monotonic()
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is None:
                        continue
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
            times.append(clock.monotonic() - begun)
        return found, times, session.plan, session.steps, session.is_settled
