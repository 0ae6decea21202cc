"""`@hector.compile` on layers as DGL's users write them, against the same layers run
eagerly, and against loops."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hector
import hector.message.dgl as dgl
from hector import UnsupportedPythonError
from hector.message import functions as fn
from hector.message import nn as dglnn

F64 = torch.float64
NODES, RELATIONS, EDGES = 9, 3, 30


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(11)
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn() -> tuple[dgl.Graph, Tensor]:
    src, dst = torch.randint(NODES - 1, (2, EDGES))
    return dgl.graph((src, dst), num_nodes=NODES), torch.randint(RELATIONS, (EDGES,))


class RGCN(nn.Module):
    """DGL's RelGraphConv in its documented form."""

    def __init__(self, ins: int, outs: int, regularizer: str | None, act: Any) -> None:
        super().__init__()
        self.linear_r = dglnn.TypedLinear(ins, outs, RELATIONS, regularizer, 2)
        self.loop_weight = nn.Parameter(torch.randn(ins, outs))
        self.h_bias = nn.Parameter(torch.randn(outs))
        self.norm, self.activation = nn.LayerNorm(outs), act
        self.dropout = nn.Dropout(0.0)

    def message(self, edges: Any) -> Any:
        m = self.linear_r(edges.src["h"], edges.data["etype"], False)
        if "norm" in edges.data:
            m = m * edges.data["norm"]
        return {"m": m}

    def written(self, g: Any, feat: Any, etypes: Any, norm: Any = None) -> Any:
        with g.local_scope():
            g.srcdata["h"] = feat
            if norm is not None:
                g.edata["norm"] = norm
            g.edata["etype"] = etypes
            g.update_all(self.message, fn.sum("m", "h"))
            h = g.dstdata["h"]
            h = h + self.h_bias
            h = h + feat @ self.loop_weight
            if self.activation:
                h = self.activation(h)
            return self.dropout(h)

    forward = hector.compile(written)


def same(module: nn.Module, args: tuple[Any, ...], inputs: list[Tensor]) -> None:
    got, want = module(*args), module.written(*args)  # type: ignore[operator]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    ones = torch.linspace(-1, 1, want.numel()).view_as(want)
    inputs = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    mine = torch.autograd.grad(got, inputs, ones, allow_unused=True)
    theirs = torch.autograd.grad(want, inputs, ones, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) is (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_rgcn_of_typed_linear(regularizer: str | None) -> None:
    g, etypes = drawn()
    x = torch.randn(NODES, 4, requires_grad=True)
    norm = torch.rand(EDGES, 1, requires_grad=True)
    layer = RGCN(4, 6, regularizer, F.relu)
    same(layer, (g, x, etypes, norm), [x, norm])
    same(layer, (g, x, etypes), [x])
    assert not g.ndata and not g.edata
    # The types are part of the graph: others are another one.
    other = (etypes + 1) % RELATIONS
    same(layer, (g, x, other, norm), [x, norm])


def test_a_parameter_as_long_as_the_graph_has_nodes() -> None:
    g, etypes = drawn()
    layer = RGCN(4, NODES, None, None)
    x = torch.randn(NODES, 4, requires_grad=True)
    same(layer, (g, x, etypes), [x])


def test_typed_linear_against_a_loop() -> None:
    for regularizer in (None, "basis", "bdd"):
        layer = dglnn.TypedLinear(4, 6, RELATIONS, regularizer, 2)
        x, kinds = torch.randn(7, 4), torch.randint(RELATIONS, (7,))
        weight = layer.get_weight()
        if regularizer == "bdd":
            weight = torch.stack([torch.block_diag(*w) for w in weight])
        want = torch.stack([row @ weight[k] for row, k in zip(x, kinds, strict=True)])
        torch.testing.assert_close(layer(x, kinds), want)


class GAT(nn.Module):
    """DGL's GATConv: `apply_edges`, `edge_softmax`, `update_all`."""

    def __init__(self, ins: int, outs: int, heads: int) -> None:
        super().__init__()
        self.heads, self.outs = heads, outs
        self.fc = nn.Linear(ins, heads * outs, bias=False)
        self.attn_l = nn.Parameter(torch.randn(1, heads, outs))
        self.attn_r = nn.Parameter(torch.randn(1, heads, outs))
        self.leaky_relu, self.drop = nn.LeakyReLU(0.2), nn.Dropout(0.4)

    def written(self, graph: Any, feat: Any) -> Any:
        with graph.local_scope():
            h = self.fc(self.drop(feat)).view(-1, self.heads, self.outs)
            el = (h * self.attn_l).sum(dim=-1).unsqueeze(-1)
            er = (h * self.attn_r).sum(dim=-1).unsqueeze(-1)
            graph.srcdata.update({"ft": h, "el": el})
            graph.dstdata.update({"er": er})
            graph.apply_edges(fn.u_add_v("el", "er", "e"))
            e = self.leaky_relu(graph.edata.pop("e"))
            graph.edata["a"] = dgl.edge_softmax(graph, e)
            graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "ft"))
            return graph.dstdata["ft"].flatten(1)

    forward = hector.compile(written)


