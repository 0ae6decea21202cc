"""Layers that find their program by the shapes of rows, against calls that do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hector import message
from hector.message import direct
from hector.message import functions as fn

N, E, WIDTH = 9, 25, 4

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: message.GraphConv(WIDTH, WIDTH),
    "sage": lambda: message.SAGEConv(WIDTH, WIDTH, "max"),
    "gin": lambda: message.GINConv(nn.Linear(WIDTH, 3), 0.5),
    "gat": lambda: message.GATConv(WIDTH, 3, 2),
}


@pytest.fixture(autouse=True)
def programs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums on a CPU need no program; here they have one."""
    from hector.message import layers, relation, sums

    for module in (layers, sums, direct):
        monkeypatch.setattr(module, "sum_rows", lambda *_: None)
    monkeypatch.setattr(relation, "plain_sum", lambda *_: None)


def graph_of(seed: int, nodes: int = N) -> message.Graph:
    made = torch.Generator().manual_seed(seed)
    ends = torch.randint(nodes, (2, E), generator=made)
    return message.Graph(ends[0], ends[1], num_nodes=nodes)


def fresh(g: message.Graph) -> message.Graph:
    return message.Graph(*(e.clone() for e in g.edges()), num_nodes=g.num_nodes())


def results(layer: nn.Module, g: message.Graph, x: Tensor) -> list[Tensor]:
    out = layer(g, x)
    leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
    grads = torch.autograd.grad((out * out.detach().cos()).sum(), leaves)
    return [out.detach(), *grads]


