"""Programs as DGL's users write them, after its examples and guide, against loops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data.sampler import SubsetRandomSampler

import hector.message.dgl as dgl
import hector.message.dgl.function as fn
import hector.message.dgl.nn.pytorch as dglnn
from hector.message import Graph
from hector.message.layers import GatedGCNConv
from tests.hector.message.dgl_graphs import SIZES, market, pairs, same, some_graph

pytestmark = pytest.mark.usefixtures("double")


class TreeCell(nn.Module):
    """A binary cell: its functions take two children, so no leaf may be reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(4, 9), nn.Linear(6, 9, bias=False)
        self.f = nn.Linear(6, 6)

    def message(self, edges: Any) -> dict[str, Any]:
        return {"h": edges.src["h"], "c": edges.src["c"]}

    def reduce(self, nodes: Any) -> dict[str, Any]:
        both = nodes.mailbox["h"].view(nodes.mailbox["h"].size(0), -1)
        gates = torch.sigmoid(self.f(both)).view(*nodes.mailbox["h"].size())
        kept = torch.sum(gates * nodes.mailbox["c"], 1)
        return {"iou": self.u(both), "c": kept}

    def apply_node(self, nodes: Any) -> dict[str, Any]:
        i, o, u = torch.chunk(nodes.data["iou"], 3, 1)
        c = torch.sigmoid(i) * torch.tanh(u) + nodes.data["c"]
        return {"h": torch.sigmoid(o) * torch.tanh(c), "c": c}


def test_leaves_keep_what_a_reduce_function_would_set() -> None:
    first = dgl.graph(([0, 1, 3, 2], [3, 3, 4, 4]), num_nodes=5)
    g = dgl.batch([first, dgl.graph(([0, 1], [2, 2]), num_nodes=3)])
    cell, x = TreeCell(), torch.randn(8, 4)
    g.ndata["iou"] = cell.w(x)
    g.ndata["h"], g.ndata["c"] = torch.zeros(8, 3), torch.zeros(8, 3)
    dgl.prop_nodes_topo(g, cell.message, cell.reduce, apply_node_func=cell.apply_node)
    children = {3: (0, 1), 4: (3, 2), 7: (5, 6)}

    def state(node: int) -> tuple[Tensor, Tensor]:
        if node in children:
            h, c = map(torch.stack, zip(*map(state, children[node]), strict=True))
            kept = (torch.sigmoid(cell.f(h.flatten())).view(2, 3) * c).sum(0)
            iou = cell.u(h.flatten())
        else:
            kept, iou = torch.zeros(3), cell.w(x[node])
        i, o, u = iou.chunk(3)
        kept = torch.sigmoid(i) * torch.tanh(u) + kept
        return torch.sigmoid(o) * torch.tanh(kept), kept

    wanted = torch.stack([state(n)[0] for n in range(8)])
    same(g.ndata.pop("h"), wanted, cell.w.weight, cell.f.weight)
    levels = dgl.topological_nodes_generator(first, reverse=True)
    assert [t.tolist() for t in levels] == [[4], [2, 3], [0, 1]]


def test_without_any_message_old_rows_stay_and_new_ones_are_zeros() -> None:
    g = dgl.graph(([], []), num_nodes=3)
    g.ndata["h"] = torch.ones(3, 2)

    def reduce(nodes: Any) -> dict[str, Any]:
        return {"h": nodes.mailbox["m"].sum(1), "new": nodes.mailbox["m"].amax(1)}

    g.update_all(fn.copy_u("h", "m"), reduce)
    assert g.ndata["h"].sum() == 6 and not g.ndata["new"].any()
    g.update_all(fn.copy_u("h", "m"), reduce, lambda n: {"h": n.data["h"] + 1})
    assert g.ndata["h"].sum() == 12
    g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))  # a built-in one is zeros
    assert not g.ndata["h"].any()
    layer, x = GatedGCNConv(4), torch.randn(3, 4)
    alone = layer(Graph([], [], num_nodes=3), x, torch.randn(0, 4))[0]
    torch.testing.assert_close(alone, layer.own(x))


