"""Calls of random graph programs, and how far they may be from exact ones."""

import contextlib
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.bench.safety.graph_objects import Call, Objects

NOISE = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Largest error over the largest value of a result. Half precision: `close`."""
RANGE = 0.9
"""Share of a dtype's range; beyond, PyTorch's own layers give infinity as well."""


@contextlib.contextmanager
def surroundings(draw: random.Random, met: Counter[str]) -> Iterator[None]:
    """Another default device or dtype around a call, now and then."""
    default = torch.get_default_dtype()
    try:
        with contextlib.ExitStack() as stack:
            if draw.random() < 0.1:
                stack.enter_context(torch.device("meta"))
                met["another default device"] += 1
            if draw.random() < 0.1:
                torch.set_default_dtype(torch.float64)
                met["another default dtype"] += 1
            yield
    finally:
        torch.set_default_dtype(default)


class Outcome(NamedTuple):
    """What a call gave."""

    outputs: list[Tensor | None]
    gradients: list[Tensor | None]

    @property
    def parts(self) -> list[Tensor | None]:
        """All, outputs first."""
        return [*self.outputs, *self.gradients]

    def errors(self, exact: "Outcome") -> list[float]:
        """Of each part, the largest; of parts that are not there or hold no number,
        0."""
        pairs = zip(self.parts, exact.parts, strict=True)
        found = [
            0.0
            if a is None or b is None or not a.numel()
            else float((a.double() - b).abs().max())
            for a, b in pairs
        ]
        return [e if math.isfinite(e) else 0.0 for e in found]


def outcome(
    call: Call, o: Objects, inputs: dict[str, Tensor], read: tuple[str, ...], mode: str
) -> Outcome:
    """A call's results; gradients of inputs and of what is `read`."""
    leaves = [t for t in inputs.values() if t.requires_grad]
    for name in read:
        if name == "graph":
            leaves += [o.graph.ndata["h"], o.graph.edata["w"]]
        else:
            leaves += list(o.convs[name].parameters())
    around = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with around.get(mode, torch.enable_grad)(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return results(lambda: call(o, inputs), leaves, mode == "train")


def results(call: Callable[[], Any], leaves: list[Tensor], trains: bool) -> Outcome:
    """What a call returns, and the gradients of leaves under fixed slopes."""
    with contextlib.nullcontext() if trains else torch.no_grad():
        found = call()
    outputs = list(found.values()) if isinstance(found, dict) else found
    outputs = outputs if isinstance(outputs, list) else [outputs]
    made: list[Tensor | None] = [t.detach().clone() for t in outputs]
    if not trains or not any(t.requires_grad for t in outputs):
        return Outcome(made, [None] * len(leaves))
    loss = sum((t * slopes(t)).sum().double() for t in outputs if t.requires_grad)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
    return Outcome(made, list(grads))


def slopes(t: Tensor) -> Tensor:
    """Numbers that every dtype has, of the shape of `t`."""
    numbers = torch.arange(t.numel(), device="cpu") % 7 - 3
    return (numbers.to(t.dtype) / 2).view_as(t).to(t.device)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are the same bytes, or nothing."""
    if a is None or b is None:
        return a is b
    return (
        a.dtype is b.dtype
        and a.shape == b.shape
        and bool(torch.equal(a, b) or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))
    )


def off(a: Tensor | None, b: Tensor | None) -> str:
    """How two parts are apart."""
    if a is None or b is None or a.shape != b.shape or a.dtype is not b.dtype:
        return f"{_kind(a)} and {_kind(b)}"
    return f"by {float((a.double() - b.double()).abs().max()):.3g}"


def _kind(t: Tensor | None) -> str:
    return "nothing" if t is None else f"{t.dtype} {list(t.shape)}"


def beyond(t: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether exact values leave the range of `dtype`."""
    return t is not None and bool((t.abs() > RANGE * torch.finfo(dtype).max).any())


def close(
    a: Tensor | None,
    b: Tensor | None,
    dtype: torch.dtype,
    rounding: Tensor | float = 0.0,
) -> str | None:
    """How `a` differs from the exact `b` by more than its dtype's rounding and
    `rounding`."""
    if a is None or b is None:
        other = b if a is None else a
        wrong = other is not None and bool(other.any())
        return f"{_kind(a)} and {_kind(b)}" if wrong else None
    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    if not a.numel():
        return None
    info = torch.finfo(dtype)
    out = b.abs() > RANGE * info.max
    if not bool((a[out].double() * b[out].sign() >= 0.8 * info.max).all()):
        return "a value beyond the range has not its sign or its size"
    error = torch.where(out, 0.0, (a.double() - b).abs())
    scale = max(float(torch.where(out, 0.0, b).abs().max()), 1.0)
    if dtype in NOISE:
        allowed = NOISE[dtype] * scale + rounding + torch.zeros_like(error)
    else:
        # Two roundings, and what float32 has computed with.
        allowed = b.abs() * info.eps * 1.1 + 3e-4 * scale + rounding
    if bool((error <= allowed).all()):
        return None
    return f"error {float(error.max() / scale):.3g}"


def differs(
    mine: Outcome,
    exact: Outcome,
    dtype: torch.dtype,
    met: Counter[str],
    rounding: list[Tensor] | None = None,
    tied: bool = False,
    allowed: list[float] | None = None,
) -> str | None:
    """The first part that is not the exact one.

    rounding: of each output, where messages were rounded in memory. Gradients are left
        out then: messages that were rounded to one number share a maximum's. They are
        left out beyond the dtype's range as well, where they are of infinity, and
        where they are `tied`. allowed: of each part, more than its dtype's rounding.
    """
    far = any(beyond(b, dtype) for b in exact.outputs)
    if far:
        met["beyond the range"] += 1
    num = len(exact.outputs)
    noise = [*(rounding or [0.0] * num), *[0.0] * len(exact.gradients)]
    noise = [n + e for n, e in zip(noise, allowed or [0.0] * len(noise), strict=True)]
    pairs = list(zip(mine.parts, exact.parts, noise, strict=True))
    for i, (a, b, more) in enumerate(pairs[:num] if far or rounding or tied else pairs):
        what = close(a, b, dtype, more)
        if what is not None:
            return f"part {i}: {what}"
    return None
