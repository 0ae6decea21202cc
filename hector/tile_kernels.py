"""The tiles of `hector.arrays.BoundedArrays` as one kernel: those of a graph that is
new in every step are made in every step, by some thirty operators if by PyTorch."""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 256
_FREE = ["num", "types", "rows"]


@triton.jit(do_not_specialize=_FREE)  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    ptr, segment, start, end, first, num, types, rows, LANES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = at < num
    low = tl.load(ptr)
    number = low - low
    kind, begin, stop = at * 0, at * 0, at * 0
    for k in range(0, types):
        high = tl.load(ptr + k + 1)
        here = at >= number
        kind = tl.where(here, k, kind)
        begin = tl.where(here, low + (at - number) * rows, begin)
        stop = tl.where(here, high, stop)
        tl.store(first + k, number)
        number += (high - low + rows - 1) // rows
        low = high
    tl.store(first + types, number)
    begin = tl.minimum(begin, stop)
    tl.store(segment + at, kind, mask=inside)
    tl.store(start + at, begin, mask=inside)
    tl.store(end + at, tl.minimum(begin + rows, stop), mask=inside)


def tiled(ptr: Tensor, num: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Return type, first row and end of `num` tiles of `rows` rows, and where each
    type's tiles begin. `ptr`: int64, where types begin."""
    types = ptr.numel() - 1
    found = [ptr.new_empty(n, dtype=dtype) for n in (num, num, num, types + 1)]
    # The interpreter runs on a CPU.
    where: Any = torch.cuda.device(ptr.device) if ptr.is_cuda else nullcontext()
    with where:
        _tile[(triton.cdiv(num, _LANES),)](ptr, *found, num, types, rows, LANES=_LANES)
    return found
