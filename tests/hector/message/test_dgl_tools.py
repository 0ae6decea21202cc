"""DGL's functions of graphs: points, paths, walks, transforms, products, formats."""

import pytest
import torch

import hector.message.dgl as dgl
import hector.message.dgl.nn.pytorch as dglnn
from tests.hector.message.dgl_graphs import market, near, pairs, same, some_graph

pytestmark = pytest.mark.usefixtures("double")


def test_lines_hops_and_graphs_of_two_graphs() -> None:
    g = dgl.graph(([0, 1, 1, 2], [1, 0, 2, 1]))
    g.edata["w"] = torch.arange(4.0)
    lines = dgl.line_graph(g, shared=True)
    assert pairs(lines) == [(0, 1), (0, 2), (1, 0), (2, 3), (3, 1), (3, 2)]
    assert torch.equal(lines.ndata["w"], g.edata["w"])
    assert pairs(dgl.line_graph(g, backtracking=False)) == [(0, 2), (3, 1)]
    road = dgl.graph(([0, 1, 0, 2, 0], [1, 2, 3, 4, 1]))
    assert pairs(dgl.khop_graph(road, 2)) == [(0, 2), (0, 2), (1, 4)]
    part, place = dgl.khop_out_subgraph(road, 0, k=1)
    assert part.ndata[dgl.NID].tolist() == [0, 1, 3] and place.tolist() == [0]
    assert [t.tolist() for t in dgl.bfs_nodes_generator(road, 0)] == [
        [0],
        [1, 3],
        [2],
        [4],
    ]
    assert len(dgl.bfs_nodes_generator(road, 4, reverse=True)) == 4
    one, two = dgl.graph(([0, 1], [2, 3])), dgl.graph(([1, 2], [0, 4]))
    one.ndata["x"], two.ndata["x"] = torch.zeros(4), torch.tensor([1.0, 2, 3, 4, 5])
    one.edata["w"], two.edata["w"] = torch.zeros(2), torch.ones(2)
    both = dgl.merge([one, two])
    assert both.edges()[1].tolist() == [2, 3, 0, 4]
    assert both.ndata["x"].tolist() == [1, 2, 3, 4, 5]
    assert both.edata["w"].tolist() == [0, 0, 1, 1]
    cycle = dgl.add_reverse_edges(dgl.graph(([0, 1, 2, 3], [1, 2, 3, 0])))
    assert dgl.laplacian_lambda_max(dgl.batch([cycle, cycle])) == pytest.approx([2, 2])
    norm = dgl.norm_by_dst(road)
    assert norm.tolist() == [0.5, 1, 1, 1, 0.5]


