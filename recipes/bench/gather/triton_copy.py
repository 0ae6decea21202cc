"""The gather in Triton, to compare with the CUDA kernels. Rows of whole words."""

import torch
import triton
import triton.language as tl

_ROWS = 8
ROWS = tl.constexpr(_ROWS)


@triton.jit
def _gather(table, index, out, num, row_words, WIDTH: tl.constexpr):
    """``ROWS`` rows a program, the whole row in flight."""
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = places < num
    rows = tl.load(index + places, mask=valid, other=0)
    words = tl.arange(0, WIDTH)
    mask = valid[:, None] & (words < row_words)[None, :]
    values = tl.load(table + rows[:, None] * row_words + words[None, :], mask=mask)
    to = places.to(tl.int64)[:, None] * row_words + words[None, :]
    tl.store(out + to, values, mask=mask)


def gather(alias: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """``out = alias[index]``; alias and out are int32, 2-D, on the GPU (zero-copy)."""
    words = alias.shape[1]
    width = triton.next_power_of_2(words)
    grid = (triton.cdiv(index.numel(), _ROWS),)
    _gather[grid](alias, index, out, index.numel(), words, WIDTH=width)
