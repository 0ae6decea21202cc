"""The example in docs/recipes.md runs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.rebuild.recipes import REGISTERED
from tests.ssdtrain.bits import same_bits

DOCS = Path(__file__).resolve().parents[3] / "docs" / "recipes.md"


@pytest.fixture
def example() -> Iterator[dict[str, Any]]:
    (text,) = re.findall(r"```python\n(import torch.*?)```", DOCS.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(text, str(DOCS), "exec"), names)
    yield names
    del REGISTERED["SquaredReLUBackward"]


def test_example(example: dict[str, Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(example["SquaredReLU"].apply(y, 0.5)).sum()

    net, x = Net(), torch.randn(4, 8)
    net(x).backward()
    theirs = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with ssdtrain.offload(net, target="host", plan="keep-all", min_bytes=0) as session:
        net(x).backward()
    assert session.last_step is not None
    assert session.last_step.recipes["SquaredReLUBackward"] == 4 * 8 * 4
    ours = [p.grad for p in net.parameters()]
    assert same_bits(ours, theirs)
