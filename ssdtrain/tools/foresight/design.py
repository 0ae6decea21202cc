"""Which shapes the gatherer times: a seeded random design for each family. Sizes are
log-uniform, a third of them misaligned (Lin 2023, 4.3). The i-th draw of a family does
not depend on how many are drawn, so an interrupted run goes on where it ended."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from ssdtrain.tools.foresight import calls
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.spec import Kind

HEAD_DIMS = (32, 64, 64, 128, 128)
LAYOUTS = ("nt", "nt", "nn", "tn")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest calls of a design."""

    num_bytes: float
    flops: float
    """In 16 bits."""
    fp32_flops: float
    has_half: bool = True
    """Whether 16-bit types are drawn; all is fp32 otherwise."""

    def allow(self, call: Call) -> bool:
        """Whether the call is small enough."""
        most = self.fp32_flops if call.dtype == "fp32" else self.flops
        return call.num_bytes <= self.num_bytes and call.flops <= most

    def dtype(self, drawn: str) -> str:
        """The element type of a call for which `drawn` was drawn."""
        return drawn if self.has_half else "fp32"


LIMITS: dict[Kind, Limits] = {
    Kind.CUDA: Limits(num_bytes=1.5e9, flops=3e12, fp32_flops=3e11),
    Kind.CPU: Limits(num_bytes=1e8, flops=1e9, fp32_flops=1e9, has_half=False),
}
"""A call takes some milliseconds at most; CPUs train in fp32."""


def draw(
    family: KernelFamily, index: int, seed: int = 0, limits: Limits = LIMITS[Kind.CUDA]
) -> Call:
    """The `index`-th call of a family's design."""
    rng = random.Random(f"{seed}/{family.value}/{index}")
    maker = _MAKERS[family]
    while True:
        call = maker(rng, limits)
        if limits.allow(call):
            return call


def _size(rng: random.Random, low: int, high: int, multiple: int = 8) -> int:
    """Log-uniform; mostly a multiple of `multiple` or of 64, sometimes neither."""
    value = math.exp(rng.uniform(math.log(low), math.log(high)))
    kind = rng.random()
    step = 1 if kind < 0.12 else multiple if kind < 0.45 else 64
    if value < 2 * step:
        step = min(step, multiple)
    return max(low, min(high, step * max(1, round(value / step))))


def _product(rng: random.Random, limits: Limits) -> Call:
    dtype = limits.dtype("bf16" if rng.random() < 0.75 else "fp32")
    layout = rng.choice(LAYOUTS)
    if rng.random() < 0.3:
        return calls.product(
            batch=_size(rng, 2, 2048, 1),
            m=_size(rng, 8, 2048),
            n=_size(rng, 8, 2048),
            k=_size(rng, 8, 2048),
            dtype=dtype,
            layout=layout,
        )
    m, n, k = _size(rng, 16, 32768), _size(rng, 16, 16384), _size(rng, 16, 16384)
    if rng.random() < 0.15:  # a vocabulary, often of an odd size
        words = _size(rng, 20_000, 130_000) + rng.choice((0, 0, 1, 3))
        n, k = (words, k) if layout == "nt" else (n, words)
    if layout == "tn":  # a weight's gradient: the tokens are summed over
        m, n, k = n, k, m
    bias = layout == "nt" and rng.random() < 0.5
    return calls.product(m=m, n=n, k=k, dtype=dtype, layout=layout, bias=bias)


def _attention(rng: random.Random, limits: Limits) -> Call:
    heads = rng.choice((4, 8, 12, 16, 24, 32))
    group = rng.choice((1, 1, 1, 2, 4))
    queries = _size(rng, 64, 8192, 16)
    return calls.attention(
        backward=rng.random() < 0.55,
        batch=_size(rng, 1, 64, 1),
        heads=heads,
        kv_heads=heads // group,
        queries=queries,
        keys=queries,
        head_dim=rng.choice(HEAD_DIMS),
        causal=rng.random() < 0.6,
        dropout=rng.random() < 0.2 and limits.has_half,
        dtype=limits.dtype("bf16"),
    )