def test_gat_with_edge_softmax() -> None:
    g, _ = drawn()
    x = torch.randn(NODES, 4, requires_grad=True)
    layer = GAT(4, 3, 2).eval()
    same(layer, (g, x), [x])
    with pytest.raises(UnsupportedPythonError, match="dropout is not compiled"):
        layer.train()(g, x)


class RGAT(nn.Module):
    """Typed scores, a lambda, functions of one's own over mailboxes."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.conv_weights = nn.Parameter(torch.randn(RELATIONS, ins, outs))
        self.att = nn.Parameter(torch.randn(RELATIONS, outs))
        self.layers = nn.ModuleList([nn.Linear(outs, outs)])

    def written(self, g: Any, feat: Any, etypes: Any) -> Any:
        def message(edges: Any) -> Any:
            kinds = edges.data["etype"]
            weight = self.conv_weights[kinds]
            h = torch.bmm(edges.src["h"].unsqueeze(1), weight).squeeze(1)
            score = (h * self.att[kinds]).sum(-1, keepdim=True)
            return {"m": h, "e": F.leaky_relu(score, 0.1)}

        def reduce(nodes: Any) -> Any:
            alpha = F.softmax(nodes.mailbox["e"], dim=1)
            return {"r": torch.sum(alpha * nodes.mailbox["m"], dim=1)}

        g.ndata["h"] = feat
        g.edata["etype"] = etypes
        g.update_all(message, reduce, lambda nodes: {"out": nodes.data["r"].relu()})
        degree = g.in_degrees().clamp(min=1).pow(-0.5).unsqueeze(-1)
        return self.layers[0](g.ndata.pop("out") * degree)

    forward = hector.compile(written)


def test_functions_of_ones_own() -> None:
    g, etypes = drawn()
    x = torch.randn(NODES, 4, requires_grad=True)
    same(RGAT(4, 5), (g, x, etypes), [x])


@hector.compile
def weighted(g: Any, feat: Any, w: Any) -> Any:
    g.ndata["h"] = feat
    g.edata["w"] = w
    g.update_all(fn.u_mul_e("h", "w", "m"), fn.max("m", "largest"))
    g.apply_edges(lambda e: {"s": torch.cat([e.src["h"], e.dst["largest"]], dim=1)})
    return g.edata["s"], g.ndata["largest"]


def test_results_and_arguments_are_in_the_order_of_the_edges() -> None:
    g, _ = drawn()
    x, w = torch.randn(NODES, 4), torch.rand(EDGES, 1)
    src, dst = g.edges()
    rows, largest = weighted(g, x, w)
    want = torch.zeros(NODES, 4)
    for n in dst.unique():
        want[n] = (x[src] * w)[dst == n].amax(0)
    torch.testing.assert_close(largest, want)
    torch.testing.assert_close(rows, torch.cat((x[src], want[dst]), 1))


@hector.compile
def on_features(g: Any) -> Any:
    g.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "near"))
    return g.ndata["near"]


def test_features_of_the_graph_are_read() -> None:
    g, _ = drawn()
    g.ndata["h"] = torch.randn(NODES, 4, requires_grad=True)
    g.edata["w"] = torch.rand(EDGES, 1)
    got = on_features(g)
    g.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "near"))
    torch.testing.assert_close(got, g.ndata["near"])
    (grad,) = torch.autograd.grad(got.sum(), [g.ndata["h"]])
    (want,) = torch.autograd.grad(g.ndata["near"].sum(), [g.ndata["h"]])
    torch.testing.assert_close(grad, want)


@hector.compile
def typed(g: Any, feat: Any, weight: Any) -> Any:
    g.ndata["h"] = feat
    g.apply_edges(lambda e: {"m": e.src["h"] @ weight[e.data["_TYPE"]]})
    g.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
    return g.ndata["out"]


def test_a_typed_graph_of_hector_message() -> None:
    kinds = [("a", "to", "b"), ("b", "back", "a")]
    g = dgl.heterograph(
        {k: (torch.randint(4, (8,)), torch.randint(4, (8,))) for k in kinds},
        {"a": 4, "b": 5},
    )
    x = {"a": torch.randn(4, 3), "b": torch.randn(5, 3)}
    weight = torch.randn(2, 3, 2)
    got = typed(g, x, weight)
    want = {"a": torch.zeros(4, 2), "b": torch.zeros(5, 2)}
    for i, kind in enumerate(g.canonical_etypes):
        src, dst = g[kind].edges()
        want[kind[2]].index_add_(0, dst, x[kind[0]][src] @ weight[i])
    torch.testing.assert_close(got, torch.cat([want["a"], want["b"]]))


@hector.compile
def wrong_field(g: Any, feat: Any) -> Any:
    g.ndata["h"] = feat
    g.update_all(fn.copy_u("h", "m"), fn.sum("n", "out"))
    return g.ndata["out"]


@hector.compile
def median(g: Any, feat: Any) -> Any:
    g.ndata["h"] = feat
    g.update_all(fn.copy_u("h", "m"), fn.median("m", "out"))
    return g.ndata["out"]


@hector.compile
def with_indices(g: Any, feat: Any) -> Any:
    g.ndata["h"] = feat
    reduce = lambda n: {"out": n.mailbox["m"].max(1)[0]}  # noqa: E731
    g.update_all(fn.copy_u("h", "m"), reduce)
    return g.ndata["out"]


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (wrong_field, "no message 'n'"),
        (median, "reducer median is not compiled"),
        (with_indices, "write amax"),
    ],
)
def test_what_is_not_read_is_an_error_with_its_line(layer: Any, why: str) -> None:
    g, _ = drawn()
    with pytest.raises(UnsupportedPythonError, match=why):
        layer(g, torch.randn(NODES, 4))


def test_types_are_given_once() -> None:
    g, etypes = drawn()
    whole = hector.HeteroGraph.from_pyg(torch.stack(g.edges()), etypes, num_nodes=NODES)
    layer = RGCN(4, 6, None, None)
    x = torch.randn(NODES, 4)
    with pytest.raises(ValueError, match="expected no etypes"):
        layer(whole, x, etypes)


class Leaky(nn.Module):
    """An activation of a module, and one of a function."""

    def __init__(self, slope: Any) -> None:
        super().__init__()
        self.act = nn.LeakyReLU(slope)

    def message(self, edges: Any) -> Any:
        return {"m": self.act(edges.src["h"])}

    def written(self, g: Any, feat: Any) -> Any:
        with g.local_scope():
            g.srcdata["h"] = feat
            g.update_all(self.message, fn.sum("m", "o"))
            return g.dstdata["o"]

    forward = hector.compile(written)


def test_a_tensor_as_slope_is_refused() -> None:
    (g, _), x = drawn(), torch.randn(NODES, 4)
    same(Leaky(0.2), (g, x.requires_grad_()), [x])
    with pytest.raises(UnsupportedPythonError, match="a number as slope, got Tensor"):
        Leaky(torch.tensor(0.2))(g, x)
