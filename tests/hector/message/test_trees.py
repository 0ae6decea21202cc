"""TreeLSTM by levels against a loop over the nodes of each tree."""

import pytest
import torch
from torch import Tensor

from hector.message import Graph, TreeLSTM, batch


def random_tree(nodes: int, generator: torch.Generator, device: str = "cpu") -> Graph:
    """Every node but the first has a parent before it, ids shuffled."""
    parent = [
        int(torch.randint(max(0, i - 4), i, (1,), generator=generator))
        for i in range(1, nodes)
    ]
    names = torch.randperm(nodes, generator=generator)
    src, dst = (
        names[torch.arange(1, nodes)],
        names[torch.tensor(parent, dtype=torch.int64)],
    )
    return Graph(src.to(device), dst.to(device), num_nodes=nodes)


def by_nodes(layer: TreeLSTM, graph: Graph, x: Tensor) -> tuple[Tensor, Tensor]:
    """Equations 2 to 8, node by node."""
    src, dst = (e.tolist() for e in graph.edges())
    h: dict[int, Tensor] = {}
    c: dict[int, Tensor] = {}
    width = layer.hidden.shape[0]

    def visit(n: int) -> None:
        if n in h:
            return
        below = [s for s, d in zip(src, dst, strict=True) if d == n]
        for b in below:
            visit(b)
        own = layer.lin(x[n])
        total = sum((h[b] for b in below), x.new_zeros(width))
        i, o, u = (own[: 3 * width] + total @ layer.hidden[:, : 3 * width]).chunk(3)
        cell = torch.sigmoid(i) * torch.tanh(u)
        for b in below:
            f = own[3 * width :] + h[b] @ layer.hidden[:, 3 * width :]
            cell = cell + torch.sigmoid(f) * c[b]
        c[n] = cell
        h[n] = torch.sigmoid(o) * torch.tanh(cell)

    for n in range(graph.num_nodes()):
        visit(n)
    order = range(graph.num_nodes())
    return torch.stack([h[n] for n in order]), torch.stack([c[n] for n in order])


@pytest.mark.parametrize("kind", ["trees", "single", "shared children"])
def test_levels_compute_what_a_loop_does(kind: str) -> None:
    made = torch.Generator().manual_seed(1)
    if kind == "shared children":
        src = torch.tensor([0, 1, 0, 2, 3, 1])
        graph = Graph(src, torch.tensor([2, 2, 3, 4, 4, 4]), num_nodes=5)
    else:
        sizes = (1,) if kind == "single" else (1, 7, 12, 3)
        graph = batch([random_tree(n, made) for n in sizes])
    torch.manual_seed(0)
    layer = TreeLSTM(4, 5).double()
    x = torch.randn(graph.num_nodes(), 4, dtype=torch.float64, requires_grad=True)
    found, wanted = layer(graph, x), by_nodes(layer, graph, x)
    weights = [torch.randn_like(t) for t in wanted]
    grads = []
    for results in (found, wanted):
        total = sum((r * w).sum() for r, w in zip(results, weights, strict=True))
        grads.append(torch.autograd.grad(total, [x, *layer.parameters()]))
    for mine, other in zip((*found, *grads[0]), (*wanted, *grads[1]), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_ring_is_refused() -> None:
    ring = Graph(torch.tensor([0, 1]), torch.tensor([1, 0]), num_nodes=2)
    with pytest.raises(ValueError, match="without cycles"):
        TreeLSTM(2, 3)(ring, torch.ones(2, 2))


def test_autocast_and_nothing() -> None:
    layer, graph = TreeLSTM(4, 3), Graph([1, 2, 3], [0, 0, 1], num_nodes=4)
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = layer(graph, x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), layer(graph, x)[0], atol=0.03, rtol=0.03)
    found.sum().backward()
    assert layer.hidden.grad is not None and layer.hidden.grad.dtype is torch.float32
    assert layer(Graph([], [], num_nodes=0), x[:0])[0].shape == (0, 3)
    with pytest.raises(ValueError, match=r"x with 4 node rows, got \[5, 4\]"):
        layer(graph, torch.ones(5, 4))
