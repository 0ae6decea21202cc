"""Triton kernels of `hector.runtime.watch`: digests of integer tensors."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(starts, sizes, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The digest of one block: each value is mixed with its place, then all are added,
    so that neither a changed value nor an exchange of two goes unseen."""
    program = tl.program_id(0)
    memory = tl.load(starts + program).to(tl.pointer_type(tl.int64))
    place = tl.arange(0, block)
    x = tl.load(memory + place, mask=place < tl.load(sizes + program), other=0)
    x = x ^ ((place.to(tl.int64) + 1) * 0x1E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * 0x3F58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x14D049BB133111EB
    return tl.sum(x ^ (x >> 31), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def digest(starts, sizes, kept, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the digest of each block of `sizes` values at the addresses `starts`."""
    tl.store(kept + tl.program_id(0), _mixed(starts, sizes, block))


@triton.jit(do_not_specialize=["elements"])  # type: ignore[untyped-decorator]
def compare(  # type: ignore[no-untyped-def]
    starts, sizes, kept, out, elements, flag, block: tl.constexpr
):
    """Where a digest differs: NaN into all of `out`, and 1 into the flag."""
    if _mixed(starts, sizes, block) != tl.load(kept + tl.program_id(0)):
        for start in range(0, elements, block):
            at = tl.arange(0, block).to(tl.int64) + start
            tl.store(out + at, float("nan"), mask=at < elements)
        tl.store(flag, 1)