def agree(layer: nn.Module, g: message.Graph, x: Tensor) -> None:
    """A call on a graph that knows such calls is as one on a new graph."""
    found = results(layer, g, x)
    wanted = results(layer, fresh(g), x.detach().requires_grad_(x.requires_grad))
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("kind", LAYERS)
def test_what_changes_between_calls(kind: str) -> None:
    torch.manual_seed(0)
    src, dst = torch.randint(N, (2, E))
    g, layer = message.Graph(src, dst, num_nodes=N), LAYERS[kind]()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layer.to(dtype)
        for trains in (True, True, False):
            x = torch.randn(N, WIDTH).to(dtype).requires_grad_(trains)
            agree(layer, g, x)
    assert g.now().ready
    layer.double()
    x = torch.randn(N, WIDTH, dtype=torch.float64, requires_grad=True)
    agree(layer, g, x)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(0.5)
            p.requires_grad_(False)
        x += 1
    agree(layer, g, x)
    dst.copy_((dst + 1) % N)
    agree(layer, g, x)
    src.numpy()[0] = 3
    agree(layer, g, x)
    agree(
        layer, g, x.detach().t().contiguous().t().repeat(1, 2)[:, ::2].requires_grad_()
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_that_is_trained_after_it_was_frozen(kind: str) -> None:
    torch.manual_seed(0)
    g, layer = graph_of(5), LAYERS[kind]().double().requires_grad_(False)
    x = torch.randn(N, WIDTH, dtype=torch.float64)
    frozen = layer(g, x)
    assert not frozen.requires_grad
    agree(layer.requires_grad_(), g, x)
    agree(layer, g, x.requires_grad_())


@pytest.mark.parametrize("kind", LAYERS)
def test_masks_and_modes_after_a_known_call(kind: str) -> None:
    torch.manual_seed(0)
    g, layer = graph_of(1), LAYERS[kind]().double()
    x = torch.randn(N, WIDTH, dtype=torch.float64)
    plain = layer(g, x).detach()
    mask = torch.rand(E, dtype=torch.float64, requires_grad=True)
    with g.masked(mask):
        masked = layer(g, x)
        (grad,) = torch.autograd.grad(masked.sum(), mask)
    other = fresh(g)
    with other.masked(mask):
        assert torch.equal(layer(other, x), masked)
    assert bool(grad.any()) and not torch.equal(plain, masked)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(layer(g, x), plain)
    assert list(g.ndata) == [] and list(g.edata) == []


def test_rows_of_another_number_are_refused_after_a_known_call() -> None:
    g, layer = graph_of(2), message.GATConv(WIDTH, 3)
    layer(g, torch.randn(N, WIDTH))
    with pytest.raises(ValueError, match=f"with {N} node rows"):
        layer(g, torch.randn(N + 1, WIDTH))


def test_second_derivatives_of_a_known_call() -> None:
    torch.manual_seed(0)
    g, layer = graph_of(3), message.GATConv(WIDTH, 3, 2).double()
    x = torch.randn(N, WIDTH, dtype=torch.float64, requires_grad=True)
    layer(g, x)

    def call(rows: Tensor) -> Any:
        return layer(g, rows).tanh()

    assert torch.autograd.gradgradcheck(call, (x,))
    rows = x.detach()
    found = torch.func.grad(lambda r: call(r).sum())(rows)
    (wanted,) = torch.autograd.grad(call(x).sum(), x)
    torch.testing.assert_close(found, wanted)


def test_no_more_calls_are_kept_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hector.message.edges.MAX_READY", 3)
    g = graph_of(4)
    for width in range(1, 9):
        rows = torch.randn(N, width)
        found = direct.neighbours(g, rows, fn.max)
        assert torch.equal(found, direct.neighbours(fresh(g), rows, fn.max))
        assert len(g.now().ready) <= 3


def test_two_kinds_of_rows() -> None:
    """Sources fewer than destinations, and more of them."""
    torch.manual_seed(0)
    score = direct.Passing(
        lambda: (fn.u_mul_v("a", "b", "m"), fn.sum("m", "out"), None)
    )
    for sizes in ((3, 7), (7, 3)):
        src, dst = (torch.randint(n, (E,)) for n in sizes)
        g = message.HeteroGraph(
            {("u", "to", "v"): (src, dst)}, dict(zip("uv", sizes, strict=True))
        )
        for _ in range(2):
            a, b = (torch.randn(n, WIDTH, dtype=torch.float64) for n in sizes)
            found = score(g, {"a": a}, {"b": b})
            want = torch.zeros_like(b).index_add(0, dst, a[src] * b[dst])
            torch.testing.assert_close(found, want)


@pytest.mark.parametrize("order", ["one first", "two first"])
def test_rows_of_two_names_that_are_one_tensor(order: str) -> None:
    """Which of the given tensors are one object may change between calls."""
    torch.manual_seed(0)
    score = direct.Passing(
        lambda: (fn.u_mul_v("a", "b", "m"), fn.sum("m", "out"), None)
    )
    g, (src, dst) = graph_of(3), graph_of(3).edges()
    x, y = torch.randn(2, N, WIDTH, dtype=torch.float64).unbind()
    pairs = [(x, x), (x, y), (y, x), (y, y)]
    for a, b in pairs if order == "one first" else [*pairs[1:], pairs[0]]:
        want = torch.zeros_like(x).index_add(0, dst, a[src] * b[dst])
        torch.testing.assert_close(score(g, {"a": a}, {"b": b}), want)


@fn.pure
def _shifted(n: Any, first: Tensor, second: Tensor) -> dict[str, Tensor]:
    return {"out": n.data["sum"] * first + second}


@pytest.mark.parametrize("order", ["one first", "two first"])
def test_tensors_of_functions_that_are_one(order: str) -> None:
    torch.manual_seed(0)
    score = direct.Passing(
        lambda a, b: (fn.copy_u("h", "m"), fn.sum("m", "sum"), _shifted(a, b))
    )
    g, (src, dst) = graph_of(4), graph_of(4).edges()
    x = torch.randn(N, WIDTH, dtype=torch.float64)
    v, w = torch.randn(2, WIDTH, dtype=torch.float64).unbind()
    pairs = [(v, v), (v, w), (w, v), (w, w)]
    near = torch.zeros_like(x).index_add(0, dst, x[src])
    for a, b in pairs if order == "one first" else [*pairs[1:], pairs[0]]:
        found = score(g, {"h": x}, direct.NO_ROWS, a, b)
        torch.testing.assert_close(found, near * a + b)


def test_a_row_that_a_function_reads_as_well() -> None:
    torch.manual_seed(0)
    score = direct.Passing(
        lambda a, b: (fn.copy_u("h", "m"), fn.sum("m", "sum"), _shifted(a, b))
    )
    g = message.Graph([0], [0], num_nodes=1)
    x, v, w = torch.randn(3, 1, WIDTH, dtype=torch.float64).unbind()
    for given in ((x, x, v), (x, v, x), (x, v, w), (v, x, w), (v, v, w)):
        rows, a, b = given
        found = score(g, {"h": rows}, direct.NO_ROWS, a, b)
        torch.testing.assert_close(found, rows * a + b)
