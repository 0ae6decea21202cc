"""Ten programs after what DGL's users asked in public threads, each against a loop.

The numbers are those of issues and pull requests of dmlc/dgl; the programs are our own.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hector.message.dgl as dgl
from hector.message import functions as fn
from hector.message import nn as dglnn


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(4)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def social() -> dgl.HeteroGraph:
    return dgl.heterograph(
        {
            ("user", "follows", "user"): (torch.tensor([0, 1]), torch.tensor([1, 1])),
            ("game", "attracts", "user"): (torch.tensor([0]), torch.tensor([1])),
        }
    )


def test_1329_a_node_without_messages_has_zeros() -> None:
    """Why is the row of user 0 zero, and how is its old row kept?"""
    g = social()
    g.nodes["user"].data["h"] = torch.tensor([[1.0], [2.0]])
    g.nodes["game"].data["h"] = torch.tensor([[1.0]])
    call = (fn.copy_u("h", "m"), fn.sum("m", "new"))
    g.multi_update_all({"follows": call, "attracts": call}, "sum")
    assert g.nodes["user"].data["new"].tolist() == [[0.0], [4.0]]
    degree = sum(g.in_degrees(etype=e) for e in ("follows", "attracts"))
    h, new = (g.nodes["user"].data[k] for k in ("h", "new"))
    kept = torch.where(degree[:, None] > 0, new, h)
    assert kept.tolist() == [[1.0], [4.0]]


def test_921_messages_of_several_types_are_fused_by_attention() -> None:
    """How are messages of two edge types received at once and weighed?"""
    g, width = social(), 3
    rows = {"user": torch.randn(2, width), "game": torch.randn(1, width)}
    query = torch.randn(width, requires_grad=True)
    for n, h in rows.items():
        g.nodes[n].data["h"] = h
    call = (fn.copy_u("h", "m"), fn.mean("m", "near"))

    def weigh(results: list[Tensor]) -> Tensor:
        each = torch.stack(results, 1)
        return ((each @ query).softmax(1)[..., None] * each).sum(1)

    g.multi_update_all({"follows": call, "attracts": call}, weigh)
    got = g.nodes["user"].data["near"]
    follows, attracts = rows["user"].mean(0), rows["game"][0]
    # In the order of canonical types: attracts, follows.
    a = torch.softmax(torch.stack([attracts @ query, follows @ query]), 0)
    torch.testing.assert_close(got[1], a[0] * attracts + a[1] * follows)
    assert torch.autograd.grad(got.sum(), query)[0].any()


def test_1088_one_edge_type_between_two_node_types_needs_no_name() -> None:
    """`update_all` on a bipartite graph that has one type of edges."""
    ends = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])
    g = dgl.heterograph({("U", "E", "V"): ends})
    g.nodes["U"].data["x"] = torch.randn(3, 3)
    g.update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
    y = g.nodes["V"].data["y"]
    torch.testing.assert_close(y[1:], g.nodes["U"].data["x"])
    assert not y[0].any()


def test_2300_functions_read_destinations_of_a_block() -> None:
    """A message function reads what was set for a block's destinations."""
    kinds = [("a", "r", "b"), ("b", "s", "b")]
    g = dgl.heterograph(
        {k: (torch.randint(6, (20,)), torch.randint(6, (20,))) for k in kinds},
        {"a": 6, "b": 6},
    )
    x = {n: torch.randn(6, 4) for n in "ab"}
    seeds = torch.tensor([4, 1])
    frontier = dgl.sample_neighbors(g, {"b": seeds}, -1)
    block = dgl.to_block(frontier, {"b": seeds})
    lin = nn.ModuleDict({k[1]: nn.Linear(4, 4) for k in kinds})
    funcs = {}
    for start, name, end in block.canonical_etypes:
        ids = block.srcnodes[start].data[dgl.NID]
        block.srcnodes[start].data[f"s_{name}"] = lin[name](x[start][ids])
        ids = block.dstnodes[end].data[dgl.NID]
        block.dstnodes[end].data[f"d_{name}"] = lin[name](x[end][ids])

        def message(edges: Any, name: str = name) -> Any:
            return {"m": edges.src[f"s_{name}"] * edges.dst[f"d_{name}"]}

        funcs[name] = (message, lambda n: {"h": n.mailbox["m"].mean(1)})
    block.multi_update_all(funcs, "sum")
    got = block.dstnodes["b"].data["h"]
    for i, node in enumerate(seeds.tolist()):
        want = torch.zeros(4)
        for kind in kinds:
            src, dst = g.edges(etype=kind)
            near = src[dst == node]
            if len(near):
                own = lin[kind[1]](x["b"][node])
                want = want + (lin[kind[1]](x[kind[0]][near]) * own).mean(0)
        torch.testing.assert_close(got[i], want)


