"""Recipes of dropout: the mask from the generator's state, the output from the mask.

[Note: dropout masks]
A mask has no producer node to go by: it is not differentiable. But while the forward
of an `nn.Dropout` runs, the first tensor without a node that autograd saves, as large
as the input, is what the operator drew (the mask on CUDA, the scaled noise on a CPU).
The generator's state from before the call (16 bytes on CUDA) draws it again. The
state is whatever the model's own tracker of random states had set. Drawing in backward
puts the state back, so the sequence of random numbers stays that of the plain run.
(tests/ssdtrain/remat/test_dropout.py)
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ssdtrain.remat.expression import Expression, Layout, State
from ssdtrain.remat.producer import Producer
from ssdtrain.remat.registry import Registry

DROPOUT = Registry()
MASK = "dropout mask"
VECTOR_BYTES = 16


class Draw(NamedTuple):
    """A dropout about to draw."""

    state: State
    layout: Layout
    """Of its input."""
    device: torch.device
    rate: float


class Draws:
    """Which dropout is running, one per thread."""

    def __init__(self) -> None:
        self._running = threading.local()

    @contextmanager
    def around(self, module: nn.Dropout, source: Tensor) -> Iterator[None]:
        """Around the forward of a dropout."""
        self._running.draw = _draw(module, source)
        try:
            yield
        finally:
            self._running.draw = None

    def expression(self, tensor: Tensor) -> Expression | None:
        """How to draw this tensor again, if the running dropout has just drawn it."""
        draw: Draw | None = getattr(self._running, "draw", None)
        if draw is None or tensor.grad_fn is not None or tensor._base is not None:
            return None
        self._running.draw = None
        if tuple(tensor.shape) != draw.layout.shape or tensor.device != draw.device:
            return None
        return Expression(
            recipe=MASK,
            function=draw_mask if draw.device.type == "cuda" else draw_noise,
            operands=(draw.state,),
            constants=(
                ("device", draw.device),
                ("layout", draw.layout),
                ("rate", draw.rate),
            ),
        )


def _draw(module: nn.Dropout, source: Tensor) -> Draw | None:
    draws = module.training and not module.inplace and 0.0 < module.p < 1.0
    if not draws or not torch.is_grad_enabled() or source.layout is not torch.strided:
        return None
    if type(source) is not Tensor:
        return None
    if source.device.type == "cuda":
        # The kernel draws in the order of its vectors, whose width is this address's.
        aligned = source.data_ptr() % VECTOR_BYTES == 0
        state = state_of_cuda(source.device) if aligned else None
    elif source.device.type == "cpu":
        generator = torch.default_generator
        state = State(generator, generator.get_state())
    else:
        state = None
    return (
        None
        if state is None
        else Draw(state, Layout.of(source), source.device, module.p)
    )


def state_of_cuda(device: torch.device) -> State | None:
    """The present state; None while a graph is captured (it may not be read then)."""
    if torch.cuda.is_current_stream_capturing():
        return None
    generator = torch.cuda.default_generators[device.index or 0]
    return State(generator, generator.get_state())


@contextmanager
def rewound(state: State) -> Iterator[None]:
    """The generator as it was; put back behind."""
    present = state.generator.get_state()
    state.generator.set_state(state.state)
    try:
        yield
    finally:
        state.generator.set_state(present)


def _like(layout: Layout, device: torch.device) -> Tensor:
    return torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=device
    )


def draw_mask(
    state: State, *, device: torch.device, layout: Layout, rate: float
) -> Tensor:
    """CUDA: the fused kernel's mask (bool); the values that it drops do not matter."""
    with rewound(state):
        return torch.native_dropout(_like(layout, device), rate, True)[1]


def draw_noise(
    state: State, *, device: torch.device, layout: Layout, rate: float
) -> Tensor:
    """CPU: 0 or 1 / (1 - rate), in the input's dtype."""
    with rewound(state):
        # empty_like, as the operator does: it makes a sliced input's noise dense.
        noise = torch.empty_like(_like(layout, device))
        return noise.bernoulli_(1 - rate).div_(1 - rate)


@DROPOUT.register("NativeDropoutBackward0")
def dropped(node: Producer) -> Expression | None:
    """The output of a fused dropout, from its input and the mask it saved."""
    rate = node.constant("p")
    if not 0.0 < rate < 1.0:
        return None
    return node.rebuilt_by(
        torch.ops.aten.native_dropout_backward,
        node.edge(0),
        node.saved("result1"),
        scale=1.0 / (1.0 - rate),
    )
