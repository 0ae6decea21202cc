"""Whole programs as DGL's users write them, with changed imports, against loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hector.message.dgl as dgl
from hector.message import functions as fn
from hector.message import nn as dglnn
from pydirect.sampling import KeyedWalks

F64 = torch.float64


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(7)
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(num: int, edges: int) -> tuple[Tensor, Tensor]:
    """Random edges, and one from each node to itself."""
    src, dst = torch.randint(num, (2, edges))
    loops = torch.arange(num)
    return torch.cat((src, loops)), torch.cat((dst, loops))


def looped(
    src: Tensor, dst: Tensor, num: int, row: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """`row` of each node and the ids of the edges into it."""
    return torch.stack([row(n, (dst == n).nonzero().flatten()) for n in range(num)])


class Stack(nn.Module):
    """The model of most tutorials: a list of layers over blocks or one graph."""

    def __init__(self, *layers: nn.Module, act: Any = F.relu) -> None:
        super().__init__()
        self.layers, self.act = nn.ModuleList(layers), act

    def forward(self, graphs: Any, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            x = layer(graphs[i] if isinstance(graphs, list) else graphs, x)
            if i < len(self.layers) - 1:
                x = self.act(x)
        return x


def test_gcn_trains_as_a_dense_matrix_does() -> None:
    src, dst = drawn(12, 40)
    g = dgl.graph((src, dst), num_nodes=12)
    x, label = torch.randn(12, 6), torch.randint(3, (12,))
    model = Stack(dglnn.GraphConv(6, 8), dglnn.GraphConv(8, 3))
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    dense = torch.zeros(12, 12).index_put((dst, src), torch.ones(52), accumulate=True)
    dense = dense.sum(1)[:, None] ** -0.5 * dense * dense.sum(0) ** -0.5

    def plain(x: Tensor) -> Tensor:
        h = F.relu(dense @ x @ weights[0] + weights[1])
        return dense @ h @ weights[2] + weights[3]

    losses = []
    for call, parameters in (
        (lambda: model(g, x), [*model.parameters()]),
        (lambda: plain(x), weights),
    ):
        step = torch.optim.Adam(parameters, lr=0.05)
        seen = []
        for _ in range(8):
            loss = F.cross_entropy(call(), label)
            step.zero_grad()
            loss.backward()
            step.step()
            seen.append(float(loss.detach()))
        losses.append(seen)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]))


def test_graphsage_in_mini_batches() -> None:
    """All neighbours give the whole graph's rows; sampled batches learn."""
    src, dst = drawn(60, 300)
    g = dgl.graph((src, dst), num_nodes=60)
    g.ndata["feat"] = torch.randn(60, 6)
    g.ndata["label"] = (g.ndata["feat"].sum(1) > 0).long()
    model = Stack(dglnn.SAGEConv(6, 8, "mean"), dglnn.SAGEConv(8, 2, "pool"))
    whole = model(g, g.ndata["feat"])
    full = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    for inputs, seeds, blocks in dgl.dataloading.DataLoader(
        g, torch.arange(60), full, batch_size=17
    ):
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][inputs])
        found = model(blocks, blocks[0].srcdata["feat"])
        torch.testing.assert_close(found, whole[seeds])
    sampler = dgl.dataloading.NeighborSampler([5, 3])
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(60), sampler, batch_size=20, shuffle=True
    )
    step = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(15):
        for _, _, blocks in loader:
            out = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(out, blocks[-1].dstdata["label"])
            step.zero_grad()
            loss.backward()
            step.step()
            losses.append(float(loss.detach()))
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


def test_gat_of_two_layers() -> None:
    src, dst = drawn(10, 40)
    g = dgl.graph((src, dst), num_nodes=10)
    x = torch.randn(10, 5)
    first, second = dglnn.GATConv(5, 4, 2, activation=F.elu), dglnn.GATConv(8, 3, 1)
    found = second(g, first(g, x).flatten(1)).mean(1)

    def loop(layer: Any, x: Tensor, heads: int, width: int) -> Tensor:
        h = layer.fc_src(x).view(10, heads, width)
        left, right = (h * layer.attn_l).sum(-1), (h * layer.attn_r).sum(-1)

        def row(node: int, ids: Tensor) -> Tensor:
            share = F.leaky_relu(left[src[ids]] + right[node], 0.2).softmax(0)
            return (share[..., None] * h[src[ids]]).sum(0)

        return looped(src, dst, 10, row)

    wanted = loop(second, F.elu(loop(first, x, 2, 4)).flatten(1), 1, 3).mean(1)
    torch.testing.assert_close(found, wanted)


KINDS = [("paper", "cites", "paper"), ("author", "writes", "paper")]
KINDS += [("paper", "written", "author")]
SIZES = {"paper": 20, "author": 9}


