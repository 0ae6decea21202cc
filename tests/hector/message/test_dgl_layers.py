"""DGL's further layers against loops over nodes and edges, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hector.message.dgl as dgl
import hector.message.dgl.nn.pytorch as dglnn
from tests.hector.message.dgl_graphs import near, same, some_graph

pytestmark = pytest.mark.usefixtures("double")
N = 9


def looped() -> tuple[Any, Tensor, Tensor, Tensor]:
    """A graph in which all nodes have an edge, its ends, and rows."""
    g = dgl.add_self_loop(some_graph(N))
    src, dst = g.edges()
    return g, src, dst, torch.randn(N, 4, requires_grad=True)


def spread(src: Tensor, dst: Tensor, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Rows over the roots of in-degrees, or with weights over the roots of sums."""
    if weight is None:
        into = torch.bincount(dst, minlength=N).clamp(min=1)[:, None] ** -0.5
        return near(src, dst, N, (x * into)[src], "sum") * into
    sums = near(src, dst, N, weight, "sum"), near(dst, src, N, weight, "sum")
    share = weight / (sums[1][src] * sums[0][dst]).sqrt()
    return near(src, dst, N, x[src] * share[:, None], "sum")


@pytest.mark.parametrize("weighed", [False, True])
def test_rows_that_are_spread_over_steps(weighed: bool) -> None:
    g, src, dst, x = looped()
    w = torch.rand(g.num_edges(), requires_grad=True) if weighed else None
    given = () if w is None else (w,)
    rows = [x]
    for _ in range(3):
        rows.append(spread(src, dst, rows[-1], w))
    sgc, tag = dglnn.SGConv(4, 3, k=3), dglnn.TAGConv(4, 3, k=3, activation=torch.tanh)
    same(sgc(g, x, *given), sgc.fc(rows[3]), x, sgc.fc.weight, *given)
    same(tag(g, x, *given), torch.tanh(tag.lin(torch.cat(rows, 1))), x, *given)
    wanted = x
    outof = torch.bincount(src, minlength=N).clamp(min=1)[:, None] ** -0.5
    into = torch.bincount(dst, minlength=N).clamp(min=1)[:, None] ** -0.5
    for _ in range(3):
        one = spread(src, dst, wanted, w)
        if w is None:
            one = near(src, dst, N, (wanted * outof)[src], "sum") * into
        wanted = 0.8 * one + 0.2 * x
    same(dglnn.APPNPConv(3, 0.2)(g, x, *given), wanted, x, *given)
    first = torch.randn(N, 4, requires_grad=True)
    for project in (True, False):
        layer = dglnn.GCN2Conv(4, 2, 0.3, 1.5, project_initial_features=project)
        beta, one = torch.log(torch.tensor(1.75)), rows[1] * 0.7
        both = one + 0.3 * first
        made = both @ layer.weight1
        if not project:
            made = one @ layer.weight1 + 0.3 * first @ layer.weight2
        wanted = (1 - beta) * both + beta * made + layer.bias
        same(layer(g, x, first, *given), wanted, x, first, layer.weight1)


def test_dropped_edges_of_appnp_send_nothing() -> None:
    g, src, dst, x = looped()
    layer = dglnn.APPNPConv(1, 0.0, edge_drop=0.5)
    torch.manual_seed(8)
    found = layer(g, x)
    torch.manual_seed(8)
    kept = F.dropout(torch.ones(g.num_edges()), 0.5)[:, None]
    outof, into = (
        torch.bincount(e, minlength=N).clamp(min=1)[:, None] ** -0.5 for e in (src, dst)
    )
    wanted = near(src, dst, N, (x * outof)[src] * kept, "sum") * into
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(layer.eval()(g, x), wanted)


