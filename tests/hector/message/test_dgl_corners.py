"""Programs after DGL's pages and threads: parts, weights, hooks and empty graphs."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import hector.message.dgl as dgl
import hector.message.dgl.nn.pytorch as dglnn
from hector import message
from hector.message.dgl import function as fn
from tests.hector.message.dgl_graphs import KINDS, SIZES, market, near, same, some_graph

pytestmark = pytest.mark.usefixtures("double")
N = 9


def ends(g: Any, etype: Any = None) -> tuple[Tensor, Tensor]:
    src, dst = g.edges(etype=etype)
    return src, dst


@pytest.mark.parametrize("kind", ["mean", "gcn", "pool"])
def test_weights_of_edges_multiply_what_sage_reduces(kind: str) -> None:
    g = some_graph()
    (src, dst), x = ends(g), torch.randn(N, 5, requires_grad=True)
    w = torch.rand(g.num_edges(), requires_grad=True)
    conv = dglnn.SAGEConv(5, 4, kind)
    rows = F.relu(conv.fc_pool(x)) if conv.fc_pool is not None else x
    sent = rows[src] * w[:, None]
    if kind == "gcn":
        degrees = torch.bincount(dst, minlength=N)[:, None]
        wanted = conv.fc_neigh((near(src, dst, N, sent, "sum") + x) / (degrees + 1))
        wanted = wanted + conv.bias
    else:
        how = {"pool": "max"}.get(kind, kind)
        wanted = conv.fc_self(x) + conv.fc_neigh(near(src, dst, N, sent, how))
    same(conv(g, x, edge_weight=w), wanted, x, w)


def attention(conv: Any, g: Any, h: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    src, dst = ends(g)
    share = torch.zeros_like(score)
    for n in range(N):
        share[dst == n] = score[dst == n].softmax(0)
    return near(src, dst, N, h[src] * share[..., None], "sum"), share


def test_a_gat_with_a_residual_on_a_multigraph() -> None:
    g = some_graph()
    g = dgl.add_edges(g, g.edges()[0][:3], g.edges()[1][:3])
    (src, dst), x = ends(g), torch.randn(N, 5, requires_grad=True)
    conv = dglnn.GATConv(
        5, 4, 3, residual=True, activation=F.elu, allow_zero_in_degree=True
    )
    h = conv.fc(x).view(N, 3, 4)
    left, right = ((h * a).sum(-1) for a in (conv.attn_l, conv.attn_r))
    score = F.leaky_relu(left[src] + right[dst], 0.2)
    near_rows, share = attention(conv, g, h, score)
    wanted = F.elu(near_rows + conv.res_fc(x).view(N, 3, 4) + conv.bias.view(1, 3, 4))
    found, told = conv(g, x, get_attention=True)
    same(found, wanted, x)
    same(conv(g, x), wanted, x)
    torch.testing.assert_close(told.squeeze(-1), share)


@pytest.mark.parametrize("norm", ["none", "left", "right", "both"])
@pytest.mark.parametrize("outs", [2, 5])
def test_norms_between_two_types(norm: str, outs: int) -> None:
    src, dst = torch.randint(6, (15,)), torch.randint(4, (15,))
    g = dgl.heterograph({("a", "r", "b"): (src, dst)}, {"a": 7, "b": 5})
    x, w = torch.randn(7, 3, requires_grad=True), torch.rand(15)
    out, into = (
        torch.bincount(e, minlength=n).clamp(min=1)[:, None]
        for e, n in ((src, 7), (dst, 5))
    )
    conv = dglnn.GraphConv(3, outs, norm=norm, allow_zero_in_degree=True)
    rows = {"both": x / out.sqrt(), "left": x / out}.get(norm, x)
    made = near(src, dst, 5, (rows @ conv.weight)[src] * w[:, None], "sum")
    made = {"both": made / into.sqrt(), "right": made / into}.get(norm, made)
    same(conv(g, x, edge_weight=w), made + conv.bias, x)


def test_functions_of_some_edges_of_int32_ids() -> None:
    src, dst = torch.randint(N - 2, (2, 20)).int()
    g = dgl.graph((src, dst), num_nodes=N, idtype=torch.int32)
    g.ndata["h"], ids = torch.randn(N, 3), torch.tensor([2, 5, 7]).int()
    g.apply_edges(lambda e: {"both": torch.cat([e.src["h"], e.dst["h"]], 1)}, edges=ids)
    h, s, d = g.ndata["h"], src.long(), dst.long()
    wanted = torch.zeros(20, 6)
    wanted[ids.long()] = torch.cat([h[s], h[d]], 1)[ids.long()]
    torch.testing.assert_close(g.edata["both"], wanted)
    loader = dgl.dataloading.DataLoader(
        g,
        torch.arange(N).int(),
        dgl.dataloading.MultiLayerFullNeighborSampler(2),
        batch_size=4,
    )
    convs = [
        dglnn.GraphConv(a, b, norm="right", allow_zero_in_degree=True)
        for a, b in ((3, 4), (4, 2))
    ]
    whole = convs[1](g, convs[0](g, h).relu())
    for _, outputs, blocks in loader:
        rows = convs[0](blocks[0], blocks[0].srcdata["h"]).relu()
        torch.testing.assert_close(convs[1](blocks[1], rows), whole[outputs.long()])


def test_parts_with_and_without_new_ids() -> None:
    g = some_graph()
    g.ndata["h"], g.edata["w"] = torch.randn(N, 3), torch.rand(g.num_edges())
    (src, dst), nodes = ends(g), torch.tensor([5, 1, 3])
    part = dgl.node_subgraph(g, nodes)
    ids = part.edata[dgl.EID]
    inside = torch.isin(src, nodes) & torch.isin(dst, nodes)
    assert sorted(ids.tolist()) == inside.nonzero().flatten().tolist()
    assert torch.equal(part.ndata[dgl.NID], nodes)
    assert torch.equal(nodes[part.edges()[0]], src[ids])
    torch.testing.assert_close(part.ndata["h"], g.ndata["h"][nodes])
    torch.testing.assert_close(part.edata["w"], g.edata["w"][ids])
    whole = dgl.node_subgraph(g, nodes, relabel_nodes=False)
    assert whole.num_nodes() == N
    assert torch.equal(whole.edges()[1], dst[whole.edata[dgl.EID]])
    assert dgl.NID not in dgl.node_subgraph(g, nodes, store_ids=False).ndata
    chosen = torch.tensor([7, 2, 11])
    part = dgl.edge_subgraph(g, chosen)
    assert torch.equal(part.edata[dgl.EID], chosen)
    assert torch.equal(part.ndata[dgl.NID][part.edges()[1]], dst[chosen])
    part = dgl.in_subgraph(g, [1, 2])
    wanted = torch.isin(dst, torch.tensor([1, 2])).nonzero().flatten()
    assert sorted(part.edata[dgl.EID].tolist()) == wanted.tolist()
    part, place = dgl.khop_in_subgraph(g, 1, k=2)
    reached = last = torch.tensor([1])
    for _ in range(2):
        last = src[torch.isin(dst, last)]
        reached = torch.cat((reached, last))
    assert set(part.ndata[dgl.NID].tolist()) == set(reached.tolist())
    assert part.ndata[dgl.NID][place].tolist() == [1]


def test_types_without_edges_or_features() -> None:
    g = dgl.heterograph(
        {
            ("u", "f", "u"): ([0, 1], [1, 2]),
            ("u", "p", "g"): ([0], [1]),
            ("a", "d", "g"): ([], []),
        },
        num_nodes_dict={"u": 4, "g": 3, "a": 2, "alone": 5},
    )
    h = torch.randn(4, 3)
    g.ndata["h"] = {"u": h, "alone": torch.randn(5, 3), "a": torch.randn(2, 3)}
    call = (fn.copy_u("h", "m"), fn.sum("m", "o"))
    g.multi_update_all({"f": call, "p": call, "d": call}, "sum")
    torch.testing.assert_close(
        g.nodes["g"].data["o"], torch.stack([h[0] * 0, h[0], h[0] * 0])
    )
    assert "o" not in g.nodes["alone"].data and "h" not in g.nodes["g"].data
    assert set(g.ndata["h"]) == {"u", "alone", "a"}


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: dglnn.GraphConv(4, 2, allow_zero_in_degree=True),
    lambda: dglnn.SAGEConv(4, 2, "mean"),
    lambda: dglnn.SAGEConv(4, 2, "pool"),
    lambda: dglnn.GATConv(4, 2, 2, allow_zero_in_degree=True),
    lambda: dglnn.GATv2Conv(4, 2, 2, allow_zero_in_degree=True),
    lambda: dglnn.GINConv(nn.Linear(4, 2)),
    lambda: dglnn.TAGConv(4, 2),
    lambda: dglnn.APPNPConv(2, 0.1),
    lambda: message.GraphConv(4, 2),
    lambda: message.SAGEConv(4, 2),
    lambda: message.GATConv(4, 2, 2),
    lambda: message.GINConv(nn.Linear(4, 2)),
]


@pytest.mark.parametrize("nodes", [0, 3])
@pytest.mark.parametrize("make", LAYERS)
def test_layers_on_graphs_without_edges(
    make: Callable[[], nn.Module], nodes: int
) -> None:
    g = dgl.graph(([], []), num_nodes=nodes)
    x = torch.randn(nodes, 4, requires_grad=True)
    for _ in range(2):
        out = make()(g, x)
        assert len(out) == nodes and out.isfinite().all()
        out.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_batch_with_a_graph_of_no_nodes() -> None:
    sizes = (3, 0, 2)
    graphs = [dgl.graph(([], []), num_nodes=n) for n in sizes]
    graphs[0] = dgl.graph(([0, 1], [1, 2]))
    for g in graphs:
        g.ndata["h"] = torch.randn(g.num_nodes(), 3) - 5
    whole, rows = dgl.batch(graphs), [g.ndata["h"] for g in graphs]
    torch.testing.assert_close(
        dgl.sum_nodes(whole, "h"), torch.stack([r.sum(0) for r in rows])
    )
    for how in ("mean", "max"):
        found = getattr(dgl, f"{how}_nodes")(whole, "h")
        assert not found[1].any()
        reduce = {"mean": torch.mean, "max": torch.amax}[how]
        torch.testing.assert_close(found[2], reduce(rows[2], 0))
    apart = dgl.unbatch(whole)
    assert [g.num_nodes() for g in apart] == [3, 0, 2]
    torch.testing.assert_close(apart[2].ndata["h"], rows[2])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_rows_of_other_axes_are_broadcast(name: str) -> None:
    g = some_graph()
    (src, dst), op = ends(g), getattr(torch, name)
    a, b = (torch.rand(N, *s, requires_grad=True) for s in ((3, 1), (1, 4)))
    w = torch.rand(g.num_edges(), 3, 1, requires_grad=True)
    g.srcdata.update({"a": a, "b": b})
    g.edata["w"] = w
    g.apply_edges(getattr(fn, f"u_{name}_v")("a", "b", "x"))
    same(g.edata["x"], op(a[src], b[dst]), a, b)
    g.update_all(getattr(fn, f"e_{name}_u")("w", "b", "m"), fn.mean("m", "o"))
    same(g.ndata["o"], near(src, dst, N, op(w, b[src]), "mean"), w, b)


@pytest.mark.parametrize("how", ["arbitrary", "sum", "mean"])
def test_several_edges_become_one_with_their_features(how: str) -> None:
    src, dst = torch.tensor([0, 0, 1, 0, 2]), torch.tensor([1, 1, 2, 1, 0])
    g = dgl.graph((src, dst))
    g.edata["w"] = w = torch.rand(5, 2, requires_grad=True)
    made, place = dgl.to_simple(
        g, writeback_mapping=True, copy_edata=True, aggregator=how
    )
    assert made.edata["count"].tolist() == [3, 1, 1]
    groups = [w[place == i] for i in range(3)]
    wanted = [
        {"sum": r.sum(0), "mean": r.mean(0), "arbitrary": r[-1]}[how] for r in groups
    ]
    same(made.edata["w"], torch.stack(wanted), w)
    assert "w" not in dgl.to_simple(g).edata
    with pytest.raises(ValueError, match="expected aggregator"):
        dgl.to_simple(g, copy_edata=True, aggregator="max")


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_a_softmax_over_edges_of_all_types(norm_by: str) -> None:
    g, place = market(), 2 if norm_by == "dst" else 0
    scores = {
        k: torch.randn(g.num_edges(k), 2, requires_grad=True)
        for k in g.canonical_etypes
        if k != KINDS[3]
    }
    for _ in range(2):
        found = dgl.nn.functional.edge_softmax(g, scores, norm_by=norm_by)
    assert list(found) == list(scores)
    for name, size in SIZES.items():
        kinds = [k for k in scores if k[place] == name]
        if not kinds:
            continue
        rows = torch.cat([scores[k] for k in kinds])
        at = torch.cat([ends(g, k)[place // 2] for k in kinds])
        wanted = torch.zeros_like(rows)
        for n in range(size):
            wanted[at == n] = rows[at == n].softmax(0)
        given = [scores[k] for k in kinds]
        same(torch.cat([found[k] for k in kinds]), wanted, *given)
    with pytest.raises(ValueError, match=r"scores of .*14 edge rows"):
        dgl.nn.functional.edge_softmax(g, {"follows": torch.ones(2, 1)})
    with pytest.raises(ValueError, match="no eids"):
        dgl.nn.functional.edge_softmax(g, scores, torch.arange(2))


def test_typed_links_in_mini_batches_as_on_the_graph_without_them() -> None:
    pairs = torch.randint(7, (12,)), torch.randint(5, (12,))
    edges = {
        ("u", "f", "u"): tuple(torch.randint(7, (2, 15))),
        ("u", "p", "g"): pairs,
        ("s", "d", "g"): (torch.randint(3, (6,)), torch.randint(5, (6,))),
        ("g", "pb", "u"): pairs[::-1],
    }
    sizes = {"u": 7, "g": 5, "s": 3}
    g = dgl.heterograph(edges, sizes)
    x = {n: torch.randn(size, 4) for n, size in sizes.items()}
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        dgl.dataloading.MultiLayerFullNeighborSampler(2),
        exclude="reverse_types",
        reverse_etypes={"p": "pb", "pb": "p"},
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(3),
    )
    first, second = (
        dglnn.HeteroGraphConv({r: dglnn.SAGEConv(4, outs, "mean") for _, r, _ in edges})
        for outs in (4, 3)
    )

    def loop(conv: Any, rows: dict[str, Tensor], gone: Tensor) -> dict[str, Tensor]:
        out: dict[str, Any] = {}
        for (a, r, b), (src, dst) in edges.items():
            if a not in rows or b not in rows:
                continue
            kept = torch.ones(len(src), dtype=torch.bool)
            if r in ("p", "pb"):
                kept[gone] = False
            layer = conv.mods[r]
            sent = near(src[kept], dst[kept], sizes[b], rows[a][src[kept]], "mean")
            out[b] = out.get(b, 0) + layer.fc_self(rows[b]) + layer.fc_neigh(sent)
        return out

    loader = dgl.dataloading.DataLoader(
        g, {("u", "p", "g"): torch.arange(12)}, sampler, batch_size=5
    )
    seen = 0
    for inputs, positive, negative, blocks in loader:
        ids = positive.edges["p"].data[dgl.EID]
        seen += len(ids)
        assert negative.num_edges("p") == 3 * len(ids)
        h = first(blocks[0], {n: x[n][inputs[n]] for n in sizes})
        h = second(blocks[1], {n: r.relu() for n, r in h.items()})
        wanted = loop(first, x, ids)
        wanted = loop(second, {n: r.relu() for n, r in wanted.items()}, ids)
        for n, rows in h.items():
            place = positive.nodes[n].data[dgl.NID]
            torch.testing.assert_close(rows, wanted[n][place])
    assert seen == 12


def test_copies_and_pickles_of_graphs_and_blocks() -> None:
    g = market()
    g.nodes["user"].data["h"] = h = torch.randn(SIZES["user"], 2)
    src, dst = ends(g, "follows")
    wanted = near(src, dst, SIZES["user"], h[src], "sum")
    again: list[Callable[[Any], Any]] = [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        copy.copy,
        lambda x: x.to("cpu"),
        lambda x: x.clone(),
    ]
    for make in again:
        made = make(g)
        made["follows"].update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
        torch.testing.assert_close(made.nodes["user"].data["o"], wanted)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1)
    _, _, (block,) = sampler.sample(g, {"game": torch.tensor([1, 2])})
    sent = pickle.loads(pickle.dumps(block))
    assert sent.is_block and sent.num_dst_nodes("game") == 2


def test_relations_joined_by_stack_with_weights_of_one() -> None:
    g = market().edge_type_subgraph(["plays", "likes"])
    x = {n: torch.randn(SIZES[n], 4, requires_grad=True) for n in ("user", "game")}
    w = torch.rand(g.num_edges("plays"))
    conv = dglnn.HeteroGraphConv(
        {r: dglnn.GraphConv(4, 3, norm="none") for r in ("plays", "likes")},
        aggregate="stack",
    )
    found = conv(g, x, mod_kwargs={"plays": {"edge_weight": w}})["game"]
    parts = []
    for start, name, _ in g.canonical_etypes:
        (src, dst), layer = ends(g, name), conv.mods[name]
        sent = (x[start] @ layer.weight)[src]
        sent = sent * w[:, None] if name == "plays" else sent
        parts.append(near(src, dst, SIZES["game"], sent, "sum") + layer.bias)
    same(found, torch.stack(parts, 1), *x.values())


def test_transforms_that_drop_and_change() -> None:
    g = dgl.rand_graph(40, 400)
    g.ndata["h"], g.edata["w"] = torch.rand(40, 6), torch.arange(400.0)
    g.edata["src"], g.edata["dst"] = g.edges()
    made = dgl.transforms.DropEdge(0.5)(g)
    assert 120 < made.num_edges() < 280 and made.num_nodes() == 40
    assert torch.equal(made.edges()[0], made.edata["src"])
    assert torch.equal(made.edges()[1], made.edata["dst"])
    g.ndata["id"] = torch.arange(40)
    made = dgl.transforms.DropNode(0.5)(g)
    assert 5 < made.num_nodes() < 35
    assert torch.equal(made.ndata["id"][made.edges()[0]], made.edata["src"])
    made = dgl.transforms.FeatMask(0.5, node_feat_names=["h"])(g)
    gone = ~made.ndata["h"].any(0)
    torch.testing.assert_close(made.ndata["h"], g.ndata["h"].masked_fill(gone, 0.0))
    made = dgl.transforms.RowFeatNormalizer(node_feat_names=["h"])(g)
    wanted = g.ndata["h"] / g.ndata["h"].sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(made.ndata["h"], wanted)
    assert g.num_edges() == 400 and g.num_nodes() == 40
    with pytest.raises(ValueError, match="expected p of 0 to 1"):
        dgl.transforms.DropEdge(1.5)


class Shifted(nn.Linear):
    """More than a product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize("outs", [3, 6])
