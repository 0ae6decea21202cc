"""Calls of random graph programs, and how far they may be from exact ones."""

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.hector.graphs.objects import Call, Objects

NOISE = 1e-9
"""Largest error over the largest value of a result in float64."""


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


def far(mine: Outcome, exact: Outcome, tied: bool = False) -> str | None:
    """The first part that is not the exact one to float64's rounding.

    Args:
        tied: gradients go to one of equal messages, and are left out.
    """
    num = len(exact.outputs) if tied else len(exact.parts)
    for i, (a, b) in enumerate(zip(mine.parts[:num], exact.parts, strict=False)):
        if a is None or b is None:
            other = b if a is None else a
            if other is not None and bool(other.any()):
                return f"part {i}: {_kind(a)} and {_kind(b)}"
        elif a.shape != b.shape:
            return f"part {i}: shapes {list(a.shape)} and {list(b.shape)}"
        elif a.numel():
            scale = max(float(b.abs().max()), 1.0)
            error = float((a - b).abs().max()) / scale
            if not error <= NOISE:
                return f"part {i}: error {error:.3g}"
    return None
