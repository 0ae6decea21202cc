"""Whatever the program has set as PyTorch's default device and dtype, internal tensors
are where and what they were meant to be."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils._device import _device_constructors

import pydirect
from pydirect.memory import HostTable, to_table
from pydirect.sampling import (
    DeviceSampler,
    Graph,
    GraphStatistics,
    NeighborSampler,
    generate_graph,
    settle,
)
from pydirect.tiering import TieredTable, reverse_pagerank
from pydirect.traversal import (
    bfs,
    compress,
    connected_components,
    from_networkx,
    from_scipy,
    pagerank,
    place,
    sssp,
)

CPU = torch.device("cpu")
EDGES = torch.randint(50, (2, 400), generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.rand(400, generator=torch.Generator().manual_seed(1))
TABLE = torch.arange(150.0).reshape(50, 3)
INDEX = torch.arange(0, 50, 7)


@pytest.fixture(params=["device", "dtype"])
def ambient(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Sets the default once the test has computed what it expects."""

    def change() -> None:
        if request.param == "device":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)

    yield change
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def traversals() -> list[torch.Tensor]:
    graph = Graph.from_edges(EDGES, 50, weights=WEIGHTS, outgoing=True)
    both = Graph.from_edges(EDGES, 50, symmetric=True)
    small = compress(graph)
    found = [small.data, small.decompress().neighbors, pagerank(graph), bfs(both, 0)]
    for form in (graph, small, place(graph, "cpu", reverse=graph.reverse())):
        found += [bfs(form, 0), sssp(form, 0), connected_components(form)]
    return found


def samples() -> list[torch.Tensor]:
    graph = Graph.from_edges(EDGES, 50, weights=WEIGHTS)
    found = []
    for weighted in (False, True):
        there = settle(graph, "cpu", weighted=weighted)
        for replace in (False, True):
            sampler = DeviceSampler(there, [3, -1], replace=replace, weighted=weighted)
            batch = sampler.sample(INDEX, 5)
            found += [batch.node_ids, batch.edge_index]
    batch = NeighborSampler(graph, [3, -1]).sample(INDEX, 5)
    return [*found, batch.node_ids, batch.edge_index]


def converters() -> list[torch.Tensor]:
    networkx, scipy = pytest.importorskip("networkx"), pytest.importorskip("scipy")
    theirs = networkx.Graph([(0, 1, {"w": 1.5}), (1, 2, {"w": 2})])
    graph, _ = from_networkx(theirs, weight="w")
    other = from_scipy(scipy.sparse.eye_array(3), weighted=True)
    return [graph.neighbors, graph.weights, other.neighbors, other.weights]


def tables() -> list[torch.Tensor]:
    tiered = TieredTable(
        TABLE, torch.arange(50, device="cpu"), device=CPU, budget_bytes=120
    )
    graph = Graph.from_edges(EDGES, 50)
    host = HostTable(to_table(TABLE))
    told = pydirect.explain(host, INDEX)
    assert told.num_indices == len(INDEX)
    return [tiered.index_select(INDEX), reverse_pagerank(graph), host.tensor]


def unified() -> list[torch.Tensor]:
    from pydirect.integrations.pyg import UnifiedFeatureStore

    gpu = TABLE.to("unified")
    host = pydirect.unify(TABLE.clone(), "host")
    host[3] = 7
    host.add_(1)
    shared = TABLE.to("unified").share_memory_()
    store = UnifiedFeatureStore()
    store.put_tensor(TABLE, group_name="a", attr_name="x", index=None)
    rows = store.get_tensor(group_name="a", attr_name="x", index=INDEX)
    leaf = TABLE.to("unified").requires_grad_()
    (leaf[INDEX] * 2).sum().backward()
    found = [gpu[INDEX], gpu + 1, host[INDEX], shared, rows, gpu.sum(0), leaf.grad]
    return [pydirect.to_host(t) if t.is_unified else t for t in found]


def generated() -> list[torch.Tensor]:
    statistics = GraphStatistics(num_nodes=90, num_edges=500, num_classes=3)
    graph, labels = generate_graph(statistics, seed=1)
    return [graph.neighbors, graph.offsets, labels]


@pytest.mark.parametrize(
    "work", [traversals, samples, converters, tables, unified, generated]
)
def test_nothing_follows_the_program(
    pyg: ModuleType,
    ambient: Callable[[], None],
    work: Callable[[], list[torch.Tensor]],
) -> None:
    want = work()
    ambient()
    got = work()
    for one, other in zip(want, got, strict=True):
        assert other.device == CPU and one.dtype == other.dtype
        assert torch.equal(one, other)


def test_every_factory_names_its_device() -> None:
    """A call that the test above does not reach would follow the default device."""
    factories = {function.__name__ for function in _device_constructors()}
    for path in sorted(Path(pydirect.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).removeprefix("torch.")
            if name in factories and "torch." in ast.unparse(node.func):
                named = {keyword.arg for keyword in node.keywords}
                assert "device" in named, f"{path}:{node.lineno}: {ast.unparse(node)}"
