"""Edge masks and explainers, against PyG's layers under the same masks."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hector.message import GATConv, GINConv, Graph, GraphConv, SAGEConv
from hector.message import functions as fn
from hector.message import nn as dglnn

N, E = 8, 24
torch.manual_seed(0)
SRC, DST = torch.randint(N, (2, E))
SRC = torch.where(SRC == DST, (SRC + 1) % N, SRC)  # loops are PyG's own affair
EDGES = torch.stack((SRC, DST))


def pairs() -> dict[str, tuple[nn.Module, Any]]:
    """Of hector and PyG."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyG's own import
        pyg = pytest.importorskip("torch_geometric.nn")
    return {
        "gcn": (GraphConv(5, 3), pyg.GCNConv(5, 3)),
        "sage": (SAGEConv(5, 3), pyg.SAGEConv(5, 3)),
        "max": (SAGEConv(5, 3, "max"), pyg.SAGEConv(5, 3, aggr="max")),
        "median": (SAGEConv(5, 3, "median"), pyg.SAGEConv(5, 3, aggr="median")),
        "gin": (
            GINConv(nn.Identity()),
            pyg.GINConv(nn.Identity(), train_eps=True),
        ),
        "gat": (GATConv(5, 3, 2), pyg.GATConv(5, 3, 2, add_self_loops=False)),
    }


@pytest.mark.parametrize("name", ["gcn", "sage", "max", "median", "gin", "gat"])
def test_masks_are_those_of_pyg(name: str) -> None:
    ours, theirs = pairs()[name]
    from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

    ours.double(), theirs.double()
    state = dict(ours.named_parameters())
    for key, p in theirs.named_parameters():
        p.data.copy_(state[key].data.view_as(p))
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=gen, dtype=torch.float64)
    mask = torch.randn(E, generator=gen, dtype=torch.float64).requires_grad_()
    g = Graph(SRC, DST, num_nodes=N)
    with g.masked(mask.sigmoid()):
        found = ours(g, x)
    assert not g.edata
    set_masks(theirs, mask, EDGES, apply_sigmoid=True)
    wanted = theirs(x, EDGES)
    torch.testing.assert_close(found, wanted)
    slope = torch.randn(found.shape, generator=gen, dtype=torch.float64)
    (a,) = torch.autograd.grad((found * slope).sum(), mask)
    (b,) = torch.autograd.grad((wanted * slope).sum(), mask)
    torch.testing.assert_close(a, b)
    clear_masks(theirs)
    torch.testing.assert_close(ours(g, x), theirs(x, EDGES))


MESSAGES: list[Callable[..., Any]] = [
    fn.u_mul_e("h", "w", "m"),
    fn.u_dot_v("h", "h", "m"),
    lambda e: {"m": e.src["h"].clamp(min=0) + e.dst["h"]},
    lambda e: {"m": torch.tanh(e.src["h"])},
]


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("how", ["sum", "max", "mul"])
def test_masked_calls(message: Any, how: str) -> None:
    g = Graph(SRC, DST, num_nodes=N)
    g.ndata["h"] = torch.randn(N, 3, dtype=torch.float64)
    g.edata["w"] = torch.randn(E, 1, dtype=torch.float64)
    mask = torch.rand(E, dtype=torch.float64)
    reduce = getattr(fn, how)
    with g.masked(mask):
        g.update_all(message, reduce("m", "found"))
        g.pull([0, 3], message, reduce("m", "part"))
    g.apply_edges(lambda e: message(e)) if callable(message) else g.apply_edges(message)
    g.edata["m"] = g.edata["m"] * mask[:, None]
    g.update_all(fn.copy_e("m", "m"), reduce("m", "wanted"))
    torch.testing.assert_close(g.ndata["found"], g.ndata["wanted"])
    torch.testing.assert_close(g.ndata["part"][[0, 3]], g.ndata["wanted"][[0, 3]])
    with pytest.raises(ValueError, match="a mask of shape"), g.masked(mask[1:]):
        pass


def test_an_explainer_finds_the_edges_that_matter() -> None:
    """GNNExplainer's loss: keep the prediction of a node, with few edges."""
    # Node 0 is of class 1 for the row of node 1 alone; others say nothing.
    src, dst = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 0, 0, 0, 1, 2])
    g = Graph(src, dst, num_nodes=7)
    x = torch.zeros(7, 2)
    x[1, 1], x[2:, 0] = 4.0, 0.1
    layer = dglnn.GraphConv(2, 2, norm="none", allow_zero_in_degree=True)
    layer.weight.data = torch.eye(2)  # type: ignore[union-attr]
    mask = torch.zeros(6, requires_grad=True)
    step = torch.optim.Adam([mask], lr=0.1)
    for _ in range(100):
        with g.masked(mask.sigmoid()):
            score: Tensor = layer(g, x)[0]
        loss = -score.log_softmax(0)[1] + 0.1 * mask.sigmoid().sum()
        step.zero_grad()
        loss.backward()
        step.step()
    kept = mask.detach().sigmoid()
    assert int(kept.argmax()) == 0 and bool((kept[1:] < 0.5 * kept[0]).all())
