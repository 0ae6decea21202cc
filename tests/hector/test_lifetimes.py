"""Memory goes with its last user, not when Python looks for cycles: what ran on a graph
or on a batch lies in a GPU's memory."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hector import message
from hector.capture import CapturedBatches
from hector.graph import HeteroGraph, sampled_subgraph
from hector.message import functions as fn
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.runtime.executable import executables, graph_arrays
from hector.sampling import NeighborSampler, SampledBatch
from hector.train import (
    DataConfig,
    ModelConfig,
    NodeClassificationTrainer,
    OptimizerConfig,
    RunConfig,
)

N, E = 10, 30
Refs = list["weakref.ref[Any]"]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    # What an optimizer's first use imports keeps the frames that it was used in.
    torch.optim.Adam([nn.Parameter(torch.zeros(1))]).step()
    gc.disable()
    yield
    gc.enable()


def a_graph() -> HeteroGraph:
    torch.manual_seed(0)
    ends, kinds = torch.randint(N, (2, E)), torch.randint(3, (E,))
    return HeteroGraph.from_pyg(ends, kinds, num_nodes=N, num_relations=3)


def layer(make: Callable[..., nn.Module], grad: bool) -> Refs:
    """A layer on a graph of its own and on PyG's tensors."""
    graph, conv = a_graph(), make(4, 4, 3)
    x = torch.randn(N, 4, requires_grad=grad)
    out = conv(x, graph)
    if grad:
        out.sum().backward()
    ends = torch.stack((graph.src, graph.dst))
    conv(x, ends, graph.edge_type)
    (made,) = executables(graph)
    kept = (conv, graph, x, made, graph_arrays(graph), graph.src)
    return [weakref.ref(k) for k in kept]


def hgt() -> Refs:
    ends = torch.tensor([[0, 1], [1, 2]])
    edges = {("a", "r", "b"): ends, ("b", "s", "a"): ends}
    conv = HGTConv(4, 4, (["a", "b"], list(edges)))
    found = conv({"a": torch.randn(3, 4), "b": torch.randn(3, 4)}, edges)
    torch.cat(list(found.values())).sum().backward()
    return [weakref.ref(conv)]


def sampled() -> Refs:
    """One mini-batch after another, without a capture."""
    graph, conv = a_graph(), RGATConv(4, 4, 3)
    sampler, found = NeighborSampler(graph, [2]), []
    for _ in range(2):
        batch = sampler.sample(torch.tensor([1, 4]))
        conv(torch.randn(len(batch.node_ids), 4), batch.graph).sum().backward()
        found += [weakref.ref(batch.graph), weakref.ref(graph_arrays(batch.graph))]
    return found


def captured() -> Refs:
    found: Refs = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.x = RGCNConv(4, 4, 3), torch.randn(N, 4)

        def step(self, batch: SampledBatch) -> torch.Tensor:
            found.append(weakref.ref(batch.graph))
            return self.conv(self.x[batch.node_ids], batch.graph)[batch.seeds].sum()

    model, graph = Model(), a_graph()
    batches = CapturedBatches(model.step, graph)
    batches(NeighborSampler(graph, [2]).draw(torch.tensor([1, 2])))
    return [*found, *(weakref.ref(kept) for kept in (model, graph, batches))]


def trained(**options: Any) -> Refs:
    trainer = NodeClassificationTrainer(
        model=ModelConfig(layer="rgcn", hidden_channels=8),
        data=DataConfig(name="aifb", scale=0.02, num_labelled=60),
        optimizer=OptimizerConfig(),
        epochs=1,
        run=RunConfig(device="cpu", progress=False),
        **options,
    )
    found: Refs = []
    build = trainer.build_model

    def built(task: Any, seed: int) -> Any:
        model = build(task, seed)
        found.extend((weakref.ref(model), weakref.ref(task.graph)))
        return model

    trainer.build_model = built  # type: ignore[method-assign]
    trainer.train()
    return found


def messages(make: Callable[..., nn.Module]) -> Refs:
    ends = torch.randint(N, (2, E))
    graph, conv = message.Graph(ends[0], ends[1], num_nodes=N), make(4, 4)
    x = torch.randn(N, 4, requires_grad=True)
    conv(graph, x).sum().backward()
    graph.ndata["h"] = x
    graph.pull([1, 2], fn.copy_u("h", "m"), fn.sum("m", "out"))
    graph.update_all(fn.copy_u("h", "m"), fn.median("m", "out"))
    graph.edge_softmax(torch.randn(E))
    kept = (conv, graph, graph.structure, x)
    return [weakref.ref(k) for k in kept]


CASES: dict[str, Callable[[], Refs]] = {
    "RGCN": lambda: layer(RGCNConv, True),
    "RGAT": lambda: layer(RGATConv, True),
    "inference": lambda: layer(RGCNConv, False),
    "HGT": hgt,
    "sampled": sampled,
    "captured": captured,
    "full batch": trained,
    "mini-batches": lambda: trained(batch=16),
    "captured mini-batches": lambda: trained(batch=16, capture=True),
    "GAT": lambda: messages(message.GATConv),
    "SAGE": lambda: messages(message.SAGEConv),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_collector(name: str) -> None:
    found = CASES[name]()
    assert found and all(ref() is None for ref in found), [ref() for ref in found]


def test_a_graph_that_is_gone_still_has_its_backward() -> None:
    """What a backward needs of a graph is not the graph."""
    graph, conv = a_graph(), RGATConv(4, 4, 3)
    wanted = torch.autograd.grad(conv(torch.ones(N, 4), graph).sum(), conv.weight)
    out = conv(torch.ones(N, 4), graph).sum()
    gone = weakref.ref(graph)
    del graph
    assert gone() is None
    assert torch.equal(torch.autograd.grad(out, conv.weight)[0], wanted[0])


def test_a_bare_graph_shares_maps() -> None:
    graph = a_graph()
    assert graph.bare().csc() is graph.csc() and graph.csr() is graph.bare().csr()
    assert graph.bare().state is not graph.state
    part = sampled_subgraph(graph, torch.arange(N), torch.arange(4))
    assert part.csc() is not graph.csc()
    assert graph.replace().csc() is not graph.csc()
