"""Layers with DGL's arguments, against loops over nodes in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.message import Graph, HeteroGraph, to_block
from hector.message import nn as dglnn

N, E = 9, 30
torch.manual_seed(0)
SRC, DST = torch.randint(N, (2, E))
SRC, DST = torch.cat((SRC, torch.arange(N))), torch.cat((DST, torch.arange(N)))
IN = torch.bincount(DST, minlength=N).double()
OUT = torch.bincount(SRC, minlength=N).double()
WEIGHT = torch.rand(E + N, dtype=torch.float64)


def rows() -> Tensor:
    gen = torch.Generator().manual_seed(4)
    return torch.randn(N, 5, generator=gen, dtype=torch.float64)


def by_node(how: Callable[[Tensor, Tensor], Tensor], h: Tensor) -> Tensor:
    """`how` of the rows of a node's neighbours and of the ids of its edges."""
    made = []
    for node in range(N):
        ids = (DST == node).nonzero().flatten()
        made.append(how(h[SRC[ids]], ids))
    return torch.stack(made)


def agree(layer: nn.Module, loop: Callable[[Tensor], Tensor], *args: Any) -> None:
    """On the graph, and on a block of some of its nodes, forward and backward."""
    x = rows().requires_grad_()
    graph = Graph(SRC, DST, num_nodes=N)
    wanted = loop(x)
    found = layer(graph, x, *args)
    torch.testing.assert_close(found, wanted)
    leaves = [x, *layer.parameters()]
    mine = torch.autograd.grad(found.square().sum(), leaves)
    theirs = torch.autograd.grad(wanted.square().sum(), leaves)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    if not args:
        block = to_block(graph, torch.arange(N).flip(0))
        found = layer(block, x[block.srcdata["_ID"]])
        torch.testing.assert_close(found, wanted.flip(0))


@pytest.mark.parametrize("norm", ["both", "right", "left", "none"])
@pytest.mark.parametrize("width", [3, 8])
def test_graph_conv(norm: str, width: int) -> None:
    layer = dglnn.GraphConv(5, width, norm=norm).double()

    def loop(x: Tensor) -> Tensor:
        left = {"both": OUT**-0.5, "left": 1 / OUT}.get(norm, torch.ones(N))
        right = {"both": IN**-0.5, "right": 1 / IN}.get(norm, torch.ones(N))
        near = by_node(lambda m, _: m.sum(0), x * left[:, None])
        return near * right[:, None] @ layer.weight + layer.bias

    agree(layer, loop)

    def weighed(x: Tensor) -> Tensor:
        left = {"both": OUT**-0.5, "left": 1 / OUT}.get(norm, torch.ones(N))
        right = {"both": IN**-0.5, "right": 1 / IN}.get(norm, torch.ones(N))
        near = by_node(lambda m, ids: (m * WEIGHT[ids, None]).sum(0), x * left[:, None])
        return near * right[:, None] @ layer.weight + layer.bias

    agree(layer, weighed, None, WEIGHT)


@pytest.mark.parametrize("kind", ["mean", "gcn", "pool", "lstm"])
@pytest.mark.parametrize("width", [3, 8])
def test_sage_conv(kind: str, width: int) -> None:
    layer = dglnn.SAGEConv(5, width, kind).double()

    def loop(x: Tensor) -> Tensor:
        if kind == "gcn":
            near = by_node(lambda m, _: m.sum(0), x) + x
            return (near / (IN + 1)[:, None]) @ layer.fc_neigh.weight.T + layer.bias
        hows: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "mean": lambda m, _: m.mean(0),
            "pool": lambda m, _: m.amax(0),
            "lstm": lambda m, _: layer.lstm(m[None])[1][0][0, 0],
        }
        h = F.relu(layer.fc_pool(x)) if kind == "pool" else x
        return layer.fc_self(x) + layer.fc_neigh(by_node(hows[kind], h))

    agree(layer, loop)