def test_4817_two_edge_types_of_one_node_type_have_gradients() -> None:
    """Edge products by type, summed over types, with one-dimensional features."""
    g = dgl.heterograph(
        {
            ("drug", "interacts", "drug"): (torch.tensor([0, 1]), torch.tensor([1, 2])),
            ("drug", "treats", "drug"): (torch.tensor([1]), torch.tensor([2])),
        }
    )
    h = torch.full((3,), 5.0, requires_grad=True)
    g.srcdata["h"] = h
    g.edges["interacts"].data["w"] = torch.tensor([1.0, 2.0])
    g.edges["treats"].data["w"] = torch.tensor([4.0])
    for etype in g.canonical_etypes:
        g.apply_edges(fn.u_mul_e("h", "w", "m"), etype=etype)
    call = (fn.copy_e("m", "t"), fn.sum("t", "h1"))
    g.multi_update_all({"interacts": call, "treats": call}, "sum")
    assert g.ndata["h1"].tolist() == [0.0, 5.0, 30.0]
    (grad,) = torch.autograd.grad(g.ndata["h1"].sum(), [h])
    assert grad.tolist() == [1.0, 6.0, 0.0]


def test_3509_weights_of_edges_in_training() -> None:
    """GCN and SAGE with a weight an edge, normalized by both ends' sums."""
    src, dst = torch.randint(8, (2, 30))
    src, dst = torch.cat((src, torch.arange(8))), torch.cat((dst, torch.arange(8)))
    g, x, w = dgl.graph((src, dst)), torch.randn(8, 5), torch.rand(38) + 0.1
    with g.local_scope():
        g.edata["w"] = w
        g.update_all(fn.copy_e("w", "m"), fn.sum("m", "in"))
        back = dgl.reverse(g, copy_edata=True)
        back.update_all(fn.copy_e("w", "m"), fn.sum("m", "out"))
        g.ndata["l"], g.ndata["r"] = back.ndata["out"].rsqrt(), g.ndata["in"].rsqrt()
        g.apply_edges(lambda e: {"n": e.src["l"] * e.dst["r"] * e.data["w"]})
        norm = g.edata["n"]
    layer = dglnn.GraphConv(5, 3, norm="none")
    dense = torch.zeros(8, 8).index_put((dst, src), w, accumulate=True)
    scaled = dense / (dense.sum(1)[:, None] * dense.sum(0)).sqrt()
    want = scaled @ x @ layer.weight + layer.bias
    torch.testing.assert_close(layer(g, x, edge_weight=norm), want)
    sage = dglnn.SAGEConv(5, 3, "mean")
    count = torch.bincount(dst, minlength=8)[:, None]
    want = F.linear(dense @ x / count, sage.fc_neigh.weight) + sage.fc_self(x)
    torch.testing.assert_close(sage(g, x, edge_weight=w), want)


