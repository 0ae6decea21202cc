"""Any loop: where one step ends and the next begins."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, optimizer

import ssdtrain


class HandWritten:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters: Any) -> None:
        self._parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            parameter.sub_(parameter.grad, alpha=0.1)


OPTIMIZERS = {
    "adamw": lambda p: AdamW(p),
    "fused": lambda p: AdamW(p, fused=True),
    "one by one": lambda p: SGD(p, lr=0.1, foreach=False),
    "hand-written": HandWritten,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_report_for_every_optimizer_step(
    kind: str, everything: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    optim: Optimizer = OPTIMIZERS[kind](model.parameters())
    with ssdtrain.offload(model, **everything) as session:
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(8, 32)).sum().backward()
            optim.step()
            model.zero_grad()
        assert len(session.steps) == 3
        sizes = {report.bytes_saved for report in session.steps}
    assert len(sizes) == 1


def test_the_step_of_another_model_is_not_ours(everything: dict[str, Any]) -> None:
    ours, theirs = nn.Linear(32, 32), nn.Linear(32, 32)
    other = AdamW(theirs.parameters(), fused=True)
    with ssdtrain.offload(ours, **everything) as session:
        for _ in range(3):
            ours(theirs(torch.randn(8, 32))).sum().backward()
            other.step()
        assert len(session.steps) == 1


def test_close_takes_the_hook_back(everything: dict[str, Any]) -> None:
    before = len(optimizer._global_optimizer_post_hooks)
    with ssdtrain.offload(nn.Linear(4, 4), **everything):
        assert len(optimizer._global_optimizer_post_hooks) == before + 1
    assert len(optimizer._global_optimizer_post_hooks) == before
