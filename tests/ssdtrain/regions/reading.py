"""Layers that read something, trained with and without regions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from tests.ssdtrain.regions.settings import SETTINGS

WIDTH, ROWS, NUM_STEPS = 8, 4, 4
Read = Callable[[Any, Tensor], Tensor]
"""What a layer does with its attribute `thing`, or with others."""


def nothing(*_: Any) -> None:
    """Makes, changes, sets nothing."""


class Layer(nn.Module):
    """Has something, and reads it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.thing = make()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.reads(self.up(x))))

    reads: Callable[[Tensor], Tensor]


class Model(nn.Module):
    """Sets something for its layers, and sets it back."""

    def __init__(self, kind: type[Layer], make: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(make) for _ in range(2))
        self.sets: list[Callable[[], Any]] = [nothing, nothing]

    def forward(self, x: Tensor) -> Tensor:
        begin, end = self.sets
        begin()
        try:
            for layer in self.layers:
                x = layer(x)
            return x
        finally:
            end()


def train(
    read: Read,
    offloaded: bool,
    *,
    make: Callable[[], Any] = nothing,
    change: Callable[[Any], Any] = nothing,
    inside: tuple[Callable[[], Any], ...] = (nothing, nothing),
    around: tuple[Callable[[], Any], ...] = (nothing, nothing),
    backward: Callable[[Tensor], Any] = Tensor.backward,
    **others: Any,
) -> tuple[list[Tensor], dict[str, str]]:
    """Gradients of every step, and why regions were refused.

    Args:
        read: what layers do.
        offloaded: with a session, whose regions all run again.
        make: gives a layer's attribute.
        change: to it, between the third forward and its backward.
        inside: set and set back by the model's own forward.
        around: likewise by the program.
        backward: runs that of a loss.
        others: more attributes of layers.
    """
    torch.manual_seed(0)
    kind = type("Reading", (Layer,), {"reads": read, "__module__": read.__module__})
    net = Model(kind, make)
    net.sets[:] = inside
    for layer in net.layers:
        vars(layer).update(others)
    session = ssdtrain.offload(net, **SETTINGS) if offloaded else None
    begin, end = around
    found = []
    try:
        for number in range(NUM_STEPS):
            torch.manual_seed(number)
            x = torch.randn(ROWS, WIDTH, device="cpu", dtype=torch.float32)
            begin()
            try:
                y = net(x)
            finally:
                end()
            if number == 2:
                for layer in net.layers:
                    change(layer.thing)
            backward(y.square().mean())
            for parameter in net.parameters():
                assert parameter.grad is not None
                found.append(parameter.grad.clone())
                parameter.grad = None
        return found, {} if session is None else session.regions_refused
    finally:
        if session is not None:
            session.close()