def test_batches_without_self_loops_are_batches_still() -> None:
    ends = [([0, 1, 1], [1, 1, 0]), ([0, 0], [0, 1])]
    for make in (dgl.graph, lambda e: dgl.heterograph({("n", "e", "n"): e})):
        g = dgl.batch([make(e) for e in ends])
        g.ndata["h"], g.edata["w"] = torch.ones(4, 1), torch.arange(5.0)
        plain = dgl.remove_self_loop(g)
        assert plain.batch_num_edges().tolist() == [2, 1]
        assert dgl.sum_nodes(plain, "h").flatten().tolist() == [2, 2]
        one = dgl.slice_batch(plain, 1)
        assert pairs(one) == [(0, 1)] and one.edata["w"].tolist() == [4]
        g.remove_edges([0, 3])
        assert g.batch_num_edges().tolist() == [2, 1] and g.batch_size == 2


def test_metapaths_join_what_they_reach_once() -> None:
    paper, author = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 2])
    g = dgl.heterograph(
        {("p", "pa", "a"): (paper, author), ("a", "ap", "p"): (author, paper)},
        {"p": 4, "a": 3},
    )
    g.nodes["p"].data["h"] = torch.randn(4, 2)
    both = dgl.metapath_reachable_graph(g, ["pa", "ap"])
    assert pairs(both) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)]
    assert torch.equal(both.ndata["h"], g.nodes["p"].data["h"])
    conv = dglnn.GATConv(2, 3, 2, allow_zero_in_degree=True)
    assert conv(both, both.ndata["h"]).shape == (4, 2, 3)
    assert dgl.metapath_reachable_graph(g, ["pa"]).num_nodes("a") == 3
    with pytest.raises(ValueError, match="to begin at 'a'"):
        dgl.metapath_reachable_graph(g, ["pa", "pa"])


def test_types_are_joined_and_given_back() -> None:
    whole = market()
    whole.ndata["tag"] = {n: torch.rand(c) for n, c in SIZES.items()}
    for k in whole.canonical_etypes:
        whole.edges[k].data["tag"] = torch.rand(whole.num_edges(k))

    def told(g: Any) -> dict[Any, set[tuple[float, ...]]]:
        """Edges by type, each as the tags of its ends and its own."""
        found = {}
        for k in g.canonical_etypes:
            ends = zip(g.edges(etype=k), (k[0], k[2]), strict=True)
            tags = [g.nodes[n].data["tag"][e].tolist() for e, n in ends]
            own = g.edges[k].data["tag"].tolist()
            if own:
                found[k] = set(zip(*tags, own, strict=True))
        return found

    joined = dgl.to_homogeneous(whole, ndata=["tag"], edata=["tag"])
    # Types lie in any order of nodes and edges.
    mixed = dgl.node_subgraph(joined, torch.randperm(joined.num_nodes()))
    for g in (joined, mixed):
        back = dgl.to_heterogeneous(g, whole.ntypes, whole.etypes)
        assert told(back) == told(whole)
        for n in whole.ntypes:
            assert "_TYPE" not in back.nodes[n].data
            at = back.nodes[n].data[dgl.NID]
            assert torch.equal(back.nodes[n].data["tag"], g.ndata["tag"][at])
        ids = back.edges["plays"].data[dgl.EID]
        assert torch.equal(back.edges["plays"].data["tag"], g.edata["tag"][ids])
    with pytest.raises(ValueError, match="expected a feature '_TYPE'"):
        dgl.to_heterogeneous(some_graph(), ["a"], ["b"])


