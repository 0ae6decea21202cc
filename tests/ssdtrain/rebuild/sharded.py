"""A few steps of a model whose parameters FSDP2 shards."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import ssdtrain
from tests.ssdtrain.bits import same_bits

NARROW, WIDE = 16, 272
"""Weights of NARROW x WIDE are copied; those of WIDE x WIDE are too large for it."""
BATCH = 8


def trained(
    model: nn.Module, draw: Callable[[], Tensor], settings: dict[str, Any] | None
) -> tuple[list[Tensor], Any]:
    """Losses of three steps, then this rank's part of the parameters; the last step's
    report. settings: of `offload`; None: without ssdtrain."""
    session = None
    if settings is not None:
        session = ssdtrain.offload(model, target="host", min_bytes=0, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for _ in range(3):
        loss = model(draw()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    found += [p.detach().to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    if session is None:
        return found, None
    report = session.last_step
    session.close()
    return found, report


class Wide(nn.Module):
    """A gated layer whose inner product has a large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NARROW, WIDE, bias=False)
        self.wide = nn.Linear(WIDE, WIDE, bias=False)
        self.down = nn.Linear(WIDE, NARROW, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.up(x))
        return x + self.down(F.silu(self.wide(hidden)) * hidden)


def recipes_of_wide(rank: int) -> list[dict[str, int]]:
    """What expensive recipes made where weights are gathered and gone, under two plans;
    every bit is that of plain training."""

    def train(settings: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Wide() for _ in range(3)))
        for block in model:
            fully_shard(block, reshard_after_forward=True)
        fully_shard(model)
        torch.manual_seed(1 + rank)
        return trained(model, lambda: torch.randn(BATCH, NARROW), settings)

    theirs, _ = train(None)
    told = []
    for plan in ("keep-all", "offload-all"):
        ours, report = train({"plan": plan, "recompute": "full"})
        assert same_bits(ours, theirs)
        told.append(dict(report.recipes))
    return told
