"""[Note: parameters]: weights are never moved and never pinned by an alias."""

import weakref
from typing import Any

import torch
from torch import nn

import ssdtrain
from tests.ssdtrain.bits import same_bits


def swap_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    parameter.data = data


def test_weights_and_their_views_are_not_saved_bytes(everything: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    with ssdtrain.offload(model, **everything) as session:
        x = torch.randn(4, 16, requires_grad=True)
        model(x).sum().backward()
        report = session.last_step
    weights = 2 * 16 * 16 * 4
    assert report is not None
    # Two transposed weights, and the norm's weight and bias.
    assert report.bytes_parameters >= weights
    # x, the norm's input, mean and 1/std, and the second layer's input.
    assert report.bytes_saved == (3 * 4 * 16 + 2 * 4) * 4


def test_gathered_weights_can_be_freed_and_come_back_elsewhere(
    everything: Any,
) -> None:
    """What ZeRO-3 does: data are swapped out after forward, and in for backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    x = torch.randn(3, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    saved = [p.detach().clone() for p in model.parameters()]
    with ssdtrain.offload(model, **everything):
        loss = model(x).square().sum()
        gathered = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
        for parameter in model.parameters():
            swap_data(parameter, torch.empty(0))
        assert all(storage() is None for storage in gathered), "pinned by a handle"
        for parameter, value in zip(model.parameters(), saved, strict=True):
            padded = torch.empty(value.numel() + 5)
            padded[5:] = value.flatten()
            swap_data(parameter, padded[5:].view(value.shape))
        ours = torch.autograd.grad(loss, [x, *model.parameters()])
    for a, b in zip(ours, expected, strict=True):
        assert same_bits(a, b)


def test_buffers_stay(everything: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("table", torch.randn(100, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.table * self.weight) * x).sum()

    model = Scaled()
    with ssdtrain.offload(model, **everything) as session:
        model(torch.ones(8)).backward()
        report = session.last_step
    assert report is not None
    # Only the product is saved bytes; the buffer lives as long as the model.
    assert report.bytes_saved <= 100 * 8 * 4 + 8 * 4