def test_functions_over_mailboxes_of_several_messages() -> None:
    g = some_graph()
    g.ndata["h"], g.edata["e"] = torch.randn(9, 4), torch.randn(24, 4)
    src, dst = g.edges()

    def message(edges: Any) -> dict[str, Any]:
        score = (edges.src["h"] * edges.dst["h"]).sum(-1)
        return {"m": edges.src["h"] * edges.data["e"], "s": score}

    def reduce(nodes: Any) -> dict[str, Any]:
        share = torch.softmax(nodes.mailbox["s"], 1).unsqueeze(-1)
        m = nodes.mailbox["m"]
        number = torch.full((nodes.batch_size(), 1), float(m.shape[1]))
        return {
            "o": (share * m).sum(1) + nodes.data["h"],
            "top": m.topk(1, 1)[0].squeeze(1),
            "spread": m.var(1, unbiased=False),
            "number": number,
        }

    g.update_all(message, reduce)
    for v in range(9):
        ids = (dst == v).nonzero().flatten()
        row = {k: g.ndata[k][v] for k in ("o", "top", "spread", "number")}
        if not len(ids):
            assert not any(r.any() for r in row.values())
            continue
        m = g.ndata["h"][src[ids]] * g.edata["e"][ids]
        share = (g.ndata["h"][src[ids]] * g.ndata["h"][v]).sum(-1).softmax(0)
        wanted = (share[:, None] * m).sum(0) + g.ndata["h"][v]
        torch.testing.assert_close(row["o"], wanted)
        torch.testing.assert_close(row["top"], m.amax(0))
        torch.testing.assert_close(row["spread"], m.var(0, unbiased=False))
        assert row["number"] == len(ids)


def test_inference_layer_by_layer_is_the_whole_graph() -> None:
    g, x = some_graph(20, 60), torch.randn(20, 4)
    layers = [dglnn.SAGEConv(4, 5, "mean"), dglnn.SAGEConv(5, 3, "mean")]
    wanted, rows = layers[1](g, layers[0](g, x).relu()), x
    for i, layer in enumerate(layers):
        made = torch.empty(20, (5, 3)[i])
        loader = dgl.dataloading.NodeDataLoader(
            g,
            torch.arange(20),
            dgl.dataloading.MultiLayerFullNeighborSampler(1),
            device="cpu",
            batch_size=7,
        )
        with loader.enable_cpu_affinity():
            for inputs, outputs, blocks in loader:
                h = layer(blocks[0], rows[inputs])
                made[outputs] = (h if i else h.relu()).detach()
        rows = made
    torch.testing.assert_close(rows, wanted.detach())


def test_a_loader_of_edges_as_before_version_one() -> None:
    g = market()
    loader = dgl.dataloading.EdgeDataLoader(
        g,
        {"plays": torch.arange(14)},
        dgl.dataloading.MultiLayerFullNeighborSampler(1),
        exclude="reverse_types",
        reverse_etypes={"plays": "back", "back": "plays"},
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(2),
        batch_size=5,
    )
    x = {n: torch.randn(c, 3) for n, c in SIZES.items()}
    conv = dglnn.HeteroGraphConv({e: dglnn.SAGEConv(3, 2, "mean") for e in g.etypes})
    for inputs, positive, negative, blocks in loader:
        h = conv(blocks[0], {n: x[n][ids] for n, ids in inputs.items()})
        ids = positive.edges["plays"].data[dgl.EID]
        kept = torch.ones(14, dtype=torch.bool)
        kept[ids] = False
        left = dgl.edge_subgraph(
            g,
            {
                k: kept if k[1] in ("plays", "back") else kept | True
                for k in g.canonical_etypes
                if g.num_edges(k)
            },
            relabel_nodes=False,
        )
        whole = conv(left, x)
        for graph in (positive, negative):
            graph.nodes["user"].data["h"] = h["user"]
            graph.nodes["game"].data["h"] = h["game"]
            graph.apply_edges(fn.u_dot_v("h", "h", "score"), etype="plays")
            u, v = graph.edges(etype="plays")
            users, games = (graph.nodes[n].data[dgl.NID] for n in ("user", "game"))
            wanted = (whole["user"][users[u]] * whole["game"][games[v]]).sum(1)
            torch.testing.assert_close(graph.edges["plays"].data["score"][:, 0], wanted)
    with pytest.raises(ValueError, match="g_sampling=None"):
        dgl.dataloading.EdgeDataLoader(g, {}, loader.sampler, g_sampling=g)


