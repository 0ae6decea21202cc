"""More scripts as DGL's users write them: blocks, walks, files, layers, forces."""

import copy
import pickle
from pathlib import Path
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


def test_blocks_of_frontiers_have_sources_behind_destinations() -> None:
    g = some_graph(12, 40)
    g.ndata["x"], seeds = torch.randn(12, 3), torch.tensor([7, 2, 9])
    frontier = dgl.sampling.sample_neighbors(g, seeds, 2, "in", None, True)
    block = dgl.to_block(frontier, seeds)
    assert torch.equal(block.dstdata["x"], g.ndata["x"][seeds])
    assert torch.equal(block.srcdata[dgl.NID][:3], seeds)
    assert torch.equal(block.dstdata[dgl.NID], seeds) and block.is_block
    conv = dglnn.GATConv(3, 2, 2, residual=True, allow_zero_in_degree=True)
    x = block.srcdata["x"]
    src, dst = block.edges()
    h = conv.fc_src(x).view(-1, 2, 2)
    left, right = (h * conv.attn_l).sum(-1), (h[:3] * conv.attn_r).sum(-1)
    score = F.leaky_relu(left[src] + right[dst], 0.2).exp()
    total = near(src, dst, 3, score, "sum")
    out = near(src, dst, 3, (score / total[dst])[..., None] * h[src], "sum")
    wanted = out + conv.res_fc(x[:3]).view(-1, 2, 2) + conv.bias.view(1, 2, 2)
    same(conv(block, x), wanted, conv.fc_src.weight, conv.attn_l, conv.res_fc.weight)


def test_int32_ids_devices_and_copies(tmp_path: Path) -> None:
    src, dst = torch.randint(6, (2, 15), dtype=torch.int32)
    g = dgl.graph((src, dst), num_nodes=6, idtype=torch.int32, device="cpu")
    g.ndata["h"] = torch.randn(6, 2)
    g = g.int().to("cpu").long().cpu()
    g.update_all(fn.copy_u("h", "m"), fn.max("m", "o"))
    wanted = near(src, dst, 6, g.ndata["h"][src], "max")
    torch.testing.assert_close(g.ndata["o"], wanted)
    typed = market()
    typed.ndata["h"] = {n: torch.randn(c, 2) for n, c in SIZES.items()}
    for one in (g, typed, dgl.batch([g, g]), dgl.batch([typed, typed])):
        dgl.save_graphs(tmp_path / "g.bin", [one], {"y": torch.ones(3)})
        (read,), labels = dgl.load_graphs(tmp_path / "g.bin")
        assert labels["y"].sum() == 3
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), read):
            assert other.batch_size == one.batch_size
            for k in one.canonical_etypes:
                assert all(map(torch.equal, other[k].edges(), one[k].edges()))
            for n in one.ntypes:
                rows = other.nodes[n].data["h"]
                assert torch.equal(rows, one.nodes[n].data["h"])


def test_walks_and_pinsage_of_purchases() -> None:
    user, item = torch.randint(8, (30,)), torch.randint(6, (30,))
    g = dgl.heterograph(
        {("user", "buys", "item"): (user, item), ("item", "by", "user"): (item, user)},
        {"user": 8, "item": 7},
    )
    traces, types = dgl.sampling.random_walk(
        g, [0, 1, 6] * 5, metapath=["by", "buys"] * 2
    )
    assert types.tolist() == [0, 1, 0, 1, 0] and traces.shape == (15, 5)
    assert bool((traces[2::3, 1:] == -1).all())
    for row in traces[traces[:, 1] >= 0].tolist():
        for a, b in zip(row[::2], row[1::2], strict=False):
            assert g.has_edges_between(b, a, etype="buys")
    g.edges["by"].data["p"] = (user == user[item == 0][0]).double()
    picked = dgl.sampling.random_walk(g, [0] * 9, metapath=["by"], prob="p")[0]
    assert set(picked[:, 1].tolist()) == {int(user[item == 0][0])}
    sampler = dgl.sampling.PinSAGESampler(g, "item", "user", 2, 0.5, 40, 3)
    frontier = sampler(torch.tensor([0, 4]))
    assert frontier.num_nodes() == 7 and set(frontier.edges()[1].tolist()) <= {0, 4}
    assert bool((frontier.in_degrees() <= 3).all())
    visits = frontier.edata["weights"]
    assert 20 < int(visits.sum()) <= 160 and visits[0] >= visits[1]
    pair = dgl.graph((torch.tensor([0]), torch.tensor([4])), num_nodes=7)
    other = dgl.graph((torch.tensor([5]), torch.tensor([4])), num_nodes=7)
    one, two = dgl.compact_graphs([pair, other])
    assert one.ndata[dgl.NID].tolist() == two.ndata[dgl.NID].tolist() == [0, 4, 5]


