"""Two rebuilds by one kernel.

[Note: pairs]
A gated layer saves silu(gate) for its product with another tensor, and that product.
Where both are rebuilt, backward asks for the product first, whose rebuild makes the
factor and reads it again. One kernel reads gate and other once and writes both. It is
used where it gives the bytes of torch's two kernels: for all 65,536 numbers of a 16-bit
dtype, compared once for each device. Steps in which rebuilds are timed make each by
itself: either may be chosen without the other.
(tests/ssdtrain/remat/test_pairs.py)
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.remat.admission import same_bytes
from ssdtrain.remat.expression import Expression, Held, Layout, without_autocast
from ssdtrain.remat.fast import HALF, MIN_BYTES
from ssdtrain.remat.tables import every_number

logger = logging.getLogger(__name__)
GRAIN = 16
"""Elements and bytes: what else a kernel would be compiled for once more, which cannot
be while a graph is captured."""
MOST_ELEMENTS = 2**31 - 1
NUM_OPERANDS = 3
"""Two factors, and what one of them is made of."""
STRIDE = 12_289
"""Each number meets another one, one that does not divide how many there are."""
Make = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def gated(gate: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate), and that times the other, by a kernel."""
    # Triton comes with CUDA builds of torch alone.
    from ssdtrain.remat import triton_kernels as kernels

    return kernels.gated(gate, other)


def in_turn(gate: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The same, by torch's kernels."""
    with torch.no_grad(), without_autocast(gate.device.type):
        factor = F.silu(gate)
        return factor, factor * other


class Pairs:
    """What one session rebuilds by pairs."""

    def __init__(
        self,
        min_bytes: int = MIN_BYTES,
        device_types: tuple[str, ...] = ("cuda",),
        make: Make = gated,
    ) -> None:
        self._min_bytes = min_bytes
        self._device_types = device_types
        self._make = make
        self._verdicts: dict[tuple[torch.dtype, torch.device], bool] = {}

    def can_make(
        self, product: Expression, factor: Expression, device: torch.device
    ) -> bool:
        """Whether a product and one of its factors are rebuilt together."""
        if product.function is not torch.mul or factor.function is not F.silu:
            return False
        operands = (*product.operands, *factor.operands)
        if len(operands) != NUM_OPERANDS or product.constants or factor.constants:
            return False
        first, *others = operands
        if not isinstance(first, Held) or not self.takes(first.layout, device):
            return False
        return all(
            isinstance(each, Held) and each.layout == first.layout for each in others
        )

    def takes(self, layout: Layout, device: torch.device) -> bool:
        """Whether its tensors may look so. Compares, if it must and no graph is being
        captured."""
        num_elements = layout.num_bytes // layout.dtype.itemsize
        return (
            device.type in self._device_types
            and layout.dtype in HALF
            and layout.num_bytes >= self._min_bytes
            and layout.is_contiguous
            and num_elements % GRAIN == 0
            and num_elements <= MOST_ELEMENTS
            and self._is_admitted(layout.dtype, device)
        )

    def make(self, gate: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """The factor and the product, of what `can_make` was asked for."""
        is_aligned = gate.data_ptr() % GRAIN == 0 == other.data_ptr() % GRAIN
        make = self._make if is_aligned else in_turn
        return make(gate, other)

    def _is_admitted(self, dtype: torch.dtype, device: torch.device) -> bool:
        key = dtype, device
        if key not in self._verdicts:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            self._verdicts[key] = self._gives_the_bytes(dtype, device)
        return self._verdicts[key]

    def _gives_the_bytes(self, dtype: torch.dtype, device: torch.device) -> bool:
        try:
            gate = every_number(dtype, device)
            other = gate.roll(STRIDE)
            both = zip(self._make(gate, other), in_turn(gate, other), strict=True)
            return all([same_bytes(found, wanted) for found, wanted in both])
        except Exception as error:
            logger.warning("the kernel of gated products failed: %s", repr(error))
            return False
