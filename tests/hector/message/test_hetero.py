"""Typed graphs after DGL's documented semantics, against loops in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hector.message import EID, NID, Graph, HeteroGraph, edge_softmax
from hector.message import functions as fn

SIZES = {"item": 5, "user": 7}
FOLLOWS, BUYS, SOLD = (
    ("user", "follows", "user"),
    ("user", "buys", "item"),
    ("item", "sold", "user"),
)


@pytest.fixture
def graph() -> HeteroGraph:
    torch.manual_seed(0)
    edges = {
        k: (torch.randint(SIZES[k[0]], (n,)), torch.randint(SIZES[k[2]], (n,)))
        for k, n in ((FOLLOWS, 12), (BUYS, 9), (SOLD, 6))
    }
    made = HeteroGraph(edges, {"user": 8, "item": 5})
    for n in made.ntypes:
        rows = torch.randn(made.num_nodes(n), 4, dtype=torch.float64)
        made.nodes[n].data["h"] = rows.requires_grad_()
    for k in made.canonical_etypes:
        made.edges[k].data["w"] = torch.rand(made.num_edges(k), 1, dtype=torch.float64)
    return made


HOW: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda m: m.sum(0),
    "mean": lambda m: m.mean(0),
    "max": lambda m: m.amax(0),
    "min": lambda m: m.amin(0),
    "mul": lambda m: m.prod(0),
}


def loop(graph: HeteroGraph, kind: Any, how: str, message: Any) -> list[Tensor | None]:
    """Of each destination; None without messages."""
    src, dst = graph[kind].edges()
    u, v = graph.nodes[kind[0]].data["h"], graph.nodes[kind[2]].data["h"]
    w = graph.edges[kind].data["w"]
    out: list[Tensor | None] = []
    for node in range(graph.num_nodes(kind[2])):
        mine = [i for i in range(len(src)) if int(dst[i]) == node]
        rows = [message(u[src[i]], v[dst[i]], w[i]) for i in mine]
        out.append(HOW[how](torch.stack(rows)) if rows else None)
    return out


def filled(rows: list[Tensor | None]) -> Tensor:
    return torch.stack([torch.zeros(4).double() if r is None else r for r in rows])


def test_types_and_their_names(graph: HeteroGraph) -> None:
    assert graph.ntypes == ["item", "user"]
    assert graph.canonical_etypes == [SOLD, BUYS, FOLLOWS]
    assert graph.to_canonical_etype("buys") == BUYS
    assert graph.num_nodes("user") == 8 and graph.num_nodes() == 13
    assert graph.num_edges("follows") == 12 and graph.num_edges() == 27
    assert graph.nodes("item").tolist() == [0, 1, 2, 3, 4]
    assert set(graph.ndata["h"]) == {"item", "user"} and "h" in graph.srcdata
    assert set(graph.edata["w"]) == {SOLD, BUYS, FOLLOWS}
    with pytest.raises(ValueError, match="an edge type 'likes'"):
        graph["likes"]
    with pytest.raises(ValueError, match="found 3"):
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
    with pytest.raises(ValueError, match="expected a node type"):
        graph.nodes["shop"]
    with pytest.raises(ValueError, match="it lacks"):
        HeteroGraph({BUYS: ([0], [0])}, {"user": 3})
    with pytest.raises(ValueError, match="set num_nodes to at least 4"):
        HeteroGraph({BUYS: ([3], [0])}, {"user": 3, "item": 1})
    with pytest.raises(ValueError, match="expected edge types"):
        HeteroGraph({"buys": ([0], [0])})  # type: ignore[dict-item]


@pytest.mark.parametrize("how", sorted(HOW))
@pytest.mark.parametrize("kind", [FOLLOWS, BUYS, SOLD])
def test_update_all_of_one_type(graph: HeteroGraph, kind: Any, how: str) -> None:
    graph.update_all(fn.u_mul_e("h", "w", "m"), getattr(fn, how)("m", "o"), etype=kind)
    wanted = filled(loop(graph, kind, how, lambda u, v, e: u * e))
    found = graph.nodes[kind[2]].data["o"]
    torch.testing.assert_close(found, wanted)
    rows = graph.nodes[kind[0]].data["h"]
    (mine,) = torch.autograd.grad(found.square().sum(), rows)
    (theirs,) = torch.autograd.grad(wanted.square().sum(), rows)
    torch.testing.assert_close(mine, theirs)


def test_both_ends_under_one_name(graph: HeteroGraph) -> None:
    """`h` of sources and of destinations are two features."""

    def message(edges: Any) -> dict[str, Any]:
        assert "h" in edges.src and "x" not in edges.dst and "w" in edges.data
        return {"m": edges.src["h"] * torch.sigmoid(edges.dst["h"]) + edges.data["w"]}

    for kind in (BUYS, SOLD, FOLLOWS):
        graph.update_all(message, fn.sum("m", "o"), etype=kind)
        wanted = loop(graph, kind, "sum", lambda u, v, e: u * v.sigmoid() + e)
        torch.testing.assert_close(graph.nodes[kind[2]].data["o"], filled(wanted))
        assert set(graph[kind].counts) == {"compiled"}


def test_functions_with_messages_in_memory(graph: HeteroGraph) -> None:
    def message(edges: Any) -> dict[str, Any]:
        u, v, _ = edges.edges()
        return {"m": edges.src["h"].clamp(min=0) + v[:, None] - u[:, None]}

    def reduce(nodes: Any) -> dict[str, Any]:
        assert "m" in nodes.mailbox and "h" in nodes.data
        return {"o": nodes.mailbox["m"].cumsum(1)[:, -1] + nodes.nodes()[:, None]}

    graph.update_all(message, reduce, etype=BUYS)
    src, dst = graph["buys"].edges()
    wanted = torch.zeros(5, 4, dtype=torch.float64)
    rows = graph.nodes["user"].data["h"]
    for u, v in zip(src.tolist(), dst.tolist(), strict=True):
        wanted[v] += rows[u].detach().clamp(min=0) + v - u
    there = graph["buys"].in_degrees() > 0
    wanted = wanted + torch.where(there, torch.arange(5), 0)[:, None]
    torch.testing.assert_close(graph.nodes["item"].data["o"].detach(), wanted)


@pytest.mark.parametrize("cross", ["sum", "mean", "max", "min", "stack"])
@pytest.mark.parametrize("how", ["sum", "max", "min"])
def test_multi_update_all(graph: HeteroGraph, how: str, cross: str) -> None:
    reduce = getattr(fn, how)("m", "o")
    call = (fn.u_mul_e("h", "w", "m"), reduce)
    graph.multi_update_all(
        {"sold": call, "follows": call, "buys": call},
        cross,
        lambda nodes: {"o": 2 * nodes.data["o"]},
    )
    parts = [loop(graph, k, how, lambda u, v, e: u * e) for k in (SOLD, FOLLOWS)]
    if how == cross:  # nodes without messages do not count
        wanted = []
        for pair in zip(*parts, strict=True):
            rows = [r for r in pair if r is not None]
            wanted.append(HOW[cross](torch.stack(rows)) if rows else None)
        found = filled(wanted)
    else:
        both = torch.stack([filled(p) for p in parts])
        found = both.transpose(0, 1) if cross == "stack" else HOW[cross](both)
    torch.testing.assert_close(graph.nodes["user"].data["o"], 2 * found)
    items = filled(loop(graph, BUYS, how, lambda u, v, e: u * e))
    one = items[:, None] if cross == "stack" else items
    torch.testing.assert_close(graph.nodes["item"].data["o"], 2 * one)


def test_a_cross_reducer_of_ones_own(graph: HeteroGraph) -> None:
    call = (fn.copy_u("h", "m"), fn.sum("m", "o"))
    graph.multi_update_all({SOLD: call, FOLLOWS: call}, lambda rows: rows[0] - rows[1])
    a, b = (filled(loop(graph, k, "sum", lambda u, v, e: u)) for k in (SOLD, FOLLOWS))
    torch.testing.assert_close(graph.nodes["user"].data["o"], a - b)
    with pytest.raises(ValueError, match="cross_reducer"):
        graph.multi_update_all({SOLD: call}, "median")


def test_apply_edges_and_some_edges(graph: HeteroGraph) -> None:
    graph.apply_edges(fn.u_dot_v("h", "h", "s"), etype="buys")
    src, dst = graph["buys"].edges()
    u, v = graph.nodes["user"].data["h"], graph.nodes["item"].data["h"]
    wanted = (u[src] * v[dst]).sum(1, keepdim=True)
    torch.testing.assert_close(graph.edges["buys"].data["s"], wanted)
    graph.apply_edges(lambda e: {"s": e.data["s"] * 0}, 3, etype="buys")
    assert not graph.edges["buys"].data["s"][3].any()
    copy = (fn.copy_u("h", "m"), fn.sum("m", "o"))
    graph.nodes["item"].data["o"] = torch.full((5, 4), 9.0, dtype=torch.float64)
    node = int(dst[0])
    graph.pull(node, *copy, etype="buys")
    near = u[src[dst == node]].sum(0)
    torch.testing.assert_close(graph.nodes["item"].data["o"][node], near)
    others = torch.arange(5) != node
    assert bool((graph.nodes["item"].data["o"][others] == 9).all())
    graph.push(int(src[1]), *copy, etype="buys")
    graph.send_and_recv(torch.arange(9) == 2, *copy, etype="buys")
    torch.testing.assert_close(graph.nodes["item"].data["o"][dst[2]], u[src[2]])
    graph.apply_nodes(lambda n: {"o": -n.data["h"]}, [0, 2], ntype="item")
    torch.testing.assert_close(graph.nodes["item"].data["o"][2], -v[2])


def test_scopes(graph: HeteroGraph) -> None:
    with graph.local_scope():
        graph.nodes["user"].data["x"] = torch.ones(8)
        graph["buys"].edata["w"] = torch.zeros(9, 1)
        graph["buys"].srcdata["y"] = torch.ones(8)
        assert "y" in graph.nodes["user"].data and "x" in graph["follows"].dstdata
    assert set(graph.nodes["user"].data) == {"h"} and graph.edata["w"][BUYS].any()
    other = graph.local_var()
    other.nodes["user"].data["x"] = torch.ones(8)
    del other.nodes["item"].data["h"]
    assert set(graph.nodes["user"].data) == {"h"} == set(graph.nodes["item"].data)
    graph.ndata["z"] = {"user": torch.ones(8), "item": torch.ones(5)}
    assert graph.ndata.pop("z").keys() == {"user", "item"}


def test_edges_and_degrees(graph: HeteroGraph) -> None:
    src, dst = graph.edges(etype="buys")
    u, v, ids = graph.in_edges([0, 1], form="all", etype="buys")
    assert ids.tolist() == [i for i in range(9) if int(dst[i]) in (0, 1)]
    assert torch.equal(u, src[ids]) and torch.equal(v, dst[ids])
    out = graph.out_edges(int(src[0]), form="eid", etype="buys")
    assert out.tolist() == (src == src[0]).nonzero().flatten().tolist()
    assert graph.in_degrees(etype="buys").sum() == 9
    assert graph.in_degrees(2, etype="buys") == int((dst == 2).sum())
    assert graph.has_edges_between(src, dst, etype="buys").all()
    found = graph.edge_ids(src, dst, etype="buys")
    pairs = [(int(src[i]), int(dst[i])) for i in range(9)]
    assert found.tolist() == [pairs.index(p) for p in pairs]


def test_graphs_of_graphs(graph: HeteroGraph) -> None:
    part = graph.subgraph({"user": [1, 3, 4], "item": torch.arange(5) < 4})
    assert part.num_nodes("user") == 3 and part.num_nodes("item") == 4
    users, items = part.nodes["user"].data[NID], part.nodes["item"].data[NID]
    for kind in graph.canonical_etypes:
        u, v = part[kind].edges()
        ids = part[kind].edata[EID]
        ends = {"user": users, "item": items}
        src, dst = graph.find_edges(ids, etype=kind)
        assert torch.equal(ends[kind[0]][u], src) and torch.equal(ends[kind[2]][v], dst)
        assert torch.equal(part[kind].edata["w"], graph[kind].edata["w"][ids])
        inside = torch.isin(graph[kind].edges()[0], ends[kind[0]])
        inside &= torch.isin(graph[kind].edges()[1], ends[kind[2]])
        assert ids.tolist() == inside.nonzero().flatten().tolist()
    assert torch.equal(
        part.nodes["user"].data["h"], graph.nodes["user"].data["h"][users]
    )
    back = graph.reverse(copy_edata=True)
    assert back.canonical_etypes[0] == ("user", "sold", "item")
    assert torch.equal(back["buys"].edges()[0], graph["buys"].edges()[1])
    assert torch.equal(back["buys"].edata["w"], graph["buys"].edata["w"])
    some = graph.edge_subgraph({"buys": [2, 5]}, relabel_nodes=False)
    assert some.edges["buys"].data[EID].tolist() == [2, 5] and not some.num_edges(
        "sold"
    )
    assert some.num_nodes("user") == 8
    assert graph.edge_type_subgraph(["follows"]).ntypes == ["user"]
    assert graph.node_type_subgraph(["user"]).canonical_etypes == [FOLLOWS]
    looped = graph.add_self_loop(etype="follows")
    assert looped.num_edges("follows") == 20 and graph.num_edges("follows") == 12
    assert bool((looped["follows"].edata["w"][12:] == 1).all())


def test_changes_by_rebuilding(graph: HeteroGraph) -> None:
    rows = graph.nodes["user"].data["h"].detach().clone()
    graph.add_nodes(2, ntype="user")
    assert graph.num_nodes("user") == 10
    assert torch.equal(graph.nodes["user"].data["h"][:8], rows)
    assert not graph.nodes["user"].data["h"][8:].any()
    graph.add_edges([9, 10], 4, etype="buys")
    assert graph.num_nodes("user") == 11 and graph.num_edges("buys") == 11
    assert graph.edges(etype="buys")[1][-2:].tolist() == [4, 4]
    graph.remove_edges([0, 1], etype="buys")
    assert graph.num_edges("buys") == 9
    src, dst = graph.edges(etype="follows")
    graph.remove_nodes([0], "user")
    assert graph.num_nodes("user") == 10 and NID not in graph.nodes["user"].data
    kept = (src != 0) & (dst != 0)
    assert torch.equal(graph.edges(etype="follows")[0], src[kept] - 1)
    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"), etype="buys")


def test_from_pyg_and_to_a_device(graph: HeteroGraph) -> None:
    pyg = pytest.importorskip("torch_geometric.data")
    data = pyg.HeteroData()
    for n in graph.ntypes:
        data[n].x = torch.randn(graph.num_nodes(n), 3)
        data[n].num_nodes = graph.num_nodes(n)
    for k in graph.canonical_etypes:
        data[k].edge_index = torch.stack(graph[k].edges())
        data[k].edge_attr = torch.randn(graph.num_edges(k), 2)
    made = HeteroGraph.from_hetero_data(data).to("cpu")
    assert made.canonical_etypes == graph.canonical_etypes
    assert torch.equal(made.nodes["user"].data["x"], data["user"].x)
    assert torch.equal(made.edges["buys"].data["edge_attr"], data[BUYS].edge_attr)
    assert made.num_nodes("user") == 8


@pytest.mark.parametrize("norm_by", ["dst", "src"])
@pytest.mark.parametrize("some", [False, True])
def test_edge_softmax(graph: HeteroGraph, norm_by: str, some: bool) -> None:
    relation = graph["buys"]
    ids = torch.tensor([0, 3, 4, 7]) if some else torch.arange(9)
    score = torch.randn(len(ids), 2, dtype=torch.float64)
    found = edge_softmax(relation, score, ids if some else None, norm_by)
    end = relation.edges()[norm_by == "dst"][ids]
    wanted = torch.empty_like(score)
    for node in end.unique():
        wanted[end == node] = score[end == node].softmax(0)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match="norm_by"):
        relation.edge_softmax(score, norm_by="both")


def test_scores_by_type_that_fit_no_graph_are_refused(graph: HeteroGraph) -> None:
    into = {k: torch.randn(graph.num_edges(k), 2) for k in (FOLLOWS, SOLD)}
    assert list(edge_softmax(graph, into)) == [FOLLOWS, SOLD]
    assert edge_softmax(graph, {}) == {}
    with pytest.raises(ValueError, match=r"one score tensor .*'follows'.* twice"):
        edge_softmax(graph, {**into, "follows": into[FOLLOWS]})
    with pytest.raises(ValueError, match=r"a tensor of scores of a Relation.*dict"):
        edge_softmax(graph["follows"], {"follows": into[FOLLOWS]})
    for other in (into[SOLD].double(), into[SOLD][:, :1], into[SOLD][:, 0]):
        with pytest.raises(ValueError, match=r"one dtype and row shape into 'user'"):
            edge_softmax(graph, {**into, SOLD: other})
    with pytest.raises(ValueError, match=r"row shape out of 'user'"):
        scores = {
            k: torch.randn(graph.num_edges(k), len(k[1])) for k in (BUYS, FOLLOWS)
        }
        edge_softmax(graph, scores, norm_by="src")
    with pytest.raises(ValueError, match="floating-point"):
        edge_softmax(graph, {k: v.long() for k, v in into.items()})
    # Types whose edges end in different ones meet in no sum.
    mixed = {SOLD: into[SOLD], BUYS: torch.randn(graph.num_edges(BUYS)).double()}
    for kind, found in edge_softmax(graph, mixed).items():
        torch.testing.assert_close(found, graph[kind].edge_softmax(mixed[kind]))


def test_homogeneous_graphs_have_the_same_words() -> None:
    src, dst = torch.randint(6, (2, 11))
    g = Graph(src, dst, num_nodes=6)
    g.ndata["h"] = torch.randn(6, 3)
    g.edata["w"] = torch.randn(11, 1)
    assert g.srcdata is g.dstdata is g.ndata
    assert g.in_edges(2, form="eid").tolist() == (dst == 2).nonzero().flatten().tolist()
    back = g.reverse()
    assert torch.equal(back.edges()[0], dst) and "h" in back.ndata and not back.edata
    part = g.subgraph(torch.tensor([True, False, True, True, False, True]))
    assert part.ndata[NID].tolist() == [0, 2, 3, 5]
    assert torch.equal(part.edata["w"], g.edata["w"][part.edata[EID]])
    assert g.add_self_loop().num_edges() == 17
    assert bool((g.add_self_loop().remove_self_loop().edges()[0] != 6).all())
    copy = g.local_var()
    copy.ndata["x"] = torch.ones(6)
    assert "x" not in g.ndata and copy.num_edges() == 11
    g.add_edges([0, 7], [1, 1])
    assert g.num_nodes() == 8 and g.num_edges() == 13
    g.remove_edges(torch.arange(13) >= 11)
    g.remove_nodes([6, 7])
    assert g.num_nodes() == 6 and torch.equal(g.edges()[0], src)
    g.update_all(fn.copy_u("h", "m"), fn.max("m", "o"))
    g.add_nodes(1)
    assert g.ndata["o"].shape == (7, 3)
    picked = g.edge_subgraph([1, 4])
    nodes = picked.ndata[NID]
    assert torch.equal(nodes[picked.edges()[0]], src[[1, 4]])