def test_chebyshev_polynomials_of_a_batch() -> None:
    g = dgl.batch([some_graph(N), some_graph(5, 8)])
    src, dst = g.edges()
    x = torch.randn(14, 4, requires_grad=True)
    into = torch.bincount(dst, minlength=14).clamp(min=1)[:, None] ** -0.5
    largest = torch.tensor([1.5] * 9 + [1.2] * 5)[:, None]

    def scaled(v: Tensor) -> Tensor:
        lap = v - near(src, dst, 14, (v * into)[src], "sum") * into
        return 2 / largest * lap - v

    rows = [x, scaled(x)]
    rows += [2 * scaled(rows[1]) - x]
    rows += [2 * scaled(rows[2]) - rows[1]]
    conv = dglnn.ChebConv(4, 3, 4, activation=None)
    wanted = conv.linear(torch.cat(rows, 1))
    same(conv(g, x, [1.5, 1.2]), wanted, x, conv.linear.weight)
    largest, plain = torch.full((14, 1), 2.0), dglnn.ChebConv(4, 3, 2)
    wanted = F.relu(plain.linear(torch.cat((x, scaled(x)), 1)))
    same(plain(g, x), wanted, x)


def test_layers_that_read_features_of_edges() -> None:
    g, src, dst, x = looped()
    e = torch.randn(g.num_edges(), 4, requires_grad=True)
    gine = dglnn.GINEConv(nn.Linear(4, 3), 0.5, True)
    sums = near(src, dst, N, F.relu(x[src] + e), "sum")
    wanted = gine.apply_func((1 + gine.eps) * x + sums)
    same(gine(g, x, e), wanted, x, e, gine.eps)
    for how in ("sum", "mean", "max"):
        nnconv = dglnn.NNConv(4, 3, nn.Linear(4, 12), how, residual=True)
        parts = x[src][:, :, None] * nnconv.edge_func(e).view(-1, 4, 3)
        made = near(src, dst, N, parts, how).sum(1)
        wanted = made + nnconv.res_fc(x) + nnconv.bias
        same(nnconv(g, x, e), wanted, x, e, nnconv.edge_func.weight)
        gmm = dglnn.GMMConv(4, 3, 4, 2, how, residual=True)
        off = (e[:, None] - gmm.mu) ** 2 * gmm.inv_sigma**2
        share = torch.exp(-0.5 * off.sum(-1, keepdim=True))
        rows = near(src, dst, N, gmm.fc(x).view(N, 2, 3)[src] * share, how).sum(1)
        wanted = rows + gmm.res_fc(x) + gmm.bias
        same(gmm(g, x, e), wanted, x, e, gmm.mu, gmm.inv_sigma)
    cf = dglnn.CFConv(4, 4, 5, 3)
    message = cf.project_node(x)[src] * cf.project_edge(e)
    wanted = cf.project_out(near(src, dst, N, message, "sum"))
    same(cf(g, x, e), wanted, x, e)
    assert torch.allclose(cf.project_edge[1](torch.zeros(1)), torch.zeros(1))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_edge_convolution_takes_the_largest(batch_norm: bool) -> None:
    g, src, dst, x = looped()
    conv = dglnn.EdgeConv(4, 3, batch_norm)
    rows = conv.theta(x[dst] - x[src]) + conv.phi(x)[dst]
    if batch_norm:
        rows = F.batch_norm(rows, None, None, training=True)
    same(conv(g, x), near(src, dst, N, rows, "max"), x, conv.theta.weight)
    with pytest.raises(ValueError, match="allow_zero_in_degree"):
        conv(some_graph(N), x)


def soft(dst: Tensor, score: Tensor) -> Tensor:
    made = score.exp()
    return made / near(dst, dst, N, made, "sum")[dst]


