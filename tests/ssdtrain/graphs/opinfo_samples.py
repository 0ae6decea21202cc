"""torch's own operator database: every differentiable sample, with and without a
session. Shared by the test here (a sample of it) and
`recipes/bench/safety/opinfo.py` (all).
"""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

DTYPES = (torch.float32, torch.complex64)


class Sample(NamedTuple):
    """One differentiable call."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class Caller(nn.Module):
    """A module whose forward is any call."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.ones(1))

    def forward(self, function: Any, arguments: Any, keywords: Any) -> Any:
        return function(*arguments, **keywords)


def samples(every: int, at_most: int, offset: int = 0) -> Iterator[Sample]:
    """From each `every`-th operator, at most so many samples per dtype."""
    differentiable = [op for op in op_db if op.supports_autograd]
    for op in differentiable[offset::every]:
        for dtype in DTYPES:
            if dtype not in op.supported_backward_dtypes("cpu"):
                continue
            torch.manual_seed(0)
            drawn = op.sample_inputs("cpu", dtype, requires_grad=True)
            for number, sample in enumerate(drawn):
                if number >= at_most:
                    break
                name = f"{op.full_name}-{str(dtype).removeprefix('torch.')}-{number}"
                arguments = (sample.input, *sample.args)
                yield Sample(name, op, arguments, sample.kwargs)


def leaves_of(sample: Sample) -> list[Tensor]:
    """The tensors to differentiate by."""
    found = tree_leaves((sample.arguments, sample.keywords))
    return [t for t in found if isinstance(t, Tensor) and t.requires_grad]


def gradients(caller: Caller, sample: Sample) -> list[bytes | None] | str:
    """Gradients as bytes, or the text of the refusal."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = caller(sample.function, sample.arguments, sample.keywords)
            outputs = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
            outputs = [t for t in outputs if t.requires_grad]
            if not outputs:
                return "nothing to differentiate"
            weights = [torch.randn_like(t) for t in outputs]
            found = torch.autograd.grad(
                outputs, leaves_of(sample), weights, allow_unused=True
            )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:80]
    return [None if g is None else bytes_of(g) for g in found]


def bytes_of(gradient: Tensor) -> bytes:
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    plain = gradient.resolve_conj().resolve_neg().reshape(-1)
    # A copy: one element is contiguous at any stride, and a ZeroTensor has no bytes.
    flat = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return flat.view(torch.uint8).numpy().tobytes()


def verdict(plain: Caller, other: Caller, sample: Sample) -> str:
    """`equal`, `refused` by both, `random` in itself, or what is different.

    `refused by ssdtrain` is outside the law, and documented: docs/safety.md.
    """
    expected = gradients(plain, sample)
    found = gradients(other, sample)
    if found == expected:
        return "refused" if isinstance(expected, str) else "equal"
    if isinstance(found, str) and found.startswith("InPlaceError: rrelu"):
        return "refused by ssdtrain"
    if gradients(plain, sample) != expected:
        return "random"
    ours = found if isinstance(found, str) else "other bytes"
    theirs = expected if isinstance(expected, str) else "ran"
    return f"DIFFERENT: {ours} (plain autograd {theirs})"