def test_near_points_are_neighbours() -> None:
    x = torch.randn(2, 8, 3)
    g = dglnn.KNNGraph(3)(x)
    assert g.batch_num_edges().tolist() == [24, 24]
    src, dst = g.edges()
    for i in range(16):
        far = (x[i // 8] - x[i // 8][i % 8]).norm(dim=1)
        wanted = far.topk(3, largest=False).indices + i // 8 * 8
        assert set(src[dst == i].tolist()) == set(wanted.tolist())
    alone = dgl.knn_graph(x[0], 3, exclude_self=True)
    assert alone.batch_size == 1 and (alone.in_degrees() == 3).all()
    assert not (alone.edges()[0] == alone.edges()[1]).any()
    turned = dgl.segmented_knn_graph(
        torch.tensor([[1.0, 0], [9, 1], [0, 1]]),
        1,
        [3],
        dist="cosine",
        exclude_self=True,
    )
    assert turned.edges()[0].tolist() == [1, 0, 1]
    near_, far = dgl.radius_graph(
        torch.tensor([[0.0], [1], [3]]), 1.5, get_distances=True
    )
    assert pairs(near_) == [(0, 1), (1, 0)] and far.flatten().tolist() == [1, 1]
    with pytest.raises(ValueError, match="k of at least 1"):
        dgl.knn_graph(x[0], 0)


def test_walks_that_turn_back_or_never_do() -> None:
    road = dgl.graph(([0, 1, 1, 2], [1, 0, 2, 1]))
    walk = dgl.sampling.node2vec_random_walk
    assert walk(road, [0] * 30, 1e-9, 1.0, 4).tolist() == [[0, 1, 0, 1, 0]] * 30
    assert walk(road, [0] * 30, 1e9, 1.0, 3).tolist() == [[0, 1, 2, 1]] * 30
    # 0 to 1, then to 2, which 0 leads to, or 3, which it does not.
    fork = dgl.graph(([0, 0, 1, 1], [1, 2, 2, 3]))
    fork.edata["p"] = torch.tensor([1.0, 0, 1, 1])
    ended, ids = walk(fork, [0] * 30, 1.0, 1e9, 2, prob="p", return_eids=True)
    assert ended.tolist() == [[0, 1, 2]] * 30 and ids.tolist() == [[0, 2]] * 30
    assert walk(fork, [0] * 30, 1.0, 1e-9, 3, "p").tolist() == [[0, 1, 3, -1]] * 30
    packed = dgl.sampling.pack_traces(
        torch.tensor([[0, 1, -1], [2, 3, 4]]), torch.tensor([0, 1, 0])
    )
    wanted = [[0, 1, 2, 3, 4], [0, 1, 0, 1, 0], [2, 3], [0, 2]]
    assert [t.tolist() for t in packed] == wanted


def test_parts_by_weight_and_of_what_blocks_reach() -> None:
    g = dgl.graph(([0, 0, 1, 1, 2, 2], [1, 2, 0, 1, 2, 0]))
    g.edata["w"] = torch.tensor([0.0, 1, 0, 1, 0, 1])
    top = dgl.sampling.select_topk
    assert pairs(top(g, 1, "w")) == [(0, 2), (1, 1), (2, 0)]
    assert pairs(top(g, 1, "w", [0], "out", ascending=True)) == [(0, 1)]
    g = some_graph(20, 60)
    g.ndata["x"] = torch.randn(20, 2)
    sampler = dgl.dataloading.ShaDowKHopSampler([2, 2])
    for inputs, seeds, part in dgl.dataloading.DataLoader(
        g, torch.arange(20), sampler, batch_size=4
    ):
        assert torch.equal(inputs[: len(seeds)], seeds)
        assert torch.equal(part.ndata["x"], g.ndata["x"][inputs])
        inside = [torch.isin(e, inputs) for e in g.edges()]
        assert part.num_edges() == int((inside[0] & inside[1]).sum())
    _, _, part = sampler.sample(g, torch.arange(20), torch.tensor([3, 5]))
    assert not torch.isin(part.edata[dgl.EID], torch.tensor([3, 5])).any()
    bare = dgl.sampling.sample_neighbors(
        g, [1, 2], -1, copy_ndata=False, output_device="cpu"
    )
    assert list(bare.ndata) == [] and bare.num_edges() == int(
        g.in_degrees([1, 2]).sum()
    )


def test_transforms_change_all_types() -> None:
    g = dgl.graph(([0, 1, 1], [1, 1, 2]))
    g.edata["w"] = torch.arange(3.0)
    looped = dgl.AddSelfLoop()(g)
    assert pairs(looped) == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)]
    assert dgl.AddSelfLoop(allow_duplicate=True)(g).num_edges() == 6
    both = dgl.Compose([dgl.RemoveSelfLoop(), dgl.AddReverse()])(g)
    assert both.edges()[1].tolist() == [1, 2, 0, 1]
    assert both.edata["w"].tolist() == [0, 2, 0, 0]
    assert dgl.ToSimple()(dgl.merge([g, g])).edata["count"].tolist() == [2, 2, 2]
    typed = market()
    typed.edges["plays"].data["w"] = torch.rand(14)
    made = dgl.AddReverse(copy_edata=True)(typed)
    u, v = made.edges(etype="rev_plays")
    assert all(map(torch.equal, (v, u), typed.edges(etype="plays")))
    assert torch.equal(
        made.edges["rev_plays"].data["w"], typed.edges["plays"].data["w"]
    )
    assert made.num_edges("follows") == 28
    assert (
        dgl.AddSelfLoop(new_etypes=True)(typed).num_edges(("shop", "self", "shop")) == 3
    )