def test_attention_with_edges_cosines_and_dot_products() -> None:
    g, src, dst, x = looped()
    e = torch.randn(g.num_edges(), 3, requires_grad=True)
    w = torch.rand(g.num_edges())
    egat = dglnn.EGATConv(4, 3, 5, 2, 2)
    made = egat.fc_ni(x)[src] + egat.fc_nj(x)[dst] + egat.fc_fij(e) + egat.bias
    edges = F.leaky_relu(made).view(-1, 2, 2)
    share = soft(dst, (edges * egat.attn).sum(-1, keepdim=True)) * w.view(-1, 1, 1)
    rows = near(src, dst, N, egat.fc_node_src(x).view(N, 2, 5)[src] * share, "sum")
    found = egat(g, x, e, edge_weight=w, get_attention=True)
    same(found[0], rows, x, e, egat.attn)
    same(found[1], edges, x, e)
    torch.testing.assert_close(found[2], share)
    agnn = dglnn.AGNNConv(0.7)
    unit = x / x.norm(dim=1, keepdim=True)
    share = soft(dst, agnn.beta * (unit[src] * unit[dst]).sum(1, keepdim=True))
    same(agnn(g, x), near(src, dst, N, share * x[src], "sum"), x, agnn.beta)
    dot = dglnn.DotGatConv(4, 3, 2)
    h = dot.fc(x).view(N, 2, 3)
    share = soft(dst, (h[src] * h[dst]).sum(-1, keepdim=True) / 3**0.5)
    found = dot(g, x, get_attention=True)
    same(found[0], near(src, dst, N, share * h[src], "sum"), x, dot.fc.weight)
    torch.testing.assert_close(found[1], share)


def test_gates_of_edges_and_of_types() -> None:
    g, src, dst, x = looped()
    e = torch.randn(g.num_edges(), 4, requires_grad=True)
    gcn = dglnn.GatedGCNConv(4, 4, 4)
    made = gcn.D(x)[src] + gcn.E(x)[dst] + gcn.C(e)
    gate = torch.sigmoid(made)
    rows = near(src, dst, N, gate * gcn.B(x)[src], "sum")
    rows = gcn.A(x) + rows / (near(src, dst, N, gate, "sum") + 1e-6)
    found = gcn(g, x, e)
    for mine, wanted, before in zip(found, (rows, made), (x, e), strict=True):
        wanted = before + F.relu(F.batch_norm(wanted, None, None, training=True))
        same(mine, wanted, x, e, gcn.D.weight)
    kinds = torch.randint(3, (g.num_edges(),))
    gated = dglnn.GatedGraphConv(4, 6, 2, 3)
    h = F.pad(x, (0, 2))
    for _ in range(2):
        sent = [gated.linears[k](h[s]) for k, s in zip(kinds, src, strict=True)]
        h = gated.gru(near(src, dst, N, torch.stack(sent), "sum"), h)
    same(gated(g, x, kinds), h, x, gated.linears[1].weight)
    one = dglnn.GatedGraphConv(4, 4, 1, 1)
    wanted = one.gru(near(src, dst, N, one.linears[0](x)[src], "sum"), x)
    same(one(g, x), wanted, x)
    with pytest.raises(ValueError, match="etypes"):
        gated(g, x)


def test_equivariant_coordinates_turn_with_the_points() -> None:
    g, src, dst, x = looped()
    g, at = dgl.remove_self_loop(g), torch.randn(N, 3, requires_grad=True)
    src, dst = g.edges()
    egnn = dglnn.EGNNConv(4, 5, 3, 2)
    e = torch.randn(g.num_edges(), 2)
    off = at[src] - at[dst]
    far = off.square().sum(1, keepdim=True)
    sent = egnn.edge_mlp(torch.cat((x[src], x[dst], far, e), 1))
    moved = near(src, dst, N, egnn.coord_mlp(sent) * off / far.sqrt(), "mean")
    rows = egnn.node_mlp(torch.cat((x, near(src, dst, N, sent, "sum")), 1))
    found = egnn(g, x, at, e)
    same(found[0], rows, x, at)
    same(found[1], at + moved, x, at)
    turn = torch.linalg.qr(torch.randn(3, 3)).Q
    turned = egnn(g, x, at @ turn, e)
    torch.testing.assert_close(turned[0], found[0])
    torch.testing.assert_close(turned[1], found[1] @ turn)


