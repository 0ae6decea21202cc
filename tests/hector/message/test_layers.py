"""Layers made of messages against PyG's, and batches against single graphs."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from hector.message import (
    GATConv,
    GatedGCNConv,
    GINConv,
    GMMConv,
    Graph,
    GraphConv,
    SAGEConv,
    batch,
    broadcast_nodes,
    readout_edges,
    readout_nodes,
    softmax_nodes,
    unbatch,
)
from hector.message import functions as fn
from hector.message.traced import Trace

N, E = 30, 120


@pytest.fixture(autouse=True)
def double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def graph() -> Graph:
    src, dst = torch.randint(N, (2, E))
    off = torch.where(dst == src, (dst + 1) % N, dst)
    return Graph(src, off, num_nodes=N)


def same_step(mine: nn.Module, out: Tensor, theirs: nn.Module, wanted: Tensor) -> None:
    """Equal results and equal gradients of all parameters."""
    torch.testing.assert_close(out, wanted)
    weight = torch.randn_like(out)
    for value in (out, wanted):
        (value * weight).sum().backward()
    other = dict(theirs.named_parameters())
    for name, p in mine.named_parameters():
        torch.testing.assert_close(p.grad, other[name].grad)


def test_gcn(graph: Graph) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    theirs, mine = pyg.GCNConv(8, 5), GraphConv(8, 5)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(N, 8)
    same_step(mine, mine(graph, x), theirs, theirs(x, torch.stack(graph.edges())))
    assert dict(graph.counts) == {"compiled": 1}


@pytest.mark.parametrize("sizes", [(8, 5), (4, 9)])
@pytest.mark.parametrize(
    "aggr", ["mean", "sum", "max", "min", "std", "softmax", "median", "mul"]
)
def test_sage(graph: Graph, aggr: str, sizes: tuple[int, int]) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    ei = torch.stack(graph.edges())
    ei = ei[:, ei[1].argsort(stable=True)]
    graph = Graph(ei[0], ei[1], num_nodes=N)
    theirs, mine = pyg.SAGEConv(*sizes, aggr=aggr), SAGEConv(*sizes, reducer=aggr)
    state = theirs.state_dict()
    state = {k: v for k, v in state.items() if not k.startswith("aggr_module")}
    mine.load_state_dict(state)
    x = torch.randn(N, sizes[0])
    out, wanted = mine(graph, x), theirs(x, ei)
    if aggr == "std":
        # PyG's is no root of a mean of squares below 1e-5, and gives a node with one
        # neighbour no spread.
        close = (out - wanted).abs() < 1e-3
        assert close.all()
        return
    torch.testing.assert_close(out, wanted)
    weight = torch.randn_like(out)
    grads = [
        torch.autograd.grad((v * weight).sum(), list(m.lin_l.parameters()))
        for v, m in ((out, mine), (wanted, theirs))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_gin(graph: Graph) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    theirs, mine = (
        pyg.GINConv(nn.Linear(8, 5), eps=0.3, train_eps=True),
        GINConv(nn.Linear(8, 5)),
    )
    state = {k.replace("nn.", "net."): v for k, v in theirs.state_dict().items()}
    mine.load_state_dict(
        {k: v.reshape(mine.state_dict()[k].shape) for k, v in state.items()}
    )
    x = torch.randn(N, 8)
    out, wanted = mine(graph, x), theirs(x, torch.stack(graph.edges()))
    torch.testing.assert_close(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(mine.eps.grad, theirs.eps.grad.reshape(()))
    torch.testing.assert_close(mine.net.weight.grad, theirs.nn.weight.grad)


def test_gat(graph: Graph) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    theirs = pyg.GATConv(8, 5, heads=3, add_self_loops=False)
    mine = GATConv(8, 5, 3)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(N, 8)
    same_step(mine, mine(graph, x), theirs, theirs(x, torch.stack(graph.edges())))
    assert dict(graph.counts) == {"compiled": 1}


def test_gmm(graph: Graph) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    theirs = pyg.GMMConv(8, 5, dim=3, kernel_size=4, aggr="sum")
    mine = GMMConv(8, 5, 3, 4)
    with torch.no_grad():
        mine.lin.weight.copy_(theirs.g.t())
        mine.mu.copy_(theirs.mu)
        mine.inv_sigma.copy_(1 / (1e-15 + theirs.sigma.square()).sqrt())
    x, pseudo = torch.randn(N, 8), torch.rand(E, 3)
    out = mine(graph, x, pseudo)
    wanted = theirs(x, torch.stack(graph.edges()), pseudo) - theirs.root(x)
    torch.testing.assert_close(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(mine.lin.weight.grad, theirs.g.grad.t())
    torch.testing.assert_close(mine.mu.grad, theirs.mu.grad)


def test_gated_gcn(graph: Graph) -> None:
    """Against the formula on gathered rows."""
    layer = GatedGCNConv(6)
    x, e = torch.randn(N, 6), torch.randn(E, 6)
    src, dst = graph.edges()
    out, edges = layer(graph, x, e)
    follows = layer.src(x)[src] + layer.dst(x)[dst] + layer.edge(e)
    gate = torch.sigmoid(follows)
    zero = torch.zeros(N, 6)
    top = zero.index_add(0, dst, gate * layer.near(x)[src])
    wanted = layer.own(x) + top / (zero.index_add(0, dst, gate) + layer.eps)
    torch.testing.assert_close(edges, follows)
    torch.testing.assert_close(out, wanted)
    parameters = list(layer.parameters())
    grads = [
        torch.autograd.grad(a.sum() + b.square().sum(), parameters, retain_graph=True)
        for a, b in ((out, edges), (wanted, follows))
    ]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("make", [GatedGCNConv, GMMConv, GATConv])
def test_layers_are_traced_once(graph: Graph, make: Any) -> None:
    """Functions that are pure: later calls, also of other layers, trace nothing."""
    from hector.message.programs import Programs

    graph.programs = Programs()
    edges = {GatedGCNConv: (torch.randn(E, 6),), GMMConv: (torch.rand(E, 2),)}
    sizes = {GatedGCNConv: (6,), GMMConv: (6, 5, 2, 3), GATConv: (6, 5, 2)}
    traced: list[Any] = []

    def trace(*args: Any) -> Trace:
        traced.append(args)
        return Trace(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hector.message.relation.Trace", trace)
        for _ in range(2):
            before = len(traced)
            make(*sizes[make])(graph, torch.randn(N, 6), *edges.get(make, ()))
    assert before == len(traced) > 0 and set(graph.counts) == {"compiled"}


def small_graphs() -> list[Graph]:
    found = []
    for nodes, edges in ((4, 9), (1, 0), (7, 20), (3, 2)):
        ends = torch.randint(nodes, (2, edges))
        g = Graph(ends[0], ends[1], num_nodes=nodes)
        g.ndata["h"], g.edata["w"] = torch.randn(nodes, 5), torch.randn(edges, 5)
        found.append(g)
    return found


def test_a_batch_computes_what_its_graphs_do() -> None:
    graphs = small_graphs()
    joined = batch([batch(graphs[:2]), *graphs[2:]])
    assert joined.batch_num_nodes().tolist() == [4, 1, 7, 3]
    for g in (joined, *graphs):
        g.update_all(fn.u_mul_e("h", "w", "m"), fn.max("m", "out"))
    singles = torch.cat([g.ndata["out"] for g in graphs])
    assert torch.equal(joined.ndata["out"], singles)
    for part, g in zip(unbatch(joined), graphs, strict=True):
        assert all(map(torch.equal, part.edges(), g.edges()))
        assert torch.equal(part.ndata["out"], g.ndata["out"])
        assert torch.equal(part.edata["w"], g.edata["w"])
    for how in ("sum", "mean", "max", "min"):
        rows = [
            getattr(torch, {"max": "amax", "min": "amin"}.get(how, how)) for _ in "x"
        ]
        wanted = torch.stack([rows[0](g.ndata["h"], 0) for g in graphs])
        torch.testing.assert_close(readout_nodes(joined, "h", op=how), wanted)
    empty = readout_edges(joined, "w", op="max")[1]
    assert torch.equal(empty, torch.zeros(5))
    soft = torch.cat([torch.softmax(g.ndata["h"], 0) for g in graphs])
    torch.testing.assert_close(softmax_nodes(joined, "h"), soft)
    rows = torch.randn(4, 2)
    wanted = torch.cat([rows[i].expand(g.num_nodes(), 2) for i, g in enumerate(graphs)])
    assert torch.equal(broadcast_nodes(joined, rows), wanted)
    with pytest.raises(ValueError, match="expected a reducer of"):
        readout_nodes(joined, "h", op="std")
    with pytest.raises(ValueError, match="at least one graph"):
        batch([])


def test_readouts_have_gradients() -> None:
    joined = batch(small_graphs())
    for how in ("sum", "mean", "max"):
        joined.ndata["h"] = h = joined.ndata["h"].detach().requires_grad_()

        def readout(x: Tensor, how: str = how) -> Tensor:
            joined.ndata["h"] = x
            return readout_nodes(joined, "h", op=how)

        assert torch.autograd.gradcheck(readout, h)


class _Counting(nn.Module):
    """A parametrization that counts its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * 2


