"""Faster kernels for the recipes that large models need most.

[Note: faster kernels]
torch's kernels do more than a rebuild needs. Layer norm computes statistics that its
node saved. A dropout reads an input and writes an output that nobody looks at. GELU has
at most 65,536 results in 16 bits. A recipe of such a kernel offers others that do less.
They go through admission like every recipe, so they are used only where they gave the
same bytes on this device; else torch's own kernel rebuilds, which is counted.
(tests/ssdtrain/rebuild/test_kernels.py)
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.rebuild.expression import Expression, Held, Operand
from ssdtrain.rebuild.node import Producer
from ssdtrain.rebuild.recipes import HALF, normalize, normalize_rms, to_dtype

# Below it, launching from Python takes longer than a faster kernel can save.
MIN_BYTES = 16 * 2**20
NUM_ENTRIES = 2**16
Offer = Callable[[Expression, Producer | None], Iterator[Expression | None]]


class Kernels:
    """Faster kernels of one session; tables are made when first needed."""

    def __init__(
        self, min_bytes: int = MIN_BYTES, device_types: tuple[str, ...] = ("cuda",)
    ) -> None:
        self._min_bytes = min_bytes
        self._device_types = device_types
        self._tables: dict[Hashable, Tensor] = {}
        self._offers: dict[Callable[..., Tensor], Offer] = {
            normalize: self._normalized,
            normalize_rms: self._normalized,
            to_dtype: self._widened,
            F.gelu: self._looked_up,
        }

    def offer(
        self, found: Expression, tensor: Tensor, node: Producer | None
    ) -> Expression:
        """The expression, with faster ones of the same tensor.

        Args:
            found: what a recipe gave.
            tensor: what it makes.
            node: the producer of `tensor`, where there is one.
        """
        if tensor.device.type not in self._device_types:
            return found
        make = self._offers.get(found.function)
        if make is None or tensor.nbytes < self._min_bytes:
            return found
        return replace(found, faster=tuple(filter(None, make(found, node))))

    def _looked_up(
        self, plain: Expression, node: Producer | None
    ) -> Iterator[Expression | None]:
        (source,) = plain.operands
        if _is_dense(source, HALF):
            constants = (*plain.constants, ("function", plain.function))
            yield replace(plain, function=self.look_up, constants=constants)

    def look_up(
        self, source: Tensor, *, function: Callable[..., Tensor], **constants: Any
    ) -> Tensor:
        """`function(source, **constants)` by table: it stays in the L1 cache."""
        dtype, device = source.dtype, source.device
        key = function, tuple(sorted(constants.items())), dtype, device
        if key not in self._tables:
            self._tables[key] = tabulate(partial(function, **constants), dtype, device)
        return look_up_bits(source, self._tables[key])

    def _normalized(
        self, plain: Expression, node: Producer | None
    ) -> Iterator[Expression | None]:
        """From the statistics that the node saved: no epsilon, no reduction."""
        if node is None:
            return
        source, *affine = plain.operands
        with_mean = plain.function is normalize
        names = ("result1", "result2") if with_mean else ("result1",)
        statistics = [node.saved(name) for name in names]
        float32 = (torch.float32,)
        dense = all(_is_dense(operand) for operand in (source, *affine))
        if not dense or not all(_is_dense(each, float32) for each in statistics):
            return
        # What nvcc makes of `a * b + c`; the other where it was told not to.
        for fused in (True, False) if len(affine) == 2 else (False,):
            yield node.rebuilt_by(
                normalize_saved if with_mean else normalize_rms_saved,
                *(source, *statistics, *affine),
                fused=fused,
            )

    def _widened(
        self, plain: Expression, node: Producer | None
    ) -> Iterator[Expression | None]:
        (source,) = plain.operands
        float32 = ("dtype", torch.float32)
        if _is_dense(source, HALF) and plain.constants == (float32,):
            yield replace(plain, function=widen, constants=())


def _is_dense(
    operand: Operand | None, dtypes: tuple[torch.dtype, ...] | None = None
) -> bool:
    if not isinstance(operand, Held) or not operand.layout.is_contiguous:
        return False
    return dtypes is None or operand.layout.dtype in dtypes


def every_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All numbers of a 16-bit dtype, in the order of their bits taken as unsigned."""
    bits = torch.arange(NUM_ENTRIES, dtype=torch.int32, device=device)
    return bits.to(torch.int16).view(dtype)


def tabulate(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The bits of an elementwise function's results for all numbers, 65,536 int16."""
    return function(every_number(dtype, device)).contiguous().view(torch.int16)


# Triton comes with CUDA builds of torch alone: imported where it is needed.


def look_up_bits(source: Tensor, table: Tensor) -> Tensor:
    """table[bits of source]; `table` is of `tabulate`, for the dtype of `source`."""
    from ssdtrain.rebuild import triton_kernels

    return triton_kernels.look_up(source, table)


def normalize_saved(
    source: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    fused: bool,
) -> Tensor:
    """Layer norm from its statistics."""
    from ssdtrain.rebuild import triton_kernels

    statistics = triton_kernels.Statistics(mean, deviation)
    return triton_kernels.normalize_rows(source, statistics, weight, bias, fused=fused)


def normalize_rms_saved(
    source: Tensor, deviation: Tensor, weight: Tensor, *, fused: bool
) -> Tensor:
    """RMS norm from its statistics."""
    from ssdtrain.rebuild import triton_kernels

    statistics = triton_kernels.Statistics(None, deviation)
    return triton_kernels.normalize_rows(source, statistics, weight, None, fused=fused)


def widen(source: Tensor) -> Tensor:
    """16 bits to float32."""
    from ssdtrain.rebuild import triton_kernels

    return triton_kernels.widen_halves(source)