def test_hgt_on_one_graph_of_all_types() -> None:
    g, src, dst, x = looped()
    kinds, types = torch.randint(2, (N,)), torch.randint(3, (g.num_edges(),))
    layer = dglnn.HGTConv(4, 3, 2, 2, 3, dropout=0.0, use_norm=True)

    def typed(linear: Any, rows: Tensor, of: Tensor) -> Tensor:
        weight = linear.get_weight() if hasattr(linear, "get_weight") else linear.W
        return torch.stack([r @ weight[k] for r, k in zip(rows, of, strict=True)])

    key, query, value = (
        typed(m, x, kinds).view(N, 2, 3)
        for m in (layer.linear_k, layer.linear_q, layer.linear_v)
    )
    scores, sent = [], []
    for i in range(2):
        one = typed(layer.relation_att[i], key[src, i], types)
        score = (one * query[dst, i]).sum(1) / 3**0.5
        scores.append(score * layer.relation_pri[i][types])
        sent.append(typed(layer.relation_msg[i], value[src, i], types))
    share = soft(dst, torch.stack(scores, 1))[..., None]
    h = near(src, dst, N, torch.stack(sent, 1) * share, "sum").flatten(1)
    part = torch.sigmoid(layer.skip[kinds])[:, None]
    h = typed(layer.linear_a, h, kinds) * part + x @ layer.residual_w * (1 - part)
    wanted = F.layer_norm(h, (6,))
    same(layer(g, x, kinds, types), wanted, x, layer.skip, layer.relation_pri[0])


def test_what_is_read_out_of_each_graph() -> None:
    g = dgl.batch([some_graph(N), some_graph(4, 6)])
    x = torch.randn(13, 3, requires_grad=True)
    parts = x.split([9, 4])
    weigh = dglnn.WeightAndSum(3)
    wanted = torch.stack([(p * weigh.atom_weighting(p)).sum(0) for p in parts])
    same(weigh(g, x), wanted, x)
    rows = []
    for p in parts:
        ordered = p.sort(1).values
        ordered = ordered[ordered[:, -1].argsort(descending=True)][:5]
        rows.append(F.pad(ordered, (0, 0, 0, 5 - len(ordered))).flatten())
    same(dglnn.SortPooling(5)(g, x), torch.stack(rows), x)
    read = dglnn.Set2Set(3, 4, 2)
    found = []
    for p in parts:
        star, state = torch.zeros(1, 6), None
        for _ in range(4):
            q, state = read.lstm(star[None], state)
            share = (p * q[0]).sum(1).softmax(0)[:, None]
            star = torch.cat((q[0], (share * p).sum(0, keepdim=True)), 1)
        found.append(star)
    same(read(g, x), torch.cat(found), x, read.lstm.weight_ih_l0)


def test_modules_beside_layers() -> None:
    g, src, dst, x = looped()
    both = [x, torch.randn(N, 4)]
    assert torch.equal(dglnn.JumpingKnowledge("cat")(both), torch.cat(both, 1))
    assert torch.equal(dglnn.JumpingKnowledge("max")(both), torch.maximum(*both))
    jump = dglnn.JumpingKnowledge("lstm", 4, 2)
    share = jump.att(jump.lstm(torch.stack(both, 1))[0])[..., 0].softmax(1)
    wanted = share[:, :1] * both[0] + share[:, 1:] * both[1]
    same(jump(both), wanted, x, jump.att.weight)
    layers = dglnn.Sequential(dglnn.SGConv(4, 3), dglnn.SGConv(3, 2))
    wanted = layers[1](g, layers[0](g, x))
    assert torch.equal(layers(g, x), wanted)
    assert torch.equal(layers([g, g], x), wanted)
    linear = dglnn.HeteroLinear({"a": 4, "b": 2}, 3)
    assert torch.equal(linear({"a": x})["a"], linear.linears["a"](x))
    table = dglnn.HeteroEmbedding({"a": 5, "b": 2}, 3)
    assert torch.equal(table({"b": torch.tensor([1])})["b"][0], table.weight["b"][1])
    u, v = x[src], x[dst]
    made = {
        "dot": (u * v).sum(1, keepdim=True),
        "cos": F.cosine_similarity(u, v)[:, None],
        "ele": u * v,
        "cat": torch.cat((u, v), 1),
    }
    for op, rows in made.items():
        torch.testing.assert_close(dglnn.EdgePredictor(op)(u, v), rows)
        scored = dglnn.EdgePredictor(op, 4, 2)
        torch.testing.assert_close(scored(u, v), scored.linear(rows))


