"""Gradients of gradients, and `torch.func`, against loops in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hector
from hector.functions import sigmoid
from hector.message import GATConv, GatedGCNConv, GINConv, Graph, GraphConv, SAGEConv
from hector.message import functions as fn
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.runtime import executables

N, E = 7, 20
gradcheck = partial(torch.autograd.gradcheck, fast_mode=True)
gradgradcheck = partial(torch.autograd.gradgradcheck, fast_mode=True)
"""In one direction, drawn at random: entry by entry takes ten times as long."""
torch.manual_seed(0)
SRC, DST = torch.randint(N, (2, E))
KIND = torch.randint(3, (E,))
EDGES = torch.stack((SRC, DST))
TIMES: Any = {"attention_mode": "multiplicative-self-attention"}


def graph() -> Graph:
    return Graph(SRC, DST, num_nodes=N)


def layers() -> dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]]:
    torch.manual_seed(1)
    made: dict[str, tuple[nn.Module, Any]] = {
        "gcn": (GraphConv(4, 3), lambda m, x: m(graph(), x)),
        "sage": (SAGEConv(4, 3, "std"), lambda m, x: m(graph(), x)),
        "softmax": (SAGEConv(4, 3, "softmax"), lambda m, x: m(graph(), x)),
        "max": (SAGEConv(4, 3, "max"), lambda m, x: m(graph(), x)),
        "median": (SAGEConv(4, 3, "median"), lambda m, x: m(graph(), x)),
        "gin": (GINConv(nn.Tanh()), lambda m, x: m(graph(), x)),
        "gat": (GATConv(4, 3, 2), lambda m, x: m(graph(), x)),
        "gated": (GatedGCNConv(4), lambda m, x: m(graph(), x, x[SRC] * x[DST])[0]),
        "rgcn": (RGCNConv(4, 3, 3), lambda m, x: m(x, EDGES, KIND)),
        "rgcn std": (RGCNConv(4, 3, 3, aggr="std"), lambda m, x: m(x, EDGES, KIND)),
        "rgcn max": (RGCNConv(4, 3, 3, aggr="max"), lambda m, x: m(x, EDGES, KIND)),
        "rgat scaled": (
            RGATConv(4, 3, 3, mod="scaled", heads=2, dim=2, **TIMES),
            lambda m, x: m(x, EDGES, KIND),
        ),
        "rgat": (RGATConv(4, 3, 3, heads=2), lambda m, x: m(x, EDGES, KIND)),
        "hgt": (
            HGTConv(4, 4, (["a"], [("a", "r", "a")]), heads=2),
            lambda m, x: m({"a": x}, {("a", "r", "a"): EDGES})["a"],
        ),
    }
    return {k: (m.double(), f) for k, (m, f) in made.items()}


NAMES = sorted(layers())


def rows() -> Tensor:
    gen = torch.Generator().manual_seed(2)
    return torch.randn(N, 4, generator=gen, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_of_layers(name: str) -> None:
    """`gradgradcheck` differentiates the gradient itself by small steps."""
    layer, call = layers()[name]
    x = rows()
    assert gradcheck(lambda x: call(layer, x).tanh(), x)
    assert gradgradcheck(lambda x: call(layer, x).tanh(), x)
    # The gradient is that of the compiled backward.
    loss = call(layer, x).square().sum()
    wanted = [x, *layer.parameters()]
    plain = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    for a, b in zip(plain, again, strict=True):
        assert (a is None) is (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["gat", "rgat", "hgt", "max"])
def test_third_derivatives(name: str) -> None:
    layer, call = layers()[name]

    def first(x: Tensor) -> Tensor:
        energy = call(layer, x).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    assert gradgradcheck(first, rows())


def test_backward_makes_the_gradients_that_are_asked_for() -> None:
    """As PyTorch's operators do: `grad` of the input leaves the weights' out."""
    g = Graph(SRC, DST, num_nodes=N).structure
    x, weight = rows(), torch.ones(1, 4, 4, dtype=torch.float64, requires_grad=True)

    def gradients(wanted: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(two_results(g, x, weight)[0].sum(), wanted)

    every, alone = gradients([x, weight]), gradients([x])
    assert torch.equal(every[0], alone[0])
    exe = executables(g)[-1]
    assert exe.report.backward is not None
    (part,) = exe.parts.values()
    assert len(part.runner.plan.kernels) < len(exe.report.backward.kernels)


def test_results_that_are_one_value_or_unused() -> None:
    g = Graph(SRC, DST, num_nodes=N).structure
    x, weight = rows(), torch.ones(1, 4, 4, dtype=torch.float64, requires_grad=True)
    three = partial(two_results, g)
    assert gradcheck(three, (x, weight))
    assert gradgradcheck(three, (x, weight))
    for chosen in ([0], [1], [0, 2], [1, 2]):

        def some(x: Tensor, weight: Tensor, chosen: list[int] = chosen) -> Any:
            return tuple(three(x, weight)[i].sin() for i in chosen)

        assert gradcheck(some, (x, weight))
        assert gradgradcheck(some, (x, weight))


@hector.compile
def two_results(g: Any, feature: Any, weight: Any) -> Any:
    for e in g.edges():
        e["m"] = sigmoid(e.src.feature @ weight[e.etype])
    for n in g.dst_nodes():
        n["out"] = 0.0
        for e in n.incoming_edges():
            n["out"] += e["m"]
        n["other"] = n["out"] * n.feature
    return g.ndata["out"], g.ndata["other"], g.ndata["out"]


def test_a_force_model_learns_through_its_forces() -> None:
    """Energies of distances; forces are its gradient, the loss is of forces."""
    pos = rows()[:, :3].detach().requires_grad_()
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def loss_of(energy: Callable[[Tensor], Tensor]) -> Tensor:
        (force,) = torch.autograd.grad(energy(pos), pos, create_graph=True)
        return (force - 1).square().mean()

    def ours(pos: Tensor) -> Tensor:
        g = graph()
        g.ndata["x"] = pos

        def message(edges: Any) -> dict[str, Any]:
            off = edges.src["x"] - edges.dst["x"]
            return {"m": torch.exp((off * off).sum(-1, keepdim=True) * -1.0) * scale}

        g.update_all(message, fn.sum("m", "e"))
        assert set(g.counts) == {"compiled"}
        return (g.ndata["e"] * g.ndata["e"]).sum()

    def loop(pos: Tensor) -> Tensor:
        off = (pos[SRC] - pos[DST]).square().sum(1)
        energy = torch.zeros(N, dtype=torch.float64)
        energy = energy.index_add(0, DST, torch.exp(-off) * scale)
        return energy.square().sum()

    mine = torch.autograd.grad(loss_of(ours), [pos, scale])
    theirs = torch.autograd.grad(loss_of(loop), [pos, scale])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


# torch's own forward-mode rules are scripts.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", ["gcn", "gat", "rgcn", "rgat"])
def test_torch_func(name: str) -> None:
    layer, call = layers()[name]
    x = rows().detach()
    numbers = dict(layer.named_parameters())

    def loss(numbers: dict[str, Tensor], x: Tensor) -> Tensor:
        class Called(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: Tensor) -> Tensor:
                return call(self.layer, x)

        named = {f"layer.{k}": v for k, v in numbers.items()}
        found: Tensor = torch.func.functional_call(Called(), named, (x,))
        return found.square().sum()

    mine = torch.func.grad(loss)(numbers, x)
    theirs = torch.autograd.grad(
        loss(numbers, x), list(numbers.values()), allow_unused=True
    )
    for a, b in zip(mine.values(), theirs, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)
    hessian = torch.func.hessian(lambda x: loss(numbers, x))(x)
    slow = torch.autograd.functional.hessian(lambda x: loss(numbers, x), x)
    torch.testing.assert_close(hessian, slow)
    _, change = torch.func.jvp(lambda x: loss(numbers, x), (x,), (torch.ones_like(x),))
    first = torch.func.grad(lambda x: loss(numbers, x))(x)
    torch.testing.assert_close(change, first.sum())


def test_half_precision_and_third_derivatives() -> None:
    layer, call = layers()["gat"]
    x = rows()
    (first,) = torch.autograd.grad(call(layer, x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.square().sum(), x)
    assert bool(third.isfinite().all()) and bool(third.any())
    half = layer.bfloat16()
    y = x.detach().bfloat16().requires_grad_()
    (first,) = torch.autograd.grad(call(half, y).sum(), y, create_graph=True)
    (second,) = torch.autograd.grad(first.float().square().sum(), y)
    assert second.dtype is torch.bfloat16 and bool(second.isfinite().all())