def test_graphs_without_edges_and_relations_without_edges() -> None:
    g = dgl.graph(([], []), num_nodes=4)
    x = torch.randn(4, 3, requires_grad=True)
    g.ndata["h"] = x
    for how in (fn.sum, fn.mean, fn.max, fn.min):
        g.update_all(fn.copy_u("h", "m"), how("m", "o"))
        assert not g.ndata["o"].any() and g.ndata["o"].shape == (4, 3)
    g.apply_edges(fn.u_add_v("h", "h", "s"))
    assert g.edata["s"].shape == (0, 3)
    assert not dglnn.GATConv(3, 2, 2, allow_zero_in_degree=True)(g, x).any()
    assert dgl.graph(([], [])).num_nodes() == 0
    typed = market()
    typed.ndata["h"] = {n: torch.randn(c, 3) for n, c in SIZES.items()}
    layer = dglnn.HeteroGraphConv({e: dglnn.GraphConv(3, 2) for e in typed.etypes})
    out = layer(typed, typed.ndata["h"])
    wanted = torch.zeros(5, 2)
    for k in (KINDS[1], KINDS[3]):
        src, dst = typed.edges(etype=k)
        into, outof = (torch.bincount(e, minlength=9).clamp(min=1) for e in (dst, src))
        rows = typed.nodes[k[0]].data["h"][src] * outof[src][:, None] ** -0.5
        n = near(src, dst, 5, rows, "sum") * into[:5, None] ** -0.5
        wanted = wanted + n @ layer.mods[k[1]].weight
    torch.testing.assert_close(out["game"], wanted)


def test_rgcn_on_one_graph_of_all_types() -> None:
    hg = market()
    for k in hg.canonical_etypes:
        hg.edges[k].data["norm"] = torch.rand(hg.num_edges(k), 1)
    g = dgl.to_homogeneous(hg, edata=["norm"])
    kinds, norm = g.edata[dgl.ETYPE], g.edata["norm"]
    assert g.ndata[dgl.NTYPE].tolist() == [0] * 5 + [1] * 3 + [2] * 6
    assert [hg.canonical_etypes[t] for t in kinds.unique()] != []
    x = torch.randn(14, 4, requires_grad=True)
    src, dst = g.edges()
    for regularizer, bases in ((None, None), ("basis", 2), ("bdd", 2)):
        conv = dglnn.RelGraphConv(4, 6, 5, regularizer, bases, activation=torch.tanh)
        message = conv.linear_r(x[src], kinds) * norm
        wanted = near(src, dst, 14, message, "sum") + x @ conv.loop_weight + conv.h_bias
        same(conv(g, x, kinds, norm), wanted.tanh(), x, conv.linear_r.W)


