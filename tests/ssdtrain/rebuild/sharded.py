"""A few steps of a model whose parameters FSDP2 shards."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain


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
