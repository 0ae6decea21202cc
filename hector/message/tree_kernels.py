"""A level of a TreeLSTM as one kernel each way: a program a parent, which walks its
children. See [Note: one product a level]."""

from typing import Any

import torch
import triton
import triton.language as tl

from hector.emit.source import FUSED

MAX_WARPS = 8


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    # 1 - 2 / (exp(2x) + 1): no overflow at either end.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _read(at, ok):  # type: ignore[no-untyped-def]
    return tl.load(at, mask=ok, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _level_forward(  # type: ignore[no-untyped-def]
    x, z, gates, h, c, ptr, child, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = first + tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ok = at < WIDTH
    mine = x + row * 4 * WIDTH + at
    i = _read(mine, ok)
    o = _read(mine + WIDTH, ok)
    u = _read(mine + 2 * WIDTH, ok)
    base = _read(mine + 3 * WIDTH, ok)
    kept = tl.zeros([BLOCK], tl.float32)
    lo = tl.load(ptr + row)
    hi = tl.load(ptr + row + 1)
    for e in range(lo, hi):
        k = tl.load(child + e)
        theirs = z + k * 4 * WIDTH + at
        i += _read(theirs, ok)
        o += _read(theirs + WIDTH, ok)
        u += _read(theirs + 2 * WIDTH, ok)
        f = _read(theirs + 3 * WIDTH, ok)
        old = _read(c + k * WIDTH + at, ok)
        kept += tl.sigmoid(base + f) * old
    i = tl.sigmoid(i)
    o = tl.sigmoid(o)
    u = _tanh(u)
    kept += i * u
    out = gates + row * 3 * WIDTH + at
    tl.store(out, i, mask=ok)
    tl.store(out + WIDTH, o, mask=ok)
    tl.store(out + 2 * WIDTH, u, mask=ok)
    tl.store(c + row * WIDTH + at, kept, mask=ok)
    tl.store(h + row * WIDTH + at, o * _tanh(kept), mask=ok)


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _level_backward(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x, z, gates, c, dx, dz, dh, dc, ptr, child, first,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = first + tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ok = at < WIDTH
    mine = gates + row * 3 * WIDTH + at
    i = _read(mine, ok)
    o = _read(mine + WIDTH, ok)
    u = _read(mine + 2 * WIDTH, ok)
    t = _tanh(_read(c + row * WIDTH + at, ok))
    gh = _read(dh + row * WIDTH + at, ok)
    gc = _read(dc + row * WIDTH + at, ok)
    gc += gh * o * (1.0 - t * t)
    gi = gc * u * i * (1.0 - i)
    go = gh * t * o * (1.0 - o)
    gu = gc * i * (1.0 - u * u)
    gf = tl.zeros([BLOCK], tl.float32)
    base = tl.load(x + row * 4 * WIDTH + 3 * WIDTH + at, mask=ok, other=0.0)
    base = base.to(tl.float32)
    lo = tl.load(ptr + row)
    hi = tl.load(ptr + row + 1)
    for e in range(lo, hi):
        # No other parent has this child: its rows are written here alone.
        k = tl.load(child + e)
        theirs = z + k * 4 * WIDTH + 3 * WIDTH + at
        f = tl.sigmoid(base + _read(theirs, ok))
        old = _read(c + k * WIDTH + at, ok)
        one = gc * old * f * (1.0 - f)
        gf += one
        out = dz + k * 4 * WIDTH + at
        tl.store(out, gi, mask=ok)
        tl.store(out + WIDTH, go, mask=ok)
        tl.store(out + 2 * WIDTH, gu, mask=ok)
        tl.store(out + 3 * WIDTH, one, mask=ok)
        there = dc + k * WIDTH + at
        before = _read(there, ok)
        tl.store(there, before + gc * f, mask=ok)
    out = dx + row * 4 * WIDTH + at
    tl.store(out, gi, mask=ok)
    tl.store(out + WIDTH, go, mask=ok)
    tl.store(out + 2 * WIDTH, gu, mask=ok)
    tl.store(out + 3 * WIDTH, gf, mask=ok)


class TritonCell:
    """Launch the kernels of a level of a forest; float32, bfloat16 and float16."""

    @staticmethod
    def forward(m: Any, lv: Any, at: Any) -> None:
        width = m.h.shape[1]
        block, warps = _shape(width)
        with _device(m.h):
            _level_forward[(at.last - at.first,)](
                *(m.x, m.z, m.gates, m.h, m.c, lv.ptr, lv.child, at.first),
                WIDTH=width,
                BLOCK=block,
                num_warps=warps,
                **FUSED,
            )

    @staticmethod
    def backward(m: Any, d: Any, lv: Any, at: Any) -> None:
        width = m.h.shape[1]
        block, warps = _shape(width)
        with _device(m.h):
            _level_backward[(at.last - at.first,)](
                *(m.x, m.z, m.gates, m.c, d.x, d.z, d.h, d.c, lv.ptr, lv.child),
                at.first,
                WIDTH=width,
                BLOCK=block,
                num_warps=warps,
                **FUSED,
            )


def _shape(width: int) -> tuple[int, int]:
    """Return the columns that a program holds, and its warps: two columns a thread or
    more."""
    block = triton.next_power_of_2(width)
    return block, max(1, min(block // 64, MAX_WARPS))


def _device(t: torch.Tensor) -> Any:
    """Make the device of `t` current, where Triton launches; the interpreter runs on a
    CPU."""
    return torch.cuda.device(t.device) if t.is_cuda else torch.no_grad()
