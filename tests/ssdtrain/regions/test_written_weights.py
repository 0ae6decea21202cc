"""An optimizer writes to weights that a re-run of a graph that is still held reads."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache import regioncall
from ssdtrain.errors import InPlaceError
from tests.ssdtrain.bits import same_bits

ROWS, WIDTH = 4, 8
SETTINGS = {"plan": "keep-all", "recompute": "regions", "min_bytes": 0}


class Shifted(nn.Module):
    """Saves what it has made of its weight, and not the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).sin()


def twice(*, is_ours: bool) -> list[Tensor]:
    """Gradients of two backwards of one graph, a step of the optimizer between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Shifted() for _ in range(3)))
    optimizer = torch.optim.SGD(model[1:].parameters(), 0.1)
    x, found = torch.randn(ROWS, WIDTH), []
    with ssdtrain.offload(model, **SETTINGS) if is_ours else nullcontext():
        loss = model(x).square().mean()
        for _ in range(2):
            loss.backward(retain_graph=True)
            optimizer.step()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def test_what_a_held_graph_needs_is_made_again_before_weights_are_written() -> None:
    assert same_bits(twice(is_ours=True), twice(is_ours=False))


def test_a_forward_with_collectives_does_not_run_again_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other ranks may hold no graph any more, and would not meet its collectives."""
    number = itertools.count()
    monkeypatch.setattr(regioncall, "num_collectives", lambda: next(number))
    with pytest.raises(InPlaceError, match="between its forward and its backward"):
        twice(is_ours=True)


def test_nor_does_one_of_which_no_backward_has_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first forward has shown its collectives."""
    number = itertools.count()
    monkeypatch.setattr(regioncall, "num_collectives", lambda: next(number))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Shifted() for _ in range(3)))
    optimizer = torch.optim.SGD(model[1:].parameters(), 0.1)
    with ssdtrain.offload(model, **SETTINGS):
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        optimizer.step()
        with pytest.raises(InPlaceError, match="between its forward and its backward"):
            loss.backward()
