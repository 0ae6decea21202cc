"""Scripts as DGL's users write them today, each against a loop in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hector.message.dgl as dgl
import hector.message.dgl.function as fn
import hector.message.dgl.nn.pytorch as dglnn
from tests.hector.message.dgl_graphs import KINDS, SIZES, market, near, same, some_graph

pytestmark = pytest.mark.usefixtures("double")


def test_nodes_are_classified_by_edge_features_in_mini_batches() -> None:
    g = some_graph(30, 120)
    g.ndata["feat"], g.edata["w"] = torch.randn(30, 4), torch.rand(120, 1)
    lin = nn.ModuleList([nn.Linear(8, 6), nn.Linear(12, 3)])

    def forward(blocks: Any, x: Tensor) -> Tensor:
        for layer, block in zip(lin, blocks, strict=True):
            with block.local_scope():
                block.srcdata["h"] = x
                block.dstdata["h"] = x[: block.num_dst_nodes()]
                block.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "n"))
                both = torch.cat([block.dstdata["h"], block.dstdata["n"]], 1)
            x = F.relu(layer(both))
        return x

    sampler = dgl.dataloading.NeighborSampler(
        [-1, -1], prefetch_node_feats=["feat"], prefetch_edge_feats=["w"]
    )
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(30), sampler, device="cpu", batch_size=8, num_workers=4
    )
    src, dst = g.edges()
    x = g.ndata["feat"]
    for layer in lin:
        n = near(src, dst, 30, x[src] * g.edata["w"], "mean")
        x = F.relu(layer(torch.cat([x, n], 1)))
    weights = [layer.weight for layer in lin]
    for _, seeds, blocks in loader:
        same(forward(blocks, blocks[0].srcdata["feat"]), x[seeds], *weights)


def test_links_are_predicted_against_negative_edges() -> None:
    g = dgl.add_reverse_edges(some_graph(20, 50), exclude_self=False)
    ids = torch.arange(100).roll(50)
    g.ndata["x"] = torch.randn(20, 5)
    conv = dglnn.SAGEConv(5, 4, "mean")
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        dgl.dataloading.NeighborSampler([-1]),
        exclude="reverse_id",
        reverse_eids=ids,
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(3),
    )
    seen = []
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(50), sampler, batch_size=10, shuffle=True
    )
    src, dst = g.edges()
    for _, pos, neg, (block,) in loader:
        batch = pos.edata[dgl.EID]
        seen += batch.tolist()
        nodes = pos.ndata[dgl.NID]
        u, v = pos.edges()
        assert torch.equal(nodes[u], src[batch]) and torch.equal(nodes[v], dst[batch])
        assert neg.num_edges() == 30 and neg.num_nodes() == pos.num_nodes()
        assert sorted(nodes[neg.edges()[0]].tolist()) == sorted(src[batch].tolist() * 3)
        gone = torch.cat([batch, ids[batch]])
        assert not torch.isin(block.edata[dgl.EID], gone).any()
        h = conv(block, block.srcdata["x"])
        for pairs in (pos, neg):
            with pairs.local_scope():
                pairs.ndata["h"] = h
                pairs.apply_edges(fn.u_dot_v("h", "h", "s"))
                score = pairs.edata["s"][:, 0]
            left = ~torch.isin(torch.arange(100), gone)
            x = g.ndata["x"]
            n = near(src[left], dst[left], 20, x[src[left]], "mean")
            whole = conv.fc_self(x) + conv.fc_neigh(n)
            u, v = (nodes[e] for e in pairs.edges())
            same(score, (whole[u] * whole[v]).sum(1), conv.fc_neigh.weight)
    assert sorted(seen) == list(range(50))


def test_typed_links_leave_their_reverse_types_out() -> None:
    g = market()
    reverse = {"plays": "back"}
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        dgl.dataloading.MultiLayerFullNeighborSampler(2),
        exclude="reverse_types",
        reverse_etypes=reverse,
        negative_sampler=dgl.dataloading.negative_sampler.GlobalUniform(1),
    )
    loader = dgl.dataloading.DataLoader(g, {"plays": [2, 7, 9]}, sampler, batch_size=3)
    ((inputs, pos, neg, blocks),) = loader
    assert pos.canonical_etypes == g.canonical_etypes and pos.num_edges() == 3
    assert pos.edges["plays"].data[dgl.EID].tolist() == [2, 7, 9]
    u, v = neg.edges(etype="plays")
    users, games = (neg.nodes[n].data[dgl.NID] for n in ("user", "game"))
    assert not g.has_edges_between(users[u], games[v], etype="plays").any()
    for block in blocks:
        for name in ("plays", "back"):
            ids = block.edges[name].data[dgl.EID]
            assert not torch.isin(ids, torch.tensor([2, 7, 9])).any()
    assert torch.equal(inputs["user"], blocks[0].srcnodes["user"].data[dgl.NID])


@pytest.mark.parametrize("cross", ["sum", "mean", "max", "min", "stack"])
def test_relations_are_joined_by_every_cross_reducer(cross: str) -> None:
    g = market()
    x = {n: torch.randn(c, 3, requires_grad=True) for n, c in SIZES.items()}
    g.ndata["h"] = x
    g.multi_update_all(
        {
            ("user", "plays", "game"): (fn.copy_u("h", "m"), fn.sum("m", "o")),
            "sells": (fn.copy_u("h", "m"), fn.mean("m", "o")),
            "likes": (
                lambda e: {"m": e.src["h"] * 2},
                lambda n: {"o": n.mailbox["m"].sum(1)},
            ),
        },
        cross,
    )
    # In the order of canonical types: game, shop, user.
    parts = []
    for k, how, scale in (
        (KINDS[3], "sum", 2),
        (KINDS[2], "mean", 1),
        (KINDS[1], "sum", 1),
    ):
        src, dst = g.edges(etype=k)
        parts.append(near(src, dst, 5, x[k[0]][src] * scale, how))
    made = torch.stack(parts, 1)
    wanted = {
        "sum": lambda: made.sum(1), "mean": lambda: made.mean(1),
        "max": lambda: made.amax(1), "min": lambda: made.amin(1), "stack": lambda: made,
    }[cross]()  # fmt: skip
    same(g.nodes["game"].data["o"], wanted, x["user"], x["game"])


def test_graphs_are_batched_read_out_and_taken_apart() -> None:
    graphs = [some_graph(n, e) for n, e in ((4, 6), (3, 0), (7, 12))]
    for g in graphs:
        g.ndata["h"] = torch.randn(g.num_nodes(), 2, requires_grad=True)
        g.ndata["w"] = torch.rand(g.num_nodes(), 1)
        g.edata["e"] = torch.randn(g.num_edges(), 2)
    bg = dgl.batch(graphs)
    assert bg.batch_size == 3 and bg.batch_num_nodes().tolist() == [4, 3, 7]
    assert bg.batch_num_edges().tolist() == [6, 0, 12]
    rows = [g.ndata["h"] for g in graphs]
    weighed = [g.ndata["h"] * g.ndata["w"] for g in graphs]
    for found, wanted in (
        (dgl.mean_nodes(bg, "h"), [r.mean(0) for r in rows]),
        (dgl.sum_nodes(bg, "h", "w"), [r.sum(0) for r in weighed]),
        (dgl.readout_nodes(bg, "h", "w", op="mean"), [r.mean(0) for r in weighed]),
        (dgl.max_nodes(bg, "h"), [r.amax(0) for r in rows]),
        (dglnn.AvgPooling()(bg, bg.ndata["h"]), [r.mean(0) for r in rows]),
        (dgl.softmax_nodes(bg, "h"), [r.softmax(0) for r in rows]),
    ):
        joined = torch.cat(wanted) if found.shape[0] == 14 else torch.stack(wanted)
        same(found, joined, *rows)
    gate = nn.Linear(2, 1)
    wanted = torch.stack([(gate(r).softmax(0) * r).sum(0) for r in rows])
    same(dglnn.GlobalAttentionPooling(gate)(bg, bg.ndata["h"]), wanted, gate.weight)
    assert dgl.sum_edges(bg, "e").tolist()[1] == [0, 0]
    row = torch.randn(3, 2)
    assert torch.equal(dgl.broadcast_edges(bg, row), row[[0] * 6 + [2] * 12])
    largest, ids = dgl.topk_nodes(bg, "h", 2, sortby=0)
    assert torch.equal(ids, torch.stack([r[:, 0].topk(2).indices for r in rows]))
    assert torch.equal(largest[2], rows[2][ids[2]])
    for g, part in zip(graphs, dgl.unbatch(bg), strict=True):
        assert torch.equal(part.ndata["h"], g.ndata["h"])
        assert all(map(torch.equal, part.edges(), g.edges()))


def test_typed_graphs_are_batched_by_a_loader() -> None:
    data = []
    for label in range(4):
        g = market(3 + label)
        g.ndata["h"] = {n: torch.randn(c, 2) for n, c in SIZES.items()}
        data.append((g, label))
    loader = dgl.dataloading.GraphDataLoader(data, batch_size=3, drop_last=False)
    sizes = []
    for bg, labels in loader:
        graphs = [data[i][0] for i in labels.tolist()]
        sizes.append(bg.batch_size)
        assert bg.batch_num_nodes("game").tolist() == [5] * len(graphs)
        bg.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"), etype="plays")
        found = dgl.readout_nodes(bg, "o", ntype="game")
        for row, g in zip(found, graphs, strict=True):
            src, _ = g.edges(etype="plays")
            torch.testing.assert_close(row, g.nodes["user"].data["h"][src].sum(0))
        assert dgl.unbatch(bg)[-1].num_edges("plays") == graphs[-1].num_edges("plays")
    assert sizes == [3, 1]


def test_functions_over_mailboxes_of_different_degrees() -> None:
    g = some_graph()
    x, w = torch.randn(9, 3, requires_grad=True), torch.randn(24, 1, requires_grad=True)
    g.ndata["x"], g.edata["w"] = x, w
    src, dst = g.edges()

    def message(edges: Any) -> Any:
        return {"a": edges.src["x"] * edges.data["w"], "b": edges.dst["x"]}

    def reduce(nodes: Any) -> Any:
        order = nodes.mailbox["a"].sort(1).values
        return {"o": order[:, 0] + nodes.data["x"] * nodes.mailbox["b"].shape[1]}

    g.update_all(message, reduce, lambda nodes: {"o": nodes.data["o"].tanh()})
    degree = g.in_degrees()[:, None]
    low = near(src, dst, 9, x[src] * w, "min")
    wanted = torch.where(degree > 0, low + x * degree, 0.0).tanh()
    same(g.ndata["o"], wanted, x, w)
    g.update_all(message, lambda n: {"s": n.mailbox["a"].std(1, correction=0)})
    assert not g.ndata["s"][-2:].any()
    g.apply_nodes(lambda n: {"x": n.data["x"] * 0}, v=[1])
    assert not g.nodes[1].data["x"].any() and g.nodes[0].data["x"].any()


def test_scopes_and_rows_of_some_nodes_and_edges() -> None:
    g = some_graph()
    g.ndata["h"] = torch.ones(9, 2)
    with g.local_scope():
        g.ndata["h"] = g.ndata["h"] + 1
        g.edata["t"] = torch.ones(24)
        assert g.ndata.pop("h").sum() == 36
    assert g.ndata["h"].sum() == 18 and "t" not in g.edata
    g.nodes[[0, 3]].data["h"] = torch.zeros(2, 2)
    assert g.ndata["h"].sum() == 14 and g.nodes["_N"].data["h"].sum() == 14
    u, v = g.find_edges(5)
    g.edges[5].data["w"] = torch.full((1, 1), 7.0)
    assert g.edata["w"].sum() == 7 and 7 in g.edges[u, v].data["w"]
    assert g.ntypes == ["_N"] and g.etypes == ["_E"] and g.is_homogeneous
    assert g["_E"].num_edges() == g.num_edges(("_N", "_E", "_N")) == 24
    assert isinstance(g, dgl.DGLGraph) and not g.is_block
    for etype in g.canonical_etypes:
        g.update_all(fn.copy_u("h", "m"), fn.prod("m", "p"), etype=etype)
        assert torch.equal(g.in_degrees(etype=etype), g["_E"].in_degrees())
    assert (
        torch.equal(g.ndata["p"][-2:], torch.zeros(2, 2)) and g.get_etype_id("_E") == 0
    )
    with pytest.raises(ValueError, match=r"torch\.sparse_coo"):
        g.adj()
    assert isinstance(g.in_degrees(0), int) and g.in_degrees([0]).shape == (1,)
    assert g.has_edges_between(int(u), int(v)) is True
    assert isinstance(g.edge_ids(int(u), int(v)), int)
    assert g.has_nodes(8) and not g.has_nodes([0, 9]).all()
    assert set(g.successors(int(u)).tolist()) >= set(v.tolist())
    twice = dgl.graph(([0, 0, 1], [1, 1, 2]))
    assert twice.edge_ids([0, 2], [1, 0], return_uv=True)[2].tolist() == [0, 1]


def test_softmax_over_a_part_of_the_edges() -> None:
    g = some_graph()
    ids = torch.tensor([20, 3, 7, 8, 11])
    score = torch.randn(5, 2, requires_grad=True)
    _, dst = g.find_edges(ids)
    wanted = torch.stack(
        [score[i].exp() / score[dst == dst[i]].exp().sum(0) for i in range(5)]
    )
    same(dgl.nn.functional.edge_softmax(g, score, eids=ids), wanted, score)


def test_loops_directions_and_parts_of_graphs() -> None:
    g = dgl.graph(([0, 1, 1, 2, 1], [1, 0, 1, 0, 0]), num_nodes=4)
    g.ndata["h"], g.edata["w"] = torch.arange(4.0), torch.arange(1.0, 6.0)[:, None]
    looped = dgl.add_self_loop(g)
    assert looped.edata["w"][5:].tolist() == [[1.0]] * 4
    assert g.add_self_loop(fill_data=3).edata["w"][5:].tolist() == [[3.0]] * 4
    means = dgl.add_self_loop(g, fill_data="mean").edata["w"][5:, 0]
    assert means.tolist() == [11 / 3, 2.0, 0.0, 0.0]
    none = dgl.add_self_loop(g, edge_feat_names=[]).edata["w"]
    assert not none[5:].any()
    assert dgl.remove_self_loop(looped).edata["w"][:, 0].tolist() == [1, 2, 4, 5]
    both = dgl.to_bidirected(g, copy_ndata=True)
    pairs = list(zip(*(e.tolist() for e in both.edges()), strict=True))
    assert pairs == [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0)] and "h" in both.ndata
    back = dgl.add_reverse_edges(g, copy_edata=True)
    assert back.edata["w"][5:, 0].tolist() == [1, 2, 4, 5]
    simple, mapping = dgl.to_simple(g, writeback_mapping=True)
    assert simple.edata["count"].tolist() == [1, 2, 1, 1]
    assert mapping.tolist() == [0, 1, 2, 3, 1]
    part = dgl.node_subgraph(g, torch.tensor([True, True, False, False]))
    assert part.edata[dgl.EID].tolist() == [0, 1, 2, 4]
    assert dgl.node_subgraph(g, [2, 0], relabel_nodes=False).num_nodes() == 4
    into = dgl.in_subgraph(g, [0])
    assert into.num_nodes() == 4 and into.edata["w"][:, 0].tolist() == [2, 4, 5]
    assert dgl.out_subgraph(g, [0, 2]).edata[dgl.EID].tolist() == [0, 3]
    hood, place = dgl.khop_in_subgraph(g, 0, 1)
    assert hood.ndata[dgl.NID].tolist() == [0, 1, 2] and place.tolist() == [0]
    lone = dgl.edge_subgraph(g, [3], store_ids=False)
    assert lone.num_nodes() == 2 and dgl.EID not in lone.edata
    assert dgl.reverse(g, copy_edata=True).edges()[0].tolist() == [1, 0, 1, 0, 0]
    grown = dgl.add_edges(g, [3, 3], [0, 1], {"w": torch.full((2, 1), 9.0)})
    assert grown.edata["w"][5:, 0].tolist() == [9, 9] and g.num_edges() == 5
    more = dgl.add_nodes(g, 2, {"h": torch.tensor([7.0, 8.0])})
    assert more.ndata["h"].tolist() == [0, 1, 2, 3, 7, 8] and g.num_nodes() == 4
    assert dgl.remove_nodes(g, [1]).num_edges() == 1
    assert dgl.remove_edges(g, [0]).edata["w"][:, 0].tolist() == [2, 3, 4, 5]


def test_parts_of_typed_graphs_keep_all_relations() -> None:
    g = market()
    g.edges["plays"].data["w"] = torch.arange(14.0)
    part = dgl.edge_subgraph(g, {"plays": [3, 5]})
    assert part.canonical_etypes == g.canonical_etypes
    assert part.num_edges("likes") == 0 and part.num_nodes("shop") == 0
    assert part.edges["plays"].data["w"].tolist() == [3, 5]
    into = dgl.in_subgraph(g, {"game": [0, 1]})
    dst = g.edges(etype="plays")[1]
    assert into.num_edges("plays") == int((dst < 2).sum()) and not into.num_edges(
        "back"
    )
    hood, place = dgl.khop_in_subgraph(g, {"user": [2]}, 2)
    assert hood.nodes["user"].data[dgl.NID][place["user"]].tolist() == [2]
    looped = dgl.add_self_loop(g, etype="likes")
    assert dgl.remove_self_loop(looped, etype="likes").num_edges("likes") <= 14
    assert looped.num_edges("likes") == 19 and looped.num_edges("plays") == 14
    whole = dgl.add_edges(g, [0], [0], {"w": torch.tensor([5.0])}, etype="plays")
    assert whole.edges["plays"].data["w"][-1] == 5
    more = dgl.add_nodes(g, 2, {"z": torch.ones(2)}, ntype="shop")
    assert more.nodes["shop"].data["z"].tolist() == [0, 0, 0, 1, 1]