def test_attention_of_gatv2_and_weights_of_edges() -> None:
    g = dgl.add_self_loop(some_graph())
    src, dst = g.edges()
    x = torch.randn(9, 4, requires_grad=True)
    conv = dglnn.GATv2Conv(4, 3, 2, residual=True)
    out, share = conv(g, x, get_attention=True)
    left, right = conv.fc_src(x).view(9, 2, 3), conv.fc_dst(x).view(9, 2, 3)
    score = (F.leaky_relu(left[src] + right[dst], 0.2) * conv.attn).sum(
        -1, keepdim=True
    )
    e = score.exp()
    soft = e / near(src, dst, 9, e, "sum")[dst]
    torch.testing.assert_close(share, soft)
    wanted = near(src, dst, 9, soft * left[src], "sum") + conv.res_fc(x).view(9, 2, 3)
    same(out, wanted, x, conv.attn, conv.fc_dst.weight)
    w = torch.rand(g.num_edges(), requires_grad=True)
    norm = dglnn.EdgeWeightNorm("both")(g, w)
    into = near(src, dst, 9, w, "sum")
    outof = near(dst, src, 9, w, "sum")
    same(norm, w / (outof[src] * into[dst]).sqrt(), w)
    gcn = dglnn.GraphConv(4, 2, norm="none")
    n = near(src, dst, 9, x[src] * norm[:, None], "sum")
    same(gcn(g, x, edge_weight=norm), n @ gcn.weight + gcn.bias, x, w)


def test_forces_are_gradients_that_are_trained() -> None:
    """The energy of a message function, its gradient to positions, and the gradient
    of that to weights."""
    g = some_graph()
    src, dst = g.edges()
    r, mlp = torch.randn(9, 3, requires_grad=True), nn.Linear(3, 4)

    def energy(r: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["r"] = r
            g.apply_edges(fn.u_sub_v("r", "r", "d"))
            g.edata["e"] = torch.tanh(mlp(g.edata["d"]))
            g.update_all(fn.copy_e("e", "m"), fn.sum("m", "h"))
            return g.ndata["h"].square().sum()

    def plain(r: Tensor) -> Tensor:
        rows = torch.tanh(mlp(r[src] - r[dst]))
        return near(src, dst, 9, rows, "sum").square().sum()

    forces = [
        torch.autograd.grad(f(r), r, create_graph=True)[0] for f in (energy, plain)
    ]
    same(forces[0], forces[1], r, mlp.weight)


def test_samplers_of_ones_own() -> None:
    """A sampler that derives from DGL's base and overrides `sample_blocks`."""

    class Full(dgl.dataloading.BlockSampler):
        def sample_blocks(
            self, g: Any, seed_nodes: Any, exclude_eids: Any = None
        ) -> Any:
            outputs, blocks = seed_nodes, []
            for _ in range(2):
                frontier = dgl.in_subgraph(g, seed_nodes)
                block = dgl.to_block(frontier, seed_nodes)
                seed_nodes = block.srcdata[dgl.NID]
                blocks.insert(0, block)
            return seed_nodes, outputs, blocks

    g = some_graph(15, 60)
    g.ndata["x"] = torch.randn(15, 2)
    src, dst = g.edges()
    wanted = g.ndata["x"]
    for _ in range(2):
        wanted = near(src, dst, 15, wanted[src], "sum")
    loader = dgl.dataloading.DataLoader(g, torch.arange(15), Full(), batch_size=4)
    for inputs, seeds, blocks in loader:
        x = g.ndata["x"][inputs]
        for block in blocks:
            block.srcdata["x"] = x
            block.update_all(fn.copy_u("x", "m"), fn.sum("m", "o"))
            x = block.dstdata["o"]
        torch.testing.assert_close(x, wanted[seeds])


def test_doors_to_other_libraries() -> None:
    import networkx
    import scipy.sparse

    matrix = scipy.sparse.coo_matrix(([2.0, 3.0], ([0, 2], [1, 0])), shape=(3, 3))
    g = dgl.from_scipy(matrix, eweight_name="w")
    assert g.edges()[1].tolist() == [1, 0] and g.edata["w"].tolist() == [2, 3]
    nx = networkx.path_graph(3)
    networkx.set_node_attributes(nx, {i: [float(i)] for i in range(3)}, "x")
    g = dgl.from_networkx(nx, node_attrs=["x"])
    assert g.num_edges() == 4 and g.ndata["x"].tolist() == [[0], [1], [2]]
    assert dgl.rand_graph(5, 11).num_edges() == 11
    with pytest.raises(AttributeError, match="networkx has it"):
        dgl.dfs_edges_generator  # noqa: B018
    with pytest.raises(AttributeError, match="what of DGL is not taken"):
        dgl.nothing_known  # noqa: B018
