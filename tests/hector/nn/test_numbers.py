"""Half precision on a CPU, integers and booleans, hubs: what a layer computes in."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import hector.nn
from hector import HeteroGraph, compile, relation_softmax, relation_total
from hector.frontend import UnsupportedPythonError
from hector.message import GATConv, GINConv, Graph, GraphConv, SAGEConv, TreeLSTM
from hector.message import functions as fn
from hector.nn import HGTConv, RGATConv, RGCNConv

pg = pytest.importorskip("torch_geometric.nn")

HALF = [torch.bfloat16, torch.float16]
RELATIONS = [("a", "r", "a"), ("a", "s", "a")]
AGGREGATIONS = ["mean", "sum", "max", "min", "std", "softmax"]
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("RGCNConv", {"aggr": aggr}) for aggr in AGGREGATIONS),
    ("RGCNConv", {"num_bases": 2}),
    ("RGCNConv", {"num_blocks": 2}),
    ("RGATConv", {"heads": 2, "concat": False}),
    ("RGATConv", {"attention_mechanism": "within-relation"}),
    ("HGTConv", {"heads": 2}),
]


def hub(edges: int) -> tuple[Tensor, Tensor]:
    """Most edges end in node 0, some nodes get none."""
    made = torch.Generator().manual_seed(0)
    dst = torch.randint(40, (edges,), generator=made)
    dst = torch.where(torch.rand(edges, generator=made) < 0.8, 0, dst)
    src = torch.randint(60, (edges,), generator=made)
    return torch.stack((src, dst)), torch.randint(2, (edges,), generator=made)


def layer(owner: Any, name: str, options: dict[str, Any]) -> Any:
    if name == "HGTConv":
        return owner.HGTConv(4, 4, (["a"], RELATIONS), **options)
    return getattr(owner, name)(4, 4, 2, **options)


def step(conv: Any, x: Tensor, ends: Tensor, kinds: Tensor) -> list[Tensor]:
    """The output, and the gradients of rows and parameters by name."""
    x = x.clone().requires_grad_()
    if hasattr(conv, "k_rel"):
        dicts = {r: ends[:, kinds == i] for i, r in enumerate(RELATIONS)}
        out = conv({"a": x}, dicts)["a"]
    else:
        out = conv(x, ends, kinds)
    slope = (torch.arange(out.numel()) % 7 - 3).to(out.dtype).view_as(out) / 2
    named = sorted(conv.named_parameters())
    read = [x, *(p for _, p in named)]
    grads = torch.autograd.grad((out * slope).sum(), read, allow_unused=True)
    # PyG's RGCN adds to zeros of float32.
    found = [out.detach().to(x.dtype), *grads]
    return [torch.zeros(()) if t is None else t for t in found]


def error(found: Tensor, exact: Tensor) -> float:
    scale = max(float(exact.abs().max()), 1e-9)
    return float((found.double() - exact).abs().max()) / scale


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_half_precision_is_at_least_as_exact_as_pyg(
    dtype: torch.dtype, name: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    mine = layer(hector.nn, name, options).to(dtype)
    other = layer(pg, name, options).to(dtype)
    other.load_state_dict(mine.state_dict())
    true = layer(pg, name, options).double()
    true.load_state_dict({k: v.double() for k, v in mine.state_dict().items()})
    x, (ends, kinds) = torch.rand(60, 4).to(dtype), hub(3000)
    exact = step(true, x.double(), ends, kinds)
    ours, theirs = (step(c, x, ends, kinds) for c in (mine, other))
    rounding = torch.finfo(dtype).eps
    for a, b, c in zip(ours, theirs, exact, strict=True):
        # Equal in all digits, or a tie that float32 has turned.
        assert error(a, c) <= max(error(b, c), 0.5 * rounding)
    assert error(ours[0], exact[0]) <= error(theirs[0], exact[0])


LAYERS: dict[str, Callable[[], Any]] = {
    "GraphConv": lambda: GraphConv(4, 4),
    "GINConv": lambda: GINConv(torch.nn.Identity()),
    "GATConv": lambda: GATConv(4, 2, 2),
    **{f"SAGEConv {r}": lambda r=r: SAGEConv(4, 4, r) for r in AGGREGATIONS},  # type: ignore[misc]
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_messages_round_once(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conv, x = LAYERS[name]().to(dtype), torch.rand(60, 4).to(dtype)
    graph = Graph(*hub(3000)[0], num_nodes=60)
    exact = copy.deepcopy(conv).double()
    rows, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    out, wanted = conv(graph, rows), exact(graph, wide)
    out.sum().backward()
    wanted.sum().backward()
    for a, b in ((out, wanted), (rows.grad, wide.grad)):
        assert a.dtype is dtype
        assert error(a.detach(), b.detach()) <= 0.6 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", HALF)
def test_messages_and_softmax_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    graph, exact = (Graph(*hub(3000)[0], num_nodes=60) for _ in range(2))
    h = torch.rand(60, 4).to(dtype)
    graph.ndata["h"], exact.ndata["h"] = h.requires_grad_(), h.detach().double()
    exact.ndata["h"].requires_grad_()
    w = (torch.rand(3000, 1) + 0.5).to(dtype)
    graph.edata["w"], exact.edata["w"] = w, w.double()
    eps = torch.finfo(dtype).eps
    for how in (*AGGREGATIONS, "median"):
        found = []
        for g in (graph, exact):
            g.update_all(fn.u_mul_e("h", "w", "m"), getattr(fn, how)("m", "o"))
            out = g.ndata["o"]
            found.append([out, *torch.autograd.grad(out.sum(), g.ndata["h"])])
        for a, b in zip(*found, strict=True):
            assert error(a.detach(), b.detach()) <= 0.6 * eps, how
    att = graph.edge_softmax(torch.randn(3000, 1).to(dtype)).double()
    sums = torch.zeros(60, 1).double().index_add(0, graph.edges()[1], att)
    assert bool(((sums - 1).abs()[graph.in_degrees() > 0] < eps).all())


def test_nodes_without_edges_are_finite_in_float16() -> None:
    x, (ends, kinds) = torch.randn(60, 4).half(), hub(9)
    assert step(RGATConv(4, 4, 2).half(), x, ends, kinds)[0].isfinite().all()
    assert (
        step(layer(__import__("hector").nn, "HGTConv", {}).half(), x, ends, kinds)[0]
        .isfinite()
        .all()
    )
    tree, chain = TreeLSTM(4, 4).half(), Graph([0, 1], [2, 2], num_nodes=60)
    assert all(t.isfinite().all() and t.dtype is x.dtype for t in tree(chain, x))


@pytest.mark.parametrize("aggr", ["max", "min"])
@pytest.mark.parametrize("blocks", [None, 2])
def test_an_extreme_at_a_hub_is_one_addend(aggr: str, blocks: int | None) -> None:
    """It was summed over every edge: 1.6e-2 off at a million of them."""
    torch.manual_seed(0)
    conv = RGCNConv(4, 4, 2, aggr=aggr, num_blocks=blocks)
    x, (ends, kinds) = torch.rand(60, 4), hub(20_000)
    plan = conv.set_optimization("none")(x, ends, kinds)
    exact = copy.deepcopy(conv).double()(x.double(), ends, kinds)
    assert error(plan.detach(), exact.detach()) < 3e-7
    both = copy.deepcopy(conv).set_optimization("both")(x, ends, kinds)
    assert error(both.detach(), exact.detach()) < 3e-7


def test_a_mean_of_many_equal_rows() -> None:
    conv = RGCNConv(1, 1, 1, root_weight=False, bias=False)
    torch.nn.init.ones_(conv.weight)
    ends = torch.zeros(2, 300_000, dtype=torch.int64)
    with torch.no_grad():
        found = conv(torch.full((1, 1), 0.7), ends, ends[0])
    assert abs(float(found) - 0.7) < 1e-6


@compile()
def totals(g: Any, feature: Any, how: str) -> Any:
    for e in g.edges():
        e["a"] = e.dst.feature * 2.0
        if how == "differs":
            e["a"] = e.src.feature
        if how == "softmax":
            e["a"] = relation_softmax(e.src.feature)
    for n in g.dst_nodes():
        n["out"] = relation_total(g.edata["a"])
    return g.ndata["out"]


def test_totals_are_of_what_is_the_same_in_a_relation() -> None:
    ends, kinds = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]), torch.tensor([0, 0, 1, 1])
    graph = HeteroGraph.from_pyg(ends, kinds, num_nodes=3, num_relations=2)
    x = torch.tensor([[1.0], [2.0], [4.0]])
    # Node 1 is reached by both relations, node 0 by one.
    assert totals(graph, x, "same").tolist() == [[2.0], [8.0], [0.0]]
    for how in ("differs", "softmax"):
        with pytest.raises(UnsupportedPythonError, match="the same on all edges of a"):
            totals(graph, x, how)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_counts_and_booleans_are_numbers(kind: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, (ends, kinds) = torch.randint(2, (60, 4)).to(kind), hub(50)
    for name, options in CASES:
        conv = layer(hector.nn, name, options).to(dtype)
        found, wanted = (
            conv({"a": rows}, {RELATIONS[0]: ends})["a"]
            if name == "HGTConv"
            else conv(rows, ends, kinds)
            for rows in (x, x.to(dtype))
        )
        assert torch.equal(found, wanted) and found.dtype is dtype
    graph = Graph(*ends, num_nodes=60)
    for make in LAYERS.values():
        conv = make().to(dtype)
        assert torch.equal(conv(graph, x), conv(graph, x.to(dtype)))
    whole = HeteroGraph.from_pyg(ends, kinds, num_nodes=60, num_relations=2)
    assert torch.equal(totals(whole, x, "same"), totals(whole, x.float(), "same"))


def test_complex_rows_are_refused() -> None:
    x, (ends, kinds) = torch.zeros(60, 4, dtype=torch.complex64), hub(5)
    with pytest.raises(ValueError, match="expected real numbers for x, got"):
        RGATConv(4, 4, 2)(x, ends, kinds)
    whole = HeteroGraph.from_pyg(ends, kinds, num_nodes=60, num_relations=2)
    with pytest.raises(ValueError, match="expected real numbers for feature, got"):
        totals(whole, x, "same")


@pytest.mark.parametrize("widths", [{"a": 4, "b": 2}, {"a": 4, "b": 8}])
def test_the_skip_of_joined_rows_is_that_of_dicts(widths: dict[str, int]) -> None:
    torch.manual_seed(0)
    types = (["a", "b"], [("a", "r", "a"), ("a", "s", "b")])
    conv = HGTConv(widths, 4, types, 2).double()
    x = {n: torch.randn(3, w, dtype=torch.float64) for n, w in widths.items()}
    edges = {t: torch.randint(3, (2, 5)) for t in types[1]}
    graph = HeteroGraph.from_dicts({"a": 3, "b": 3}, edges, types)
    wide = max(widths.values())
    padded = [functional.pad(t, (0, wide - t.shape[1])) for t in x.values()]
    joined = torch.cat(padded)
    other = pg.HGTConv(widths, 4, types, 2).double()
    other.load_state_dict(conv.state_dict())
    wanted = torch.cat([*other(x, edges).values()])
    assert torch.allclose(conv(joined, graph), wanted, rtol=1e-10)
    assert torch.allclose(torch.cat([*conv(x, edges).values()]), wanted, rtol=1e-10)