def _rows_and_columns(rng: random.Random) -> tuple[int, int]:
    columns = _size(rng, 16, 8192)
    most = max(64, int(3e8 / columns))
    return _size(rng, 16, most, 8), columns


def _norm(rng: random.Random, limits: Limits) -> Call:
    variant = rng.choice(sorted(calls.NORMS))
    rows, columns = _rows_and_columns(rng)
    if variant.startswith("log_softmax") and rng.random() < 0.7:
        rows, columns = _size(rng, 64, 16384), _size(rng, 2000, 130_000)
    dtype, warm = limits.dtype(rng.choice(("bf16", "fp32"))), rng.random() < 0.4
    return calls.norm(variant, rows=rows, columns=columns, dtype=dtype, warm=warm)


def _memory(rng: random.Random, limits: Limits) -> Call:
    variant = rng.choice(
        [*sorted(calls.POINTWISE), *calls.REDUCTIONS, *calls.CASTS, "sum_rows"]
    )
    rows, columns = _rows_and_columns(rng)
    dtype = "fp32"
    if variant != "cast_down":
        dtype = limits.dtype(rng.choice(("bf16", "fp32")))
    warm = rng.random() < 0.4
    return calls.memory(variant, rows=rows, columns=columns, dtype=dtype, warm=warm)


def _lookup(rng: random.Random, limits: Limits) -> Call:
    """Skewed like Zipf's law; who draws the indices fills in `distinct_rows`."""
    columns = _size(rng, 16, 2048)
    table_rows = _size(rng, 64, min(4_000_000, max(128, int(2e8 / columns))), 1)
    rows = _size(rng, 64, min(1_000_000, max(128, int(2e8 / columns))), 1)
    call = calls.lookup(
        rng.choice(calls.LOOKUPS),
        rows=rows,
        columns=columns,
        table_rows=table_rows,
        distinct_rows=0,
        dtype=limits.dtype(rng.choice(("bf16", "fp32"))),
    )
    skew = rng.choice((0.0, 0.0, rng.uniform(0.5, 1.6)))
    return Call(**{**call.__dict__, "sizes": {**call.sizes, "skew": skew}})


def _convolution(rng: random.Random, limits: Limits) -> Call:
    dtype = limits.dtype(rng.choice(("bf16", "fp32")))
    if rng.random() < 0.5:  # patches of an image
        kernel = rng.choice((8, 14, 16, 32))
        return calls.convolution(
            backward=rng.random() < 0.5,
            batch=_size(rng, 1, 256, 1),
            channels=3,
            side=kernel * rng.randint(7, 24),
            filters=64 * rng.randint(2, 20),
            kernel=kernel,
            stride=kernel,
            dtype=dtype,
            input_gradient=False,
        )
    return calls.convolution(
        backward=rng.random() < 0.5,
        batch=_size(rng, 1, 128, 1),
        channels=_size(rng, 16, 1024, 16),
        side=rng.choice((7, 14, 28, 56)),
        filters=_size(rng, 16, 1024, 16),
        kernel=rng.choice((1, 3)),
        stride=rng.choice((1, 1, 2)),
        dtype=dtype,
    )


def _optimizer(rng: random.Random, limits: Limits) -> Call:
    tensors = _size(rng, 1, 400, 1)
    each = _size(rng, 64, max(128, int(4e8 / tensors)))
    return calls.optimizer(
        rng.choice(sorted(calls.OPTIMIZERS)),
        elements=tensors * each,
        tensors=tensors,
        dtype=limits.dtype(rng.choice(("bf16", "fp32"))),
    )


_MAKERS: dict[KernelFamily, Callable[[random.Random, Limits], Call]] = {
    KernelFamily.PRODUCT: _product,
    KernelFamily.ATTENTION: _attention,
    KernelFamily.NORM: _norm,
    KernelFamily.MEMORY: _memory,
    KernelFamily.LOOKUP: _lookup,
    KernelFamily.CONVOLUTION: _convolution,
    KernelFamily.OPTIMIZER: _optimizer,
}
