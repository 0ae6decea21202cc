"""The model of the placement benchmarks: the blocks of `ssdtrain plan`, trained.

Shapes: B batch, S sequence, H hidden.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.bench.harness.timing import Clock, Peak
from ssdtrain.tools.report import subject

SETTLE_S = 40.0
"""A session may take so long until its steps are timed."""
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    """One model size and its input."""

    hidden: int
    num_layers: int
    batch: int
    sequence: int

    @property
    def name(self) -> str:
        """Such as 8192x4."""
        return f"{self.hidden}x{self.num_layers}"


class Blocks(subject.Blocks):
    """The blocks, which may be checkpointed one by one."""

    recompute = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to a scalar."""
        for block in self.blocks:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x.float().square().mean()


def build(hidden: int, num_layers: int, device: torch.device) -> Blocks:
    """Seeded blocks in bf16 with gradients allocated."""
    torch.manual_seed(0)
    with device:
        model = Blocks(hidden, num_layers).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def input_of(size: Size, device: torch.device) -> Tensor:
    """(B, S, H), seeded, in bf16."""
    torch.manual_seed(1)
    shape = (size.batch, size.sequence, size.hidden)
    return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)


class Step(NamedTuple):
    """One step: its marks, bytes above the level before it, and its loss."""

    marks: tuple[Any, Any, Any, Any]
    """At its begin, behind forward, behind backward, at its end."""
    start_bytes: int
    """When backward begins."""
    peak_bytes: int
    """Of forward and backward."""
    loss: Tensor


class Steps:
    """Training steps of blocks: forward, backward, SGD. None waits for the device."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.clock = Clock(device)
        self.model = build(size.hidden, size.num_layers, device)
        self.x = input_of(size, device)

    def step(self, forward: Forward | None = None) -> Step:
        """One step, of the model itself or of what stands for it."""
        forward = forward or self.model
        memory = Peak(self.device)
        begin = self.clock.mark()
        loss = forward(self.x)
        middle = self.clock.mark()
        start = memory.now
        loss.backward()
        behind = self.clock.mark()
        peak = memory.most
        self.x.grad = None
        update(self.model.parameters())
        marks = (begin, middle, behind, self.clock.mark())
        return Step(marks, start, peak, loss.detach())

    def ms(self, step: Step) -> float:
        """All of a step."""
        return self.clock.ms(step.marks[0], step.marks[-1])

    def measured(
        self,
        num_steps: int,
        settles: Callable[[], bool] = bool,
        forward: Forward | None = None,
    ) -> dict[str, Any]:
        """Median step, forward and backward time, peaks and losses.

        Args:
            settles: asked before each step whether it is one more that is not timed.
            forward: in the place of the model's.
        """
        done: list[Step] = []
        num_left = num_steps
        while num_left:
            num_left -= not settles()
            done.append(self.step(forward))
        timed = done[-num_steps:]
        marks = [step.marks for step in timed]
        return {
            **self.clock.times(marks[max(1, num_steps // 3) :]),
            "peak_gb": max((s.peak_bytes for s in timed[1:]), default=0) / 1e9,
            "backward_start_gb": max((s.start_bytes for s in timed[1:]), default=0)
            / 1e9,
            # Of steps that every column has.
            "losses": [step.loss.item() for step in done[:num_steps]],
            "num_warm_up": len(done) - num_steps,
        }


@torch.no_grad()
def update(parameters: Iterable[Tensor], rate: float = 1e-3) -> None:
    """SGD, gradients kept allocated so that they never count as activations."""
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_add_(parameters, gradients, alpha=-rate)
    torch._foreach_zero_(gradients)


def settling(session: Any, limit_s: float) -> Callable[[], bool]:
    """Whether steps of a session are not to be timed yet: those that are observed or
    measured come before its first plan, and those of a plan are judged. None: there is
    no session, and nothing to wait for."""
    until = time.monotonic() + limit_s
    return lambda: (
        session is not None and not session.is_settled and time.monotonic() < until
    )