def academic() -> Any:
    edges = {k: [torch.randint(SIZES[n], (70,)) for n in (k[0], k[2])] for k in KINDS}
    g = dgl.heterograph({k: (u, v) for k, (u, v) in edges.items()}, SIZES)
    g.ndata["feat"] = {n: torch.randn(c, 4) for n, c in SIZES.items()}
    return g


def relu(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: F.relu(t) for n, t in x.items()}


def test_rgcn_in_heterogeneous_mini_batches() -> None:
    g = academic()

    def layer(a: int, b: int) -> nn.Module:
        convs = {r: dglnn.GraphConv(a, b, "right", bias=False) for r in g.etypes}
        for conv in convs.values():
            conv.allow_zero_in_degree = True
        return dglnn.HeteroGraphConv(convs, aggregate="sum")

    model = Stack(layer(4, 6), layer(6, 3), act=relu)
    x: dict[str, Tensor] = g.ndata["feat"]
    for each in model.layers:
        made = {n: torch.zeros(c, each.mods["cites"].weight.shape[1])
                for n, c in SIZES.items()}  # fmt: skip
        for kind in g.canonical_etypes:
            src, dst = g.edges(etype=kind)
            rows = x[kind[0]]

            def row(node: int, ids: Tensor, rows: Any = rows, src: Any = src) -> Tensor:
                near = rows[src[ids]]
                return near.mean(0) if len(ids) else near.sum(0)

            near = looped(src, dst, SIZES[kind[2]], row)
            made[kind[2]] = made[kind[2]] + near @ each.mods[kind[1]].weight
        x = relu(made) if each is model.layers[0] else made
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    seeds = {"paper": torch.arange(20), "author": torch.tensor([4, 2])}
    seen = 0
    for inputs, outputs, blocks in dgl.dataloading.DataLoader(
        g, seeds, sampler, batch_size=8
    ):
        feats = {n: g.nodes[n].data["feat"][i] for n, i in inputs.items()}
        assert all(
            torch.equal(feats[n], blocks[0].srcdata["feat"][n]) for n in g.ntypes
        )
        found = model(blocks, feats)
        for n, ids in outputs.items():
            seen += len(ids)
            if len(ids):
                torch.testing.assert_close(found[n], x[n][ids])
    assert seen == 22


def test_rgat_in_heterogeneous_mini_batches() -> None:
    g = academic()
    convs = {
        r: dglnn.GATConv((4, 4), 3, 2, allow_zero_in_degree=True) for r in g.etypes
    }
    model = dglnn.HeteroGraphConv(convs, aggregate="sum")
    ids = torch.tensor([3, 11, 0])
    block = dgl.dataloading.MultiLayerFullNeighborSampler(1).sample(g, {"paper": ids})
    found = model(block[2][0], block[2][0].srcdata["feat"])["paper"]
    x, wanted = g.ndata["feat"], torch.zeros(3, 2, 3)
    for kind in KINDS[:2]:
        src, dst = g.edges(etype=kind)
        conv: Any = convs[kind[1]]
        h = conv.fc_src(x[kind[0]]).view(-1, 2, 3)
        own = conv.fc_dst(x["paper"]).view(-1, 2, 3)
        for place, node in enumerate(ids.tolist()):
            rows = h[src[dst == node]]
            score = (rows * conv.attn_l).sum(-1) + (own[node] * conv.attn_r).sum(-1)
            share = F.leaky_relu(score, 0.2).softmax(0)
            wanted[place] += (share[..., None] * rows).sum(0) + conv.bias.view(2, 3)
    torch.testing.assert_close(found, wanted)


def test_a_relational_layer_of_ones_own() -> None:
    """`multi_update_all` with a weight a relation, as the user guide writes it."""
    g = academic()
    weight = nn.ModuleDict({r: nn.Linear(4, 3) for r in g.etypes})
    funcs = {}
    for start, name, _ in g.canonical_etypes:
        rows = weight[name](g.nodes[start].data["feat"])
        g.nodes[start].data[f"Wh_{name}"] = rows
        funcs[name] = (fn.copy_u(f"Wh_{name}", "m"), fn.mean("m", "h"))
    g.multi_update_all(funcs, "sum")
    wanted = {n: torch.zeros(c, 3) for n, c in SIZES.items()}
    for kind in g.canonical_etypes:
        src, dst = g.edges(etype=kind)
        rows = weight[kind[1]](g.nodes[kind[0]].data["feat"])
        for node in range(SIZES[kind[2]]):
            mine = rows[src[dst == node]]
            if len(mine):
                wanted[kind[2]][node] += mine.mean(0)
    for n in g.ntypes:
        torch.testing.assert_close(g.nodes[n].data["h"], wanted[n])


