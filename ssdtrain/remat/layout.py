"""Recipes of casts and copies, and of the views between an operator and its input.

All of these save nothing: their input is the value at their edge.
"""

import torch
from torch import Tensor

from ssdtrain.remat.expression import Expression
from ssdtrain.remat.producer import Producer, signed
from ssdtrain.remat.registry import Registry

LAYOUT = Registry()


@LAYOUT.register("ToCopyBackward0")
def cast(node: Producer) -> Expression | None:
    """Of an activation or, under autocast, of a parameter.

    A widened tensor whose source nobody keeps is stored narrow: the way back is exact,
    and cheaper than a product would be.
    """
    source = node.source_dtype(0) if node.is_at_hand else None
    narrows = source is not None and _widens(source, node.dtype)
    found = node.rebuilt_by(
        to_dtype, node.edge(0, is_dear=not narrows), dtype=node.dtype
    )
    if found is not None or source is None or not narrows:
        return found
    return node.rebuilt_by(to_dtype, node.narrowed(source), dtype=node.dtype)


def to_dtype(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Always a new tensor."""
    return source.to(dtype, copy=True)


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    half = (torch.bfloat16, torch.float16)
    return source in half and target is torch.float32


@LAYOUT.register("CloneBackward0")
def copy(node: Producer) -> Expression | None:
    """`clone()` and `contiguous()`."""
    layout = node.layout
    stride = None if layout is None else layout.stride
    return node.rebuilt_by(copy_to, node.edge(0), stride=stride)


def copy_to(source: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """A copy with this stride; contiguous when it is not known."""
    if stride is None:
        return source.clone(memory_format=torch.contiguous_format)
    target = torch.empty_strided(
        source.shape, stride, dtype=source.dtype, device=source.device
    )
    return target.copy_(source)


@LAYOUT.register(
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "ViewAsBackward0",
    "AliasBackward0",
)
def view(node: Producer) -> Expression | None:
    """The same elements, in another shape perhaps."""
    return node.rebuilt_by(Tensor.view, node.edge(0), size=node.shape)


@LAYOUT.register("ExpandBackward0")
def expand(node: Producer) -> Expression | None:
    """Repeated without a copy."""
    return node.rebuilt_by(torch.broadcast_to, node.edge(0), size=node.shape)


@LAYOUT.register("TransposeBackward0")
def transpose(node: Producer) -> Expression | None:
    """Two dimensions exchanged."""
    dim0, dim1 = node.dimension("dim0"), node.dimension("dim1")
    return node.rebuilt_by(torch.transpose, node.edge(0), dim0=dim0, dim1=dim1)


@LAYOUT.register("TBackward0")
def transpose_matrix(node: Producer) -> Expression | None:
    """`t()`."""
    return node.rebuilt_by(torch.t, node.edge(0))


@LAYOUT.register("PermuteBackward0")
def permute(node: Producer) -> Expression | None:
    """All dimensions rearranged."""
    dims = tuple(signed(dim) for dim in node.constant("dims"))
    return node.rebuilt_by(torch.permute, node.edge(0), dims=dims)


@LAYOUT.register("UnsqueezeBackward0")
def unsqueeze(node: Producer) -> Expression | None:
    """A dimension of size 1 more."""
    return node.rebuilt_by(torch.unsqueeze, node.edge(0), dim=node.dimension("dim"))