def test_products_of_ones_own_are_called(outs: int) -> None:
    plain = some_graph()
    (src, dst), x = ends(plain), torch.randn(N, 5)
    g = message.Graph(src, dst, num_nodes=N)
    mean = near(src, dst, N, x[src], "mean")
    sage = message.SAGEConv(5, outs)
    sage.lin_l = Shifted(5, outs)
    torch.testing.assert_close(sage(g, x), sage.lin_l(mean) + sage.lin_r(x))
    sage.lin_r = nn.Linear(5, outs)
    torch.testing.assert_close(sage(g, x), sage.lin_l(mean) + sage.lin_r(x))
    gat = message.GATConv(5, outs, 1)
    gat.lin = Shifted(5, outs, bias=False)
    h = gat.lin(x).view(N, 1, outs)
    left, right = ((h * a).sum(-1) for a in (gat.att_src, gat.att_dst))
    score = F.leaky_relu(left[src] + right[dst], 0.2)
    wanted = attention(gat, plain, h, score)[0].flatten(1) + gat.bias
    torch.testing.assert_close(gat(g, x), wanted)


def test_hooks_of_a_layer_s_products_run() -> None:
    g, x = some_graph(), torch.randn(N, 5)
    (src, dst), seen = ends(g), list[Any]()
    mean = near(src, dst, N, x[src], "mean")
    conv = dglnn.SAGEConv(5, 6, "mean")
    wanted = conv.fc_self(x) + 2 * (mean @ conv.fc_neigh.weight.t())

    def doubled(_: Any, given: Any, out: Tensor) -> Tensor:
        seen.append(given)
        return 2 * out

    conv.fc_neigh.register_forward_hook(doubled)
    torch.testing.assert_close(conv(g, x), wanted)
    both = dglnn.HeteroGraphConv({k: copy.deepcopy(conv) for k in "ab"})
    block = dgl.heterograph(
        {("n", "a", "n"): (src, dst), ("n", "b", "n"): (src, dst)}, {"n": N}
    )
    torch.testing.assert_close(both(block, {"n": x})["n"], 2 * wanted)
    assert len(seen) == 3


def test_pruned_weights_are_trained() -> None:
    """Their masks are multiplied in by a hook before each call."""
    g, x = some_graph(), torch.randn(N, 5)
    conv = dglnn.SAGEConv(5, 6, "mean")
    prune.random_unstructured(conv.fc_neigh, "weight", amount=0.5)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        out = conv(g, x)
        (src, dst), layer = ends(g), conv.fc_neigh
        weight = layer.weight_orig * layer.weight_mask
        mean = near(src, dst, N, x[src], "mean")
        torch.testing.assert_close(out, conv.fc_self(x) + mean @ weight.t())
        out.square().sum().backward()
        optimizer.step()