@pytest.mark.parametrize("kind", ["sum", "mean", "max"])
def test_gin_conv(kind: str) -> None:
    net = nn.Linear(5, 3)
    layer = dglnn.GINConv(net, kind, init_eps=0.3, learn_eps=True).double()
    how = {"sum": lambda m: m.sum(0), "mean": lambda m: m.mean(0)}
    reduce = how.get(kind, lambda m: m.amax(0))
    agree(
        layer, lambda x: net((1 + layer.eps) * x + by_node(lambda m, _: reduce(m), x))
    )


@pytest.mark.parametrize("residual", [False, True])
def test_gat_conv(residual: bool) -> None:
    layer = dglnn.GATConv(5, 4, 3, residual=residual).double()

    def loop(x: Tensor, attention: bool = False) -> Tensor:
        h = layer.fc_src(x).view(N, 3, 4)
        left, right = (h * layer.attn_l).sum(-1), (h * layer.attn_r).sum(-1)
        score = F.leaky_relu(left[SRC] + right[DST], 0.2)
        share = torch.empty_like(score)
        for node in range(N):
            share[DST == node] = score[DST == node].softmax(0)
        if attention:
            return share[..., None]
        out = by_node(lambda m, ids: (m * share[ids, :, None]).sum(0), h)
        if residual:
            out = out + layer.res_fc(x).view(N, 3, 4)
        return out + layer.bias.view(1, 3, 4)

    agree(layer, loop)
    graph = Graph(SRC, DST, num_nodes=N)
    _, found = layer(graph, rows(), get_attention=True)
    torch.testing.assert_close(found, loop(rows(), True))


def test_errors() -> None:
    lonely = Graph([0], [1], num_nodes=3)
    with pytest.raises(ValueError, match="add self-loops"):
        dglnn.GraphConv(2, 2)(lonely, torch.ones(3, 2))
    dglnn.GraphConv(2, 2, allow_zero_in_degree=True)(lonely, torch.ones(3, 2))
    with pytest.raises(ValueError, match="aggregator_type"):
        dglnn.SAGEConv(2, 2, "sum")
    with pytest.raises(ValueError, match="expected norm"):
        dglnn.GraphConv(2, 2, norm="l2")
    with pytest.raises(ValueError, match="expected aggregate"):
        dglnn.HeteroGraphConv({}, "median")


@pytest.mark.parametrize("how", ["sum", "mean", "max", "stack"])
def test_hetero_graph_conv(how: str) -> None:
    kinds = [("u", "f", "u"), ("u", "b", "i"), ("i", "s", "u"), ("i", "none", "u")]
    sizes = {"u": 6, "i": 4}
    edges = {
        k: (torch.randint(sizes[k[0]], (n,)), torch.randint(sizes[k[2]], (n,)))
        for k, n in zip(kinds, (9, 8, 7, 0), strict=True)
    }
    g = HeteroGraph(edges, sizes)
    x = {n: torch.randn(c, 3).double() for n, c in sizes.items()}
    mods = {r: dglnn.SAGEConv(3, 2, "mean").double() for r in ("f", "b", "s", "none")}
    found = dglnn.HeteroGraphConv(mods, how)(g, x)
    parts: dict[str, list[Tensor]] = {"u": [], "i": []}
    for kind in g.canonical_etypes:
        src, dst = edges[kind]
        layer = mods[kind[1]]
        near = []
        for node in range(sizes[kind[2]]):
            mine = x[kind[0]][src[dst == node]]
            near.append(mine.mean(0) if len(mine) else mine.sum(0))
        own = layer.fc_self(x[kind[2]]) + layer.fc_neigh(torch.stack(near))
        parts[kind[2]].append(own)
    for n, rows in parts.items():
        both = torch.stack(rows)
        wanted = {
            "sum": both.sum(0),
            "mean": both.mean(0),
            "max": both.amax(0),
            "stack": both.transpose(0, 1),
        }
        torch.testing.assert_close(found[n], wanted[how])
