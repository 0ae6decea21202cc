"""A small model, a batch of it, and what a step gives."""

import torch
from torch import Tensor, nn

ROWS, WIDTH = 32, 64


def mlp(num_layers: int = 4) -> nn.Sequential:
    """(rows, WIDTH) to the same. Each layer saves its input, and what its GELU gets."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_layers)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


def batch() -> Tensor:
    """(ROWS, WIDTH)"""
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def gradients_of(net: nn.Module) -> list[Tensor]:
    """Of the batch and of the parameters, after one step."""
    x = batch()
    net.zero_grad()
    net(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
