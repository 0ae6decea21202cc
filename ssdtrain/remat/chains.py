"""Recipes of what stands between a product and the tensor that is saved.

Rotary embeddings (slices, negation, joining, sums), fused projections that are split,
and attention out of single operators. Nobody saves most of what these read, so chains
of them need [Note: guarded recipes] in producer.py.
(tests/ssdtrain/remat/test_products.py)
"""

import torch
from torch import Tensor

from ssdtrain.remat.expression import Expression, Operand
from ssdtrain.remat.producer import Producer
from ssdtrain.remat.registry import Registry

CHAINS = Registry()
MOST_JOINED = 4


@CHAINS.register("SliceBackward0")
def part(node: Producer) -> Expression | None:
    """A slice of one dimension."""
    return node.rebuilt_by(
        slice_of,
        node.edge(0),
        dim=node.dimension("dim"),
        start=node.constant("start"),
        end=node.constant("end"),
        step=node.constant("step"),
    )


def slice_of(
    source: Tensor, *, dim: int, start: int | None, end: int | None, step: int
) -> Tensor:
    """`source[..., start:end:step, ...]`."""
    return torch.ops.aten.slice.Tensor(source, dim, start, end, step)  # type: ignore[no-any-return]


@CHAINS.register("SplitBackward0")
def piece(node: Producer) -> Expression | None:
    """One of equal pieces, also of `chunk`."""
    return node.rebuilt_by(
        piece_of,
        node.edge(0),
        dim=node.dimension("dim"),
        size=node.constant("split_size"),
        number=node.output,
    )


def piece_of(source: Tensor, *, dim: int, size: int, number: int) -> Tensor:
    """The piece of this number."""
    return torch.split(source, size, dim)[number]


@CHAINS.register("SplitWithSizesBackward0")
def unequal_piece(node: Producer) -> Expression | None:
    """One of pieces of given sizes."""
    return node.rebuilt_by(
        unequal_piece_of,
        node.edge(0),
        dim=node.dimension("dim"),
        sizes=tuple(node.constant("split_sizes")),
        number=node.output,
    )


def unequal_piece_of(
    source: Tensor, *, dim: int, sizes: tuple[int, ...], number: int
) -> Tensor:
    """The piece of this number."""
    return torch.split_with_sizes(source, sizes, dim)[number]


@CHAINS.register("CatBackward0")
def joined(node: Producer) -> Expression | None:
    """A few tensors one behind the other."""
    if node.num_edges > MOST_JOINED:
        return None
    sources: list[Operand | None] = []
    for index in range(node.num_edges):
        sources.append(node.edge(index))
        if sources[-1] is None:
            return None
    return node.rebuilt_by(join, *sources, dim=node.dimension("dim"))


def join(*sources: Tensor, dim: int) -> Tensor:
    """All of them along a dimension."""
    return torch.cat(sources, dim)


@CHAINS.register("NegBackward0")
def negated(node: Producer) -> Expression | None:
    """With the other sign."""
    return node.rebuilt_by(torch.neg, node.edge(0))


@CHAINS.register("SubBackward0")
def difference(node: Producer) -> Expression | None:
    """Of two tensors."""
    first = node.edge(0)
    if first is None:
        return None
    return node.rebuilt_by(torch.sub, first, node.edge(1), alpha=node.constant("alpha"))


@CHAINS.register("SoftmaxBackward0")
def softmax(node: Producer) -> Expression | None:
    """It saves its result, which is the tensor itself."""
    widens = node.source_dtype(0) != node.dtype
    return node.rebuilt_by(
        softmax_of, node.edge(0), dim=node.dimension("dim"), widens=widens
    )


def softmax_of(source: Tensor, *, dim: int, widens: bool) -> Tensor:
    """`widens`: 16 bits to float32."""
    return torch._softmax(source, dim, widens)


@CHAINS.register("SafeSoftmaxBackward0")
def safe_softmax(node: Producer) -> Expression | None:
    """That of torch's math attention: rows without any key are zero."""
    return node.rebuilt_by(
        safe_softmax_of, node.edge(0), dim=node.dimension("dim"), dtype=node.dtype
    )


def safe_softmax_of(source: Tensor, *, dim: int, dtype: torch.dtype) -> Tensor:
    """In the dtype of the result."""
    found = torch.ops.aten._safe_softmax(source, dim, dtype)
    return found  # type: ignore[no-any-return]