@pytest.mark.parametrize("kind", [torch.float64, torch.int64])
@pytest.mark.parametrize("name", ["sage", "gated", "gcn", "gat", "gmm"])
def test_a_parametrization_is_evaluated_once_a_call(
    graph: Graph, name: str, kind: torch.dtype
) -> None:
    x = torch.randint(3, (N, 4)).to(kind)
    layer, read, more = {
        "sage": (SAGEConv(4, 4), ["lin_l", "lin_r"], []),
        "gated": (GatedGCNConv(4), ["own", "near", "src", "dst", "edge"], [x[:1]]),
        "gcn": (GraphConv(4, 4), ["lin"], []),
        "gat": (GATConv(4, 4), ["lin"], []),
        "gmm": (GMMConv(4, 4, 2, 3), ["lin"], [x[:1, :2]]),
    }[name]
    more = [rows.expand(E, -1) for rows in more]
    counting = [_Counting() for _ in read]
    for lin, each in zip(read, counting, strict=True):
        parametrize.register_parametrization(getattr(layer, lin), "weight", each)
        each.calls = 0
    layer(graph, x, *more)
    assert [each.calls for each in counting] == [1] * len(read)


@pytest.mark.parametrize("reducer", ["mean", "max"])
def test_spectral_norm_in_training(graph: Graph, reducer: str) -> None:
    """Each evaluation of it in training is a step of a power iteration."""
    layer = SAGEConv(4, 3, reducer)
    parametrizations.spectral_norm(layer.lin_l)
    loop, optimizers = copy.deepcopy(layer), list[Any]()
    for each in (layer, loop):
        optimizers.append(torch.optim.SGD(each.parameters(), lr=0.1))
    src, dst = graph.edges()
    for _ in range(3):
        x, near = torch.randn(N, 4), torch.zeros(N, 4)
        for n in range(N):
            if (dst == n).any():
                rows = x[src[dst == n]]
                near[n] = rows.mean(0) if reducer == "mean" else rows.amax(0)
        wanted, found = loop.lin_l(near) + loop.lin_r(x), layer(graph, x)
        torch.testing.assert_close(found, wanted)
        for out, optimizer in zip((found, wanted), optimizers, strict=True):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
    states = layer.state_dict().values(), loop.state_dict().values()
    for p, q in zip(*states, strict=True):
        torch.testing.assert_close(p, q)