def test_layers_of_ones_own_read_a_relation_s_types() -> None:
    seen = []

    class Own(nn.Module):
        def forward(self, graph: Any, feat: Any) -> Tensor:
            rows = feat[0] if isinstance(feat, tuple) else feat
            with graph.local_scope():
                seen.append((graph.is_block, *graph.canonical_etypes))
                graph.srcdata["h"] = rows
                graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
                return graph.dstdata["o"]

    g = market()
    x = {n: torch.randn(c, 3) for n, c in SIZES.items()}
    conv = dglnn.HeteroGraphConv({e: Own() for e in g.etypes})
    conv(g, x)
    sampler = dgl.dataloading.NeighborSampler([2])
    (block,) = sampler.sample(g, {"game": [0, 1]})[2]
    ids = {n: block.srcnodes[n].data[dgl.NID] for n in g.ntypes}
    conv(block, {n: x[n][i] for n, i in ids.items()})
    assert seen == [(b, k) for b in (False, True) for k in g.canonical_etypes]


def test_data_sets_of_ones_own_are_batched() -> None:
    class Made(dgl.data.DGLDataset):
        def __init__(self) -> None:
            super().__init__(name="made")

        def process(self) -> None:
            self.graphs = [some_graph(5, 8) for _ in range(6)]
            self.labels = torch.arange(6)

        def __getitem__(self, i: int) -> Any:
            return self.graphs[i], self.labels[i]

        def __len__(self) -> int:
            return len(self.graphs)

    chosen = SubsetRandomSampler(torch.arange(4))
    loader = dgl.dataloading.GraphDataLoader(
        Made(), sampler=chosen, batch_size=3, use_ddp=False
    )
    found = [(g.batch_size, len(y)) for g, y in loader]
    assert found == [(3, 3), (1, 1)]
    with pytest.raises(ValueError, match="DistributedSampler"):
        dgl.dataloading.GraphDataLoader(Made(), use_ddp=True)
    with pytest.raises(NotImplementedError, match="process"):
        dgl.data.DGLDataset("none")
    with pytest.raises(AttributeError, match="PyG's data sets"):
        dgl.data.CoraGraphDataset  # noqa: B018


def test_data_sets_are_read_where_they_were_saved(tmp_path: Path) -> None:
    made = []

    class Saved(dgl.data.DGLDataset):
        def __init__(self) -> None:
            super().__init__("saved", save_dir=str(tmp_path))

        def process(self) -> None:
            made.append(1)
            self.graph = some_graph()

        def save(self) -> None:
            dgl.save_graphs(self.save_path, [self.graph])

        def load(self) -> None:
            (self.graph,), _ = dgl.load_graphs(self.save_path)

        def has_cache(self) -> bool:
            return Path(self.save_path).exists()

    assert pairs(Saved().graph) == pairs(Saved().graph) and made == [1]


def test_graphs_that_grow_as_in_old_scripts() -> None:
    g = dgl.DGLGraph()
    g.set_n_initializer(dgl.init.zero_initializer)
    g.add_nodes(4)
    g.add_edges([0, 1, 2], [1, 2, 3])
    g.add_edge(3, 0)
    g.ndata["h"] = torch.eye(4)
    assert isinstance(g, dgl.DGLGraph) and isinstance(market(), dgl.DGLGraph)
    assert not isinstance(g.ndata, dgl.DGLGraph)
    g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
    assert g.ndata["h"][0].tolist() == [0, 0, 0, 1]
    g.prop_edges([[0], [1]], fn.copy_u("h", "m"), fn.sum("m", "h"))
    assert torch.equal(g.ndata["h"][2], g.ndata["h"][0])
    with pytest.raises(ValueError, match="zero_initializer"):
        g.set_e_initializer(torch.ones)
    with pytest.raises(AttributeError, match="not taken; docs"):
        dgl.nn.PNAConv  # noqa: B018
    g.update_all(fn.u_mul_v(lhs_field="h", rhs_field="h", out="m"), fn.sum("m", "o"))