def test_gin_over_batches_of_graphs() -> None:
    graphs, rows = [], []
    for num in (4, 7, 2, 5):
        one = dgl.graph(drawn(num, 3 * num), num_nodes=num)
        one.ndata["attr"] = torch.randn(num, 3)
        graphs.append(one)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    conv, head = dglnn.GINConv(net, "sum", learn_eps=True), nn.Linear(4, 2)
    joined = dgl.batch(graphs)
    assert joined.batch_size == 4
    joined.ndata["h"] = conv(joined, joined.ndata["attr"])
    found = head(dgl.sum_nodes(joined, "h"))
    for one in graphs:
        src, dst = one.edges()
        x = one.ndata["attr"]
        near = looped(src, dst, len(x), lambda n, ids, x=x, src=src: x[src[ids]].sum(0))
        rows.append(net((1 + conv.eps) * x + near).sum(0))
    torch.testing.assert_close(found, head(torch.stack(rows)))


def test_tree_lstm_by_levels() -> None:
    """`prop_nodes` with functions of one's own, against recursion."""
    parent = [4, 4, 5, 5, 6, 6]  # of nodes 0 to 5; 6 is the root
    g = dgl.graph((list(range(6)), parent), num_nodes=7)
    x, width = torch.randn(7, 12), 4
    iou, forget = nn.Linear(width, 12, bias=False), nn.Linear(width, width)

    def cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = gates.chunk(3, 1)
        c = i.sigmoid() * u.tanh() + c
        return o.sigmoid() * c.tanh(), c

    def message(edges: Any) -> dict[str, Any]:
        return {"h": edges.src["h"], "c": edges.src["c"]}

    def reduce(nodes: Any) -> dict[str, Any]:
        h, c = nodes.mailbox["h"], nodes.mailbox["c"]
        kept = (torch.sigmoid(forget(h)) * c).sum(1)
        return {"gates": nodes.data["x"] + iou(h.sum(1)), "c": kept}

    def apply(nodes: Any) -> dict[str, Any]:
        h, c = cell(nodes.data["gates"], nodes.data["c"])
        return {"h": h, "c": c, "gates": nodes.data["gates"]}

    g.ndata.update({"x": x, "gates": x, "h": torch.zeros(7, 4), "c": torch.zeros(7, 4)})
    leaves, *levels = g.topological_levels()
    g.apply_nodes(apply, leaves)
    g.prop_nodes(levels, message, reduce, apply)

    def state(node: int) -> tuple[Tensor, Tensor]:
        below = [state(i) for i, p in enumerate(parent) if p == node]
        if not below:
            return cell(x[node][None], torch.zeros(1, width))
        kept = sum(torch.sigmoid(forget(h)) * c for h, c in below)
        total = sum(h for h, _ in below)
        assert isinstance(kept, Tensor) and isinstance(total, Tensor)
        return cell(x[node][None] + iou(total), kept)

    torch.testing.assert_close(g.ndata["h"][6][None], state(6)[0])


def test_pinsage_draws_and_aggregates() -> None:
    """Neighbours by visits of walks, and a mean of their rows weighted by visits."""
    user, item = torch.randint(15, (80,)), torch.randint(10, (80,))
    bought, by = ("item", "bought", "user"), ("user", "by", "item")
    sizes = {"user": 15, "item": 10}
    walks = KeyedWalks(
        {bought: (item, user), by: (user, item)}, sizes, device="cpu", seed=3
    )
    seeds = torch.tensor([2, 9, 5])
    near = walks.pinsage(
        seeds,
        [bought, by],
        num_traversals=2,
        termination_prob=0.5,
        num_walks=10,
        num_neighbors=4,
    )
    kind = ("item", "near", "item")
    frontier = dgl.heterograph({kind: (near.source, seeds[near.position])}, sizes)
    frontier.nodes["item"].data["h"] = torch.randn(10, 6)
    frontier.edges[kind].data["w"] = near.visits.to(F64)[:, None]
    block = dgl.to_block(frontier, {"item": seeds})
    net = nn.Linear(6, 5)
    block.srcnodes["item"].data["n"] = F.relu(net(block.srcnodes["item"].data["h"]))
    block.update_all(fn.u_mul_e("n", "w", "m"), fn.sum("m", "s"))
    block.update_all(fn.copy_e("w", "m"), fn.sum("m", "ws"))
    ends = block.dstnodes["item"].data
    found = ends["s"] / ends["ws"].clamp(min=1)
    x = frontier.nodes["item"].data["h"]
    wanted = []
    for place in range(3):
        mine = near.position == place
        w = near.visits[mine].to(F64)[:, None]
        wanted.append((F.relu(net(x[near.source[mine]])) * w).sum(0) / w.sum())
    torch.testing.assert_close(found, torch.stack(wanted))


