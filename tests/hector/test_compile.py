"""`torch.compile` around hector: it goes on behind the layers, and is not slow."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hector
from hector import HeteroGraph
from hector.message import GATConv, Graph, TreeLSTM
from hector.message import functions as fn
from hector.nn import HGTConv, RGATConv, RGCNConv

ENDS, KINDS = torch.randint(20, (2, 60)), torch.randint(3, (60,))
RELATION = ("a", "r", "a")
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


@hector.compile
def product(g: Any, feature: Any, weight: Any) -> Any:
    for e in g.edges():
        e["m"] = e.src.feature @ weight[e.etype]
    for n in g.dst_nodes():
        n["out"] = 0.0
        for e in n.incoming_edges():
            n["out"] += e["m"]
    return g.ndata["out"]


class Model(nn.Module):
    """What `torch.compile` fuses, around a call of hector's."""

    def __init__(self, call: Callable[["Model", Tensor], Tensor], *parts: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.parts = nn.ModuleList(parts)
        self.weight = nn.Parameter(torch.randn(3, 8, 8))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self, self.first(x).relu()).tanh())


def messages(model: Model, x: Tensor) -> Tensor:
    graph = Graph(*ENDS, num_nodes=20)
    graph.ndata["h"] = x
    graph.apply_edges(lambda e: {"s": e.src["h"] - e.dst["h"]})
    graph.edata["s"] = graph.edata["s"] * 2
    with graph.local_scope():
        graph.update_all(fn.u_mul_e("h", "s", "m"), fn.mean("m", "o"))
        out = graph.ndata["o"]
    graph.update_all(fn.copy_u("h", "m"), lambda n: {"o": n.mailbox["m"].median(1)[0]})
    return out + graph.ndata["o"] * graph.in_degrees()[:, None]


def user(model: Model, x: Tensor) -> Tensor:
    graph = HeteroGraph.from_pyg(ENDS, KINDS, num_nodes=20, num_relations=3)
    found: Tensor = product(graph, x, model.weight)
    return found


def make(name: str) -> Model:
    torch.manual_seed(0)
    chain = Graph([0, 1], [2, 2], num_nodes=20)
    on_edges = lambda m, x: m.parts[0](x, ENDS, KINDS)  # noqa: E731
    return {
        "RGCN": lambda: Model(on_edges, RGCNConv(8, 8, 3)),
        "RGAT": lambda: Model(on_edges, RGATConv(8, 8, 3)),
        "HGT": lambda: Model(
            lambda m, x: m.parts[0]({"a": x}, {RELATION: ENDS})["a"],
            HGTConv(8, 8, (["a"], [RELATION]), 2),
        ),
        "GAT": lambda: Model(
            lambda m, x: m.parts[0](Graph(*ENDS, num_nodes=20), x), GATConv(8, 8)
        ),
        "TreeLSTM": lambda: Model(lambda m, x: m.parts[0](chain, x)[0], TreeLSTM(8, 8)),
        "messages": lambda: Model(messages),
        "user": lambda: Model(user),
    }[name]()


@pytest.mark.parametrize(
    "name", ["RGCN", "RGAT", "HGT", "GAT", "TreeLSTM", "messages", "user"]
)
def test_results_and_gradients_under_compile(name: str) -> None:
    model, x = make(name), torch.randn(20, 8)
    read = [p for n, p in model.named_parameters() if p.requires_grad]

    def step(call: Any) -> list[Tensor]:
        out = call(x)
        grads = torch.autograd.grad(out.square().sum(), read, allow_unused=True)
        return [out, *(g for g in grads if g is not None)]

    wanted = step(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="eager")
    start = time.thread_time()
    for found in (step(compiled), step(compiled)):
        assert all(map(torch.allclose, found, wanted))
    # It took 520 s (RGAT): dynamo read hector's compiler.
    assert time.thread_time() - start < 20
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_another_backend_around_a_layer() -> None:
    model, x = make("RGAT"), torch.randn(20, 8)
    torch._dynamo.reset()
    found = torch.compile(model, backend="aot_eager")(x)
    assert torch.allclose(found, model(x), atol=1e-5)


def test_the_compiler_is_not_loaded_for_those_who_never_ask() -> None:
    code = (
        "import sys, torch, hector.nn as n; c = n.RGCNConv(2, 2, 1); "
        "c(torch.ones(2, 2), torch.tensor([[0], [1]]), torch.tensor([0])); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    # A process of its own: this one has it.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
