"""Sums of neighbours' rows on a CPU without a program: of a small graph the host's work
for one is longer than the sum."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.graph import HeteroGraph
from hector.ir.types import Domain, Index
from hector.message.frame import MASK
from hector.message.functions import (
    Combine,
    MessageFunction,
    ReduceFunction,
    Reducer,
    Side,
)
from hector.message.programs import SHARED
from hector.runtime.again import alive, in_transform, plain_apply
from hector.runtime.bags import Bags, EdgeRows
from hector.runtime.executable import graph_arrays

PLAIN = (torch.float32, torch.float64)


class RowSums(NamedTuple):
    """Rows that are added up, and the same of the gradient."""

    bags: Bags
    back: Bags
    weight: Tensor | None = None
    """Of the rows, in the order of `bags`."""
    back_weight: Tensor | None = None
    counts: Tensor | None = None
    """What sums are divided by: [nodes, 1]."""

    @classmethod
    def of(cls, structure: HeteroGraph) -> "RowSums":
        """Return the sums over edges."""
        edges = EdgeRows(graph_arrays(structure), Domain.EDGE)
        to, back = (Index.DST, Index.SRC), (Index.SRC, Index.DST)
        return cls(edges.bags(*to, 1), edges.bags(*back, 1))

    def times(self, weight: Tensor) -> "RowSums":
        """Return the sums of rows times `weight`, a number an edge."""
        sides = self.bags, self.back
        own, back = (weight if b.order is None else weight[b.order] for b in sides)
        bags, others = (b._replace(order=None) for b in sides)
        return RowSums(bags, others, own, back)


def sums(r: Any) -> RowSums:
    """Return the way of sums of sources' rows."""
    return RowSums.of(r.structure)


@cache
def means(dtype: torch.dtype) -> Callable[[Any], RowSums]:
    """Return the way of their means."""

    def make(r: Any) -> RowSums:
        way = sums(r)  # first: it says what is wrong with ids
        counts = r.in_degrees().clamp(min=1)[:, None]
        return way._replace(counts=counts.to(dtype))

    return make


class _Sum(torch.autograd.Function):
    """Add up the rows of one end at the other; its gradient is a sum the other way, and
    so differentiable again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: RowSums) -> Tensor:
        """Return [nodes, width], what a program's sum is."""
        ctx.back = RowSums(way.back, way.bags, way.back_weight, way.weight)
        return way.bags.sum(rows.contiguous(), way.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of rows."""
        return _Sum.apply(grad, ctx.back), None  # type: ignore[no-untyped-call]


_apply = plain_apply(_Sum)


def sum_rows(r: Any, rows: Tensor, make: Callable[[Any], RowSums]) -> Tensor | None:
    """Return sums of sources' rows, None where a program is needed. What `make` makes
    of the edges is made once for edges as they are."""
    if (
        not rows.is_cpu
        or rows.dtype not in PLAIN
        or rows.dim() != 2
        or r.programs is not SHARED  # nor is a typed graph's
        or r.two_sided
        or not r.num_edges()
        or not rows.shape[1]
        or MASK in r.edata
        or in_transform() is not None
    ):
        return None
    r.srcdata.check("rows", rows)
    r.counts["compiled"] += 1
    way: RowSums = r.now().kept(make, lambda: make(r))
    found: Tensor = _apply(alive(rows), way)
    return found if way.counts is None else found / way.counts


def way_of(reduce: ReduceFunction, rows: Tensor) -> Callable[[Any], RowSums] | None:
    """Return the way of a reducer, None where a program is needed."""
    if reduce.reducer is Reducer.SUM:
        return sums
    return means(rows.dtype) if reduce.reducer is Reducer.MEAN else None


def plain_sum(
    r: Any, message: MessageFunction, reduce: ReduceFunction
) -> Tensor | None:
    """Return the sum or mean of a feature of sources, None where a program is
    needed."""
    side, name = message.left
    if message.combine is not Combine.COPY or side is not Side.SOURCE:
        return None
    way = way_of(reduce, r.srcdata[name])
    return None if way is None else sum_rows(r, r.srcdata[name], way)
