"""Fused sums and dot products on a CPU against plain operators."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hector
from hector import HeteroGraph
from hector.arrays import GraphArrays
from hector.ir.builder import Builder
from hector.ir.node import Op
from hector.ir.types import Domain, Index
from hector.precision import MANY
from hector.runtime.bags import CHUNK, EdgeRows
from hector.runtime.host import Host
from hector.runtime.reference import Reference

NODES, EDGES = 40, 3 * CHUNK + 7


def edges(hub: int = 0) -> EdgeRows:
    """Random edges, `hub` of them into node 0."""
    gen = torch.Generator().manual_seed(1)
    ends = torch.randint(NODES, (2, EDGES), generator=gen)
    ends[1, :hub] = 0
    kinds = torch.randint(3, (EDGES,), generator=gen)
    graph = HeteroGraph.from_pyg(ends, kinds, num_nodes=NODES, num_relations=3)
    return EdgeRows(GraphArrays(graph), Domain.EDGE)


def gathered(e: EdgeRows, rows: Tensor, index: Index | None) -> Tensor:
    return rows if index is None else rows[e.arrays.index(Domain.EDGE, index).long()]


def summed(e: EdgeRows, rows: Tensor, group: Index) -> Tensor:
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
    rows = torch.randn(sizes[read], 4, 3, dtype=torch.float64)
    weight = None
    if weights:
        weight = torch.rand(EDGES, weights, 1, dtype=torch.float64)
    there = gathered(e, rows, read)
    want = summed(e, there if weight is None else there * weight, group)
    torch.testing.assert_close(e.total(rows, read, group, weight), want)


@pytest.mark.parametrize("group", [Index.DST, Index.SRC, Index.DST_PAIR, Index.ETYPE])
def test_maxima(group: Any) -> None:
    e = edges(hub=20)
    rows = torch.randn(EDGES, 2, 3) - 9
    rows[5], rows[6] = torch.nan, -torch.inf
    index = e.arrays.index(Domain.EDGE, group).long()
    size = e.arrays.segments(Domain.EDGE, group).ptr.numel() - 1
    where = index.view(-1, 1, 1).expand_as(rows)
    want = torch.zeros(size, 2, 3)
    want = want.scatter_reduce(0, where, rows, "amax", include_self=False)
    torch.testing.assert_close(
        e.largest(rows, group), want, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("read", [None, Index.SRC])
@pytest.mark.parametrize("other", [None, Index.DST])
def test_dots(read: Any, other: Any) -> None:
    e = edges()
    a, b = (
        torch.randn(EDGES if i is None else NODES, 2, 5, dtype=torch.float64)
        for i in (read, other)
    )
    want = (gathered(e, a, read) * gathered(e, b, other)).sum(2, keepdim=True)
    torch.testing.assert_close(e.dot(a, read, b, other), want)


@pytest.mark.parametrize("heads", [1, 2])
def test_sums_of_products_term_by_term(heads: int) -> None:
    """What the compiler makes of second derivatives: no operation has its operand in
    memory."""
    b, e = Builder(), edges()
    arrays, shape = e.arrays, (heads, 4)
    x, y = (b.input(n, Domain.NODE, shape) for n in "xy")
    own, message = (b.input(n, Domain.EDGE, shape) for n in ("own", "message"))
    one, other = (b.input(n, Domain.EDGE, (heads, 1)) for n in ("one", "other"))
    weight = b.input("weight", Domain.ETYPE, (heads, 4, 5))
    flat = b.input("flat", Domain.ETYPE, (1, heads * 4, 5))
    bias = b.input("bias", Domain.ETYPE, (1, 5))
    source = b.read(x, Index.SRC, Domain.EDGE)
    target = b.read(y, Index.DST, Domain.EDGE)
    terms = b.add(b.mul(b.mul(source, one), other), b.div(message, other))
    terms = b.add(terms, b.mul(target, one))
    off = b.sub(source, target)
    joined = b.reshape(terms, (1, heads * 4))
    product = b.linear(joined, flat)
    biased = b.make(
        Op.LINEAR, (*product.inputs, bias), product.type, **dict(product.attrs)
    )
    wanted = [
        b.agg(terms, Index.DST),
        b.agg(terms, Index.SRC_PAIR),
        b.sum_width(b.mul(terms, own)),
        b.sum_width(b.mul(b.mul(source, target), one)),
        b.sum_width(b.mul(off, off)),
        b.agg(b.mul(off, one), Index.DST),
        b.linear(terms, weight),
        product,
        biased,
        b.linear(b.linear(terms, weight), weight, transpose=True),
        b.outer(terms, own, Domain.ETYPE),
        b.outer(joined, b.reshape(source, joined.shape), Domain.ETYPE),
        b.outer(source, target, Domain.GLOBAL),
    ]
    gen = torch.Generator().manual_seed(2)
    leaves = (x, y, own, message, one, other, weight, flat, bias)
    given = {
        n: torch.rand(arrays.rows(n.domain), *n.shape, generator=gen).double() + 0.1
        for n in leaves
    }
    host, plain = (k(arrays, torch.float64) for k in (Host, Reference))
    for known in ([], [terms], [source]):
        inside = plain.run(known, given)
        got = host.run(wanted, {**given, **inside})
        want = plain.run(wanted, given)
        for node in wanted:
            torch.testing.assert_close(got[node], want[node])
    steps = host.planned((wanted[0], wanted[2], product), set(given))
    assert not {terms, joined, source, target} & {s.node for s in steps}


def test_differences_do_not_cancel() -> None:
    """Of points far from the origin, distances are of their difference."""
    b, e = Builder(), edges()
    x = b.input("x", Domain.NODE, (1, 3))
    source = b.read(x, Index.SRC, Domain.EDGE)
    target = b.read(x, Index.DST, Domain.EDGE)
    offs = [
        b.sub(source, target),
        b.add(source, b.unary(Op.NEG, target)),
        b.add(source, b.mul(target, b.const(-1.0))),
    ]
    wanted = [b.sum_width(b.mul(off, off)) for off in offs]
    wanted += [b.agg(off, Index.DST) for off in offs]
    points = torch.rand(NODES, 1, 3, dtype=torch.float64) + 1e4
    exact = Host(e.arrays, torch.float64).run(wanted, {x: points})
    found = Host(e.arrays, torch.float32).run(wanted, {x: points.float()})
    for node in wanted:
        error = (found[node] - exact[node]).abs().max()
        assert error <= 2e-2 * exact[node].abs().max()


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


@hector.compile
def shares(g: Any, feature: Any) -> Any:
    for n in g.dst_nodes():
        n["d"] = 1.0 / (hector.in_degree(n) + 1.0)
        n["h"] = n.feature * n["d"]
    return g.ndata["h"], g.ndata["d"], g.ndata["d"]


def test_what_the_graph_decides_is_made_once_and_kept_apart() -> None:
    g = HeteroGraph.from_arrays([0, 1, 1], [1, 0, 1], [0, 0, 0], num_nodes=2)
    for rows in (torch.ones(2, 1), torch.ones(2, 3), torch.ones(2, 3)):
        found = shares(g, rows)
        for out in found:
            first = out.view(2, -1)[:, 0]
            assert torch.allclose(first, torch.tensor([1 / 2, 1 / 3]))
        for out in found:
            out.mul_(7)


@pytest.mark.parametrize("slope", [0.2, 0.25, -0.5])
def test_slopes_of_leaky_relu(slope: float) -> None:
    """One operation of PyTorch's, where the expression is that of a slope."""
    b, e = Builder(), edges()
    x, y = (b.input(n, Domain.EDGE, (2, 1)) for n in "xy")
    gate = b.mul(b.binary(Op.GT, x, b.const(0.0)), b.const(1 - slope))
    other = b.mul(b.binary(Op.GT, x, b.const(0.5)), b.const(1 - slope))
    wanted = (
        b.mul(y, b.add(gate, b.const(slope))),
        b.mul(y, b.add(gate, b.const(slope + 1))),
        b.mul(y, b.add(other, b.const(slope))),
    )
    rows = torch.randn(EDGES, 2, 1, dtype=torch.float64)
    rows[:3] = torch.tensor([0.0, -0.0, torch.nan])[:, None, None]
    given = {x: rows, y: torch.randn_like(rows)}
    host, plain = (k(e.arrays, torch.float64) for k in (Host, Reference))
    got, want = host.run(wanted, given), plain.run(wanted, given)
    for node in wanted:
        torch.testing.assert_close(got[node], want[node], rtol=1e-12, atol=0)
    steps = {n for s in host.planned(wanted[:1], {x, y}) for n in (s.node, *s.operands)}
    assert gate not in steps
