"""The recipe of a dropout's mask: the generator's state before it drew.

[Note: dropout masks]
A mask has no node: it is not differentiable. But while an `nn.Dropout` runs, the first
tensor without a node that autograd saves, as large as the input, is what the operator
drew: the mask on CUDA, the scaled noise on a CPU. The generator's state from before the
call (16 bytes on CUDA) draws it again, in a generator or a kernel of our own: other
threads may draw from the process's at any moment, so nobody sets that back. Another
thread may also draw between our look at the state and the operator. On CUDA the state
must then have moved by what the operator takes. On a CPU each mask is compared.
(tests/ssdtrain/rebuild/test_dropout.py, tests/ssdtrain/rebuild/test_attacks.py)
"""

import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ssdtrain.rebuild.expression import Expression, GeneratorState, Layout
from ssdtrain.rebuild.graph import notes_of
from ssdtrain.rebuild.modes import unbatched
from ssdtrain.rebuild.recipes import HALF

MASK = "dropout mask"
VECTOR_BYTES = 16


class RunningDropout(NamedTuple):
    """A dropout about to draw."""

    state: GeneratorState
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
        draw: RunningDropout | None = getattr(self._running, "draw", None)
        if draw is None or tensor.grad_fn is not None or tensor._base is not None:
            return None
        self._running.draw = None
        if tuple(tensor.shape) != draw.layout.shape or tensor.device != draw.device:
            return None
        constants = (
            ("device", draw.device),
            ("layout", draw.layout),
            ("rate", draw.rate),
        )
        if draw.device.type == "cpu":
            return Expression(
                recipe=MASK,
                function=draw_noise,
                operands=(draw.state,),
                constants=constants,
                is_compared_always=True,
            )
        if not _alone_has_drawn(draw, tensor.numel()):
            return None
        # Elements of the widest vector that torch reads.
        is_wide = draw.layout.dtype in HALF and tensor.numel() % 8 == 0
        return Expression(
            recipe=MASK,
            function=draw_mask,
            operands=(draw.state,),
            constants=(*constants, ("vector", 8 if is_wide else 4)),
        )


def _draw(module: nn.Dropout, source: Tensor) -> RunningDropout | None:
    draws = module.training and not module.inplace and 0.0 < module.p < 1.0
    if not draws or not torch.is_grad_enabled() or source.layout is not torch.strided:
        return None
    if type(source) is not Tensor:
        return None
    layout, state = Layout.of(source), None
    if source.device.type == "cuda":
        # The kernel draws in the order of its vectors, whose width is this address's.
        aligned = source.data_ptr() % VECTOR_BYTES == 0
        if aligned and layout.is_contiguous and has_triton():
            state = state_of_cuda(source.device)
    elif source.device.type == "cpu":
        state = GeneratorState(torch.default_generator.get_state())
    return (
        None
        if state is None
        else RunningDropout(state, layout, source.device, module.p)
    )


@functools.cache
def has_triton() -> bool:
    """Whether our own kernel can draw."""
    return importlib.util.find_spec("triton") is not None


def state_of_cuda(device: torch.device) -> GeneratorState | None:
    """The present state; None while a graph is captured (it may not be read then)."""
    if torch.cuda.is_current_stream_capturing():
        return None
    return GeneratorState(torch.cuda.default_generators[device.index or 0].get_state())


def _alone_has_drawn(draw: RunningDropout, num_elements: int) -> bool:
    """Whether nobody but the operator took numbers since the state was read."""
    from ssdtrain.rebuild import triton_kernels as kernels

    after = state_of_cuda(draw.device)
    if after is None:
        return False
    key, offset = draw.state.state.view(torch.int64).tolist()
    taken = kernels.num_dropout_draws(num_elements, draw.device)
    return after.state.view(torch.int64).tolist() == [key, offset + taken]


def saw(source: Tensor, result: Tensor) -> None:
    """A dropout read `source`, which was at version 0, and made `result`.

    See [Note: unsaved tensors] in frame.py.
    """
    node, made = source.grad_fn, result.grad_fn
    if node is None or made is None:
        return
    for index, (before, number) in enumerate(made.next_functions):
        if before is node and number == source.output_nr:
            notes_of(made).witnessed.add(index)


def draw_mask(
    state: GeneratorState,
    *,
    device: torch.device,
    layout: Layout,
    rate: float,
    vector: int,
) -> Tensor:
    """CUDA: the fused kernel's mask (bool), by a kernel of our own."""
    from ssdtrain.rebuild import triton_kernels as kernels

    drop = kernels.DropoutDraw(rate, vector)
    return kernels.draw_dropped(layout.shape, state.state, drop, device)


def draw_noise(
    state: GeneratorState, *, device: torch.device, layout: Layout, rate: float
) -> Tensor:
    """CPU: 0 or 1 / (1 - rate), in the input's dtype."""
    generator = torch.Generator("cpu").set_state(state.state)
    like = torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=device
    )
    # empty_like, as the operator does: it makes a sliced input's noise dense.
    with unbatched():
        noise = torch.empty_like(like).bernoulli_(1 - rate, generator=generator)
    return noise.div_(1 - rate)