def test_labels_are_spread() -> None:
    g, src, dst, _ = looped()
    labels, mask = torch.randint(3, (N,)), torch.arange(N) < 4
    for kind in ("sym", "row"):
        spreading = dglnn.LabelPropagation(3, 0.7, kind, reset=True)
        y = F.one_hot(labels).float() * mask[:, None]
        start, first = y, 0.3 * y
        into, outof = (
            torch.bincount(e, minlength=N).float()[:, None] for e in (dst, src)
        )
        for _ in range(3):
            rows = y * outof**-0.5 if kind == "sym" else y
            sums = near(src, dst, N, rows[src], "sum")
            y = first + 0.7 * sums * into ** (-0.5 if kind == "sym" else -1)
            y = torch.where(mask[:, None], start, y.clamp(0, 1))
        torch.testing.assert_close(spreading(g, labels, mask), y)


def test_relations_have_layers_by_whole_types_and_none_is_forgotten() -> None:
    kinds = [("a", "r", "b"), ("b", "r", "b"), ("b", "s", "a")]
    ends = [(torch.randint(4, (6,)), torch.randint(4, (6,))) for _ in kinds[:2]]
    none = torch.empty(0, dtype=torch.int64)
    edges = dict(zip(kinds, [*ends, (none, none)], strict=True))
    g = dgl.heterograph(edges, {"a": 4, "b": 4})
    x = {n: torch.randn(4, 3) for n in "ab"}
    mods = {k: dglnn.SAGEConv(3, 2, "mean") for k in kinds}
    found = dglnn.HeteroGraphConv(mods)(g, x)
    parts = [mods[k](g[k], (x[k[0]], x[k[2]])) for k in kinds]
    torch.testing.assert_close(found["b"], parts[0] + parts[1])
    # No edge leads there; a node's own row does.
    torch.testing.assert_close(found["a"], mods[kinds[2]].fc_self(x["a"]))
    with pytest.raises(ValueError, match=r"expected a layer for .*'s'"):
        dglnn.HeteroGraphConv({"r": mods[kinds[0]]})(g, x)


def test_norms_of_weights_have_eps_in_their_sums() -> None:
    g, src, dst, _ = looped()
    w = torch.rand(g.num_edges())
    into, out = (near(e, e, N, w, "sum") + 0.5 for e in (dst, src))
    both = dglnn.EdgeWeightNorm("both", eps=0.5)(g, w)
    torch.testing.assert_close(both, w / (out[src] * into[dst]).sqrt())
    right = dglnn.EdgeWeightNorm("right", eps=0.5)(g, -w)
    torch.testing.assert_close(right, -w / (0.5 - near(dst, dst, N, w, "sum"))[dst])
    with pytest.raises(ValueError, match="positive weights"):
        dglnn.EdgeWeightNorm("both")(g, -w)


def test_a_gat_of_one_width_has_one_matrix_and_gin_takes_weights() -> None:
    g, src, dst, x = looped()
    gat = dglnn.GATConv(4, 3, 2)
    assert {"fc.weight", "attn_l", "attn_r", "bias"} == set(gat.state_dict())
    assert {"fc_src.weight", "fc_dst.weight"} < set(
        dglnn.GATConv((4, 4), 3, 2).state_dict()
    )
    w = torch.rand(g.num_edges(), requires_grad=True)
    gin = dglnn.GINConv(None, "mean", 0.5)
    wanted = 1.5 * x + near(src, dst, N, x[src] * w[:, None], "mean")
    same(gin(g, x, edge_weight=w), wanted, x, w)
