"""Fused sums and dot products on a CPU against plain operators."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hector
from hector import HeteroGraph
from hector.arrays import GraphArrays
from hector.ir.types import Domain, Index
from hector.precision import MANY
from hector.runtime.bags import CHUNK, Dot, Edges, Read, Total, differentiable

NODES, EDGES = 40, 3 * CHUNK + 7


def edges(hub: int = 0) -> Edges:
    """Random edges, `hub` of them into node 0."""
    gen = torch.Generator().manual_seed(1)
    ends = torch.randint(NODES, (2, EDGES), generator=gen)
    ends[1, :hub] = 0
    kinds = torch.randint(3, (EDGES,), generator=gen)
    graph = HeteroGraph.from_pyg(ends, kinds, num_nodes=NODES, num_relations=3)
    return Edges(GraphArrays(graph), Domain.EDGE)


def gathered(e: Edges, rows: Tensor, index: Index | None) -> Tensor:
    return rows if index is None else rows[e.arrays.index(Domain.EDGE, index).long()]


def summed(e: Edges, rows: Tensor, group: Index) -> Tensor:
    out = rows.new_zeros(
        e.arrays.segments(e.domain, group).ptr.numel() - 1, *rows.shape[1:]
    )
    return out.index_add(0, e.arrays.index(Domain.EDGE, group).long(), rows)


@pytest.mark.parametrize("hub", [0, MANY + 30])
@pytest.mark.parametrize("read", [None, Index.SRC, Index.ETYPE])
@pytest.mark.parametrize("group", [Index.DST, Index.SRC, Index.DST_PAIR, Index.ETYPE])
@pytest.mark.parametrize("weights", [0, 1, 4])
def test_totals(hub: int, read: Any, group: Any, weights: int) -> None:
    e = edges(hub)
    sizes = {None: EDGES, Index.SRC: NODES, Index.ETYPE: 3}
    rows = torch.randn(sizes[read], 4, 3, dtype=torch.float64, requires_grad=True)
    weight = None
    if weights:
        weight = torch.rand(EDGES, weights, 1, dtype=torch.float64, requires_grad=True)
    there = gathered(e, rows, read)
    want = summed(e, there if weight is None else there * weight, group)
    torch.testing.assert_close(e.total(rows, read, group, weight), want)
    got = differentiable(Total, e, rows, read, group, weight)
    leaves = [rows] if weight is None else [rows, weight]
    compare(got, want, leaves)


@pytest.mark.parametrize("read", [None, Index.SRC])
@pytest.mark.parametrize("other", [None, Index.DST])
def test_dots(read: Any, other: Any) -> None:
    e = edges()
    a, b = (
        torch.randn(EDGES if i is None else NODES, 2, 5, dtype=torch.float64)
        for i in (read, other)
    )
    a.requires_grad_(), b.requires_grad_()
    want = (gathered(e, a, read) * gathered(e, b, other)).sum(2, keepdim=True)
    compare(differentiable(Dot, e, a, read, b, other), want, [a, b])


def test_reads() -> None:
    e, rows = edges(), torch.randn(NODES, 2, 3, dtype=torch.float64, requires_grad=True)
    got = differentiable(Read, e, rows, Index.SRC)
    compare(got, gathered(e, rows, Index.SRC), [rows])


def compare(got: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    """Values, gradients and second gradients."""
    torch.testing.assert_close(got, want)
    found = []
    for value in (got, want):
        # Of sums of thousands, the sine would be as inexact as large numbers are.
        scaled = value / want.detach().abs().max()
        firsts = torch.autograd.grad(scaled.sin().sum(), leaves, create_graph=True)
        total = torch.stack([(g / EDGES).cos().sum() for g in firsts]).sum()
        found.append([*firsts, *torch.autograd.grad(total, leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_long_sums_are_exact_in_float32() -> None:
    e, rows = edges(EDGES), torch.full((NODES, 1, 2), 0.7)
    found = e.total(rows, Index.SRC, Index.DST, None)[0]
    assert bool(((found / EDGES - 0.7).abs() < 2e-7).all())


@hector.compile
def degrees(g: Any, feature: Any) -> Any:
    for n in g.dst_nodes():
        n["d"] = hector.in_degree(n)
    return g.ndata["d"]


def test_results_are_the_caller_s_to_change() -> None:
    g = HeteroGraph.from_arrays([0, 1, 1], [1, 0, 1], [0, 0, 0], num_nodes=2)
    first = degrees(g, torch.ones(2, 1))
    first.mul_(7)
    assert degrees(g, torch.ones(2, 1)).tolist() == [1, 2]