def test_products_without_features() -> None:
    g = some_graph()
    src, dst = g.edges()
    x = torch.randn(9, 3, requires_grad=True)
    w = torch.rand(24, 1, requires_grad=True)
    same(dgl.ops.u_mul_e_sum(g, x, w), near(src, dst, 9, x[src] * w, "sum"), x, w)
    same(dgl.ops.copy_u_max(g, x), near(src, dst, 9, x[src], "max"), x)
    same(dgl.ops.e_sub_v_mean(g, w, x), near(src, dst, 9, w - x[dst], "mean"), x, w)
    same(dgl.ops.u_dot_v(g, x, x), (x[src] * x[dst]).sum(1, keepdim=True), x)
    assert not g.ndata and not g.edata
    with pytest.raises(TypeError, match="expected 2 tensors"):
        dgl.ops.u_add_v(g, x)


def test_graphs_are_described_and_filtered() -> None:
    g = some_graph()
    src, dst = g.edges()
    dense = torch.zeros(9, 9).index_put((src, dst), torch.ones(24), accumulate=True)
    assert torch.equal(g.adj_external().to_dense().double(), dense)
    assert torch.equal(g.adj_external(True).to_dense().double(), dense.T)
    assert (g.adj_external(scipy_fmt="csr").toarray() == dense.numpy()).all()
    for fmt in ("coo", "csr", "csc"):
        again = dgl.graph((fmt, g.adj_tensors(fmt)), num_nodes=9)
        assert all(map(torch.equal, again.edges(), g.edges()))
    plain = dgl.graph(("csr", ([0, 1, 2], [1, 0], [])))
    assert pairs(plain) == [(0, 1), (1, 0)] and not plain.is_multigraph
    g.ndata["h"], g.edata["w"] = torch.arange(9.0)[:, None], torch.arange(24.0)
    assert g.filter_nodes(lambda n: n.data["h"][:, 0] > 6).tolist() == [7, 8]
    assert g.filter_nodes(lambda n: n.data["h"] > 6, [1, 8]).tolist() == [8]
    assert g.filter_edges(lambda e: e.data["w"] > 21).tolist() == [22, 23]
    ids = g.filter_edges(lambda e: e.src["h"] == e.dst["h"] * 0 + src[2], [5, 2])
    assert ids.tolist() == [i for i in (5, 2) if src[i] == src[2]]
    assert g.node_attr_schemes()["h"].shape == (1,)
    assert torch.equal(g.nodes[2:4].data["h"][:, 0], torch.tensor([2.0, 3.0]))
    made = g.to_networkx(["h"], ["w"])
    assert made.number_of_edges() == 24 and made.nodes[3]["h"] == 3
    assert set(market().metagraph().edges(keys=True)) >= {("user", "game", "plays")}
    assert dgl.graph(([0, 0], [1, 1])).is_multigraph


def test_the_largest_edges_of_each_graph() -> None:
    g = dgl.batch([some_graph(4, 3), some_graph(4, 5)])
    g.edata["w"] = torch.randn(8, 2)
    rows, ids = dgl.topk_edges(g, "w", 2, sortby=0)
    for part, row, at in zip(g.edata["w"].split([3, 5]), rows, ids, strict=True):
        order = part[:, 0].argsort(descending=True)[:2]
        assert torch.equal(at, order) and torch.equal(row, part[order])
