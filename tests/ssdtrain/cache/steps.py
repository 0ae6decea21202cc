"""Training steps that a test compares, one by one."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Step = Callable[[nn.Module, int], Tensor]
"""A model and the number of a step give a loss."""


def train(net: nn.Module, step: Step, num_steps: int) -> Iterator[list[Tensor]]:
    """Loss and gradients of every step; the weights move on."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(num_steps):
        loss = step(net, number)
        loss.backward()
        yield [loss.detach(), *(p.grad.clone() for p in net.parameters())]
        optimizer.step()
        optimizer.zero_grad()