def test_link_prediction_with_a_predictor_on_edges() -> None:
    src, dst = drawn(12, 30)
    g = dgl.graph((src, dst), num_nodes=12)
    negative = dgl.graph(tuple(torch.randint(12, (2, 25))), num_nodes=12)
    h = torch.randn(12, 4)
    one, two = nn.Linear(8, 6), nn.Linear(6, 1)

    class Predictor(nn.Module):
        def apply_edges(self, edges: Any) -> dict[str, Any]:
            both = torch.cat([edges.src["h"], edges.dst["h"]], 1)
            return {"score": two(F.relu(one(both))).squeeze(1)}

        def forward(self, g: Any, h: Tensor) -> Tensor:
            with g.local_scope():
                g.ndata["h"] = h
                g.apply_edges(self.apply_edges)
                score: Tensor = g.edata["score"]
                return score

    for graph in (g, negative):
        found = Predictor()(graph, h)
        u, v = graph.edges()
        wanted = two(F.relu(one(torch.cat((h[u], h[v]), 1)))).squeeze(1)
        torch.testing.assert_close(found, wanted)
        assert not graph.ndata and not graph.edata


def test_edge_convolution() -> None:
    """DGCNN: the maximum of a linear layer of differences."""
    src, dst = drawn(11, 33)
    g = dgl.graph((src, dst), num_nodes=11)
    x, theta, phi = torch.randn(11, 3), nn.Linear(3, 5), nn.Linear(3, 5)
    g.srcdata["x"] = x
    g.apply_edges(fn.v_sub_u("x", "x", "d"))
    g.edata["e"] = theta(g.edata["d"])
    g.dstdata["p"] = phi(x)
    g.update_all(fn.e_add_v("e", "p", "m"), fn.max("m", "o"))
    wanted = looped(
        src, dst, 11, lambda n, ids: (theta(x[n] - x[src[ids]]) + phi(x[n])).amax(0)
    )
    torch.testing.assert_close(g.ndata["o"], wanted)


def test_page_rank() -> None:
    src, dst = drawn(15, 50)
    g = dgl.graph((src, dst), num_nodes=15)
    g.ndata["pv"], g.ndata["deg"] = torch.ones(15) / 15, g.out_degrees().to(F64)
    rank = torch.ones(15) / 15
    matrix = torch.zeros(15, 15).index_put((dst, src), torch.ones(65), accumulate=True)
    for _ in range(20):
        g.ndata["pv"] = g.ndata["pv"] / g.ndata["deg"]
        g.update_all(fn.copy_u("pv", "m"), fn.sum("m", "pv"))
        g.ndata["pv"] = 0.15 / 15 + 0.85 * g.ndata["pv"]
        rank = 0.15 / 15 + 0.85 * (matrix / matrix.sum(0)) @ rank
    torch.testing.assert_close(g.ndata["pv"], rank)


def test_attention_normalized_by_sources() -> None:
    """A transport: each node shares out what it has along its edges."""
    src, dst = drawn(9, 30)
    g = dgl.graph((src, dst), num_nodes=9)
    score = torch.randn(39, 1)
    g.edata["a"] = dgl.edge_softmax(g, score, norm_by="src")
    g.ndata["h"] = torch.rand(9, 2)
    g.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "o"))
    wanted = torch.zeros(9, 2)
    for node in range(9):
        out = (src == node).nonzero().flatten()
        share = score[out].softmax(0)
        wanted.index_add_(0, dst[out], share * g.ndata["h"][node])
    torch.testing.assert_close(g.ndata["o"], wanted)
    torch.testing.assert_close(g.ndata["o"].sum(0), g.ndata["h"].sum(0))


def test_the_door_takes_edges_in_every_form() -> None:
    src, dst = torch.tensor([0, 2, 1, 1]), torch.tensor([1, 1, 1, 0])
    sparse = torch.sparse_coo_tensor(
        torch.stack((dst, src)), torch.ones(4), (4, 4), check_invariants=True
    )
    forms = [(src.int(), dst.int()), ([0, 2, 1, 1], [1, 1, 1, 0])]
    pairs = [(0, 1), (2, 1), (1, 1), (1, 0)]
    for data in (*forms, pairs, sparse):
        g = dgl.graph(data, num_nodes=4)
        u, v = g.edges()
        found = sorted(zip(u.tolist(), v.tolist(), strict=True))
        assert found == sorted(pairs) and g.num_nodes() == 4
    g = dgl.graph(forms[0], idtype=torch.int32, device="cpu")
    assert dgl.remove_self_loop(g).num_edges() == 3
    assert dgl.add_self_loop(g).num_edges() == 7
    assert torch.equal(dgl.reverse(g).edges()[0], dst)
    assert dgl.node_subgraph(g, [0, 1]).num_edges() == 3
    assert dgl.edge_subgraph(g, [1], relabel_nodes=False).num_nodes() == 3
    with pytest.raises(ValueError, match="idtype"):
        dgl.graph(forms[0], idtype=torch.int16)