def test_1828_ratings_are_decoded_along_bipartite_edges() -> None:
    """A bilinear score for each class of the edges between users and movies."""
    src, dst = torch.randint(5, (12,)), torch.randint(4, (12,))
    g = dgl.heterograph(
        {("user", "rates", "movie"): (src, dst)}, {"user": 5, "movie": 4}
    )
    u, m = torch.randn(5, 6), torch.randn(4, 6)
    basis = torch.randn(3, 6, 6, requires_grad=True)
    scores = []
    with g.local_scope():
        g.nodes["movie"].data["h"] = m
        for p in basis:
            g.nodes["user"].data["h"] = u @ p
            g.apply_edges(fn.u_dot_v("h", "h", "s"))
            scores.append(g.edata["s"])
    got = torch.cat(scores, 1)
    want = torch.einsum("ea,bac,ec->eb", u[src], basis, m[dst])
    torch.testing.assert_close(got, want)
    assert torch.autograd.grad(got.sum(), basis)[0].shape == basis.shape


def test_2019_capsules_are_routed_by_a_softmax_over_outgoing_edges() -> None:
    """`edge_softmax(norm_by="src")`, three rounds of routing."""
    src = torch.arange(4).repeat_interleave(3)
    dst = torch.arange(3).repeat(4)
    g = dgl.heterograph({("low", "to", "high"): (src, dst)})
    votes = torch.randn(12, 5)
    logits, want = torch.zeros(12, 1), torch.zeros(4, 3)
    for _ in range(3):
        g.edata["c"] = dgl.edge_softmax(g, logits, norm_by="src")
        g.edata["v"] = votes
        weigh = lambda e: {"m": e.data["c"] * e.data["v"]}  # noqa: E731
        g.update_all(weigh, fn.sum("m", "out"))
        g.apply_edges(fn.e_dot_v("v", "out", "agree"))
        logits = logits + g.edata["agree"]
        c = want.softmax(1)
        out = (c[..., None] * votes.view(4, 3, 5)).sum(0)
        torch.testing.assert_close(g.nodes["high"].data["out"], out)
        want = want + (votes.view(4, 3, 5) * out).sum(2)


def test_1172_edge_softmax_has_second_derivatives() -> None:
    src, dst = torch.randint(6, (2, 20))
    g = dgl.graph((src, dst), num_nodes=6)
    score = torch.randn(20, 2, 1, requires_grad=True)

    def loop(s: Tensor) -> Tensor:
        out = torch.zeros_like(s)
        for n in dst.unique():
            at = (dst == n).nonzero().flatten()
            out = out.index_copy(0, at, s[at].softmax(0))
        return out

    found = []
    for soft in (lambda s: dgl.edge_softmax(g, s), loop):
        (first,) = torch.autograd.grad(
            soft(score).square().sum(), score, create_graph=True
        )
        found.append([first, torch.autograd.grad(first.square().sum(), score)[0]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_3330_two_neighbours_are_drawn_with_the_graph_s_own_ids() -> None:
    """Sampled nodes and edges have the numbers that they were given."""
    g = dgl.graph(([1, 2, 3, 5, 6, 9, 10], [0, 0, 0, 1, 3, 2, 5]), num_nodes=100)
    g.ndata["id"] = torch.arange(100)
    sampler = dgl.dataloading.NeighborSampler([2, 2])
    for seeds in (torch.tensor([0]), torch.tensor([3, 0])):
        inputs, outputs, blocks = sampler.sample(g, seeds)
        assert torch.equal(outputs, seeds)
        assert torch.equal(blocks[0].srcdata["id"], inputs)
        last = blocks[-1]
        src, dst = last.edges()
        ids = last.edata[dgl.EID]
        u, v = g.find_edges(ids)
        assert torch.equal(last.srcdata[dgl.NID][src], u)
        assert torch.equal(last.dstdata[dgl.NID][dst], v)
        assert int((v == 0).sum()) == 2 and len(ids.unique()) == len(ids)
    part = dgl.edge_subgraph(
        dgl.heterograph({("a", "r", "b"): g.edges()}), {"r": [0, 6]}
    )
    assert part.nodes["a"].data[dgl.NID].tolist() == [1, 10]
    assert part.nodes["b"].data[dgl.NID].tolist() == [0, 5]
    assert [t.tolist() for t in part.edges()] == [[0, 1], [0, 1]]
