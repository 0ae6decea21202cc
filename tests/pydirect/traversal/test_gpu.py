"""The kernels on a GPU give what the CPU's code gives."""

import pytest
import torch

from pydirect.sampling import Graph
from pydirect.traversal import (
    Direction,
    Trace,
    Walk,
    bfs,
    compress,
    connected_components,
    pagerank,
    place,
    predecessors,
    sssp,
)
from tests.pydirect.traversal.random_graphs import random_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("walk", [*Walk, None], ids=str)
def test_random_graphs(walk: Walk | None) -> None:
    """None: compressed."""
    for seed in range(100):
        graph = random_graph(seed)
        source = seed % graph.num_nodes
        here = place(graph, "cpu")
        if walk is None:
            there = place(compress(graph, "cuda"), "cuda")
        else:
            there = place(graph, "cuda", walk=walk)
        want = bfs(here, source)
        for way in Direction:
            if way is not Direction.BACKWARD or graph.symmetric:
                assert torch.equal(bfs(there, source, direction=way).cpu(), want)
        assert torch.equal(sssp(there, source).cpu(), sssp(here, source))
        found = connected_components(there).cpu()
        assert torch.equal(found, connected_components(here))
        got, expected = pagerank(there).cpu(), pagerank(here)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=0)
        several = [source, seed * 7 % graph.num_nodes]
        start = torch.arange(graph.num_nodes) % 5 + 1.0
        both = []
        for placed in (here, there):
            length = sssp(placed, several)
            found = predecessors(placed, several, length)
            ranks = pagerank(placed, weighted=True, personalization=start)
            both.append((found.cpu(), ranks.cpu()))
        assert torch.equal(both[0][0], both[1][0])
        torch.testing.assert_close(both[0][1], both[1][1], rtol=1e-9, atol=1e-15)


def test_a_gpu_compresses_as_the_cpu_does() -> None:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(200_000, (2, 3_000_000), generator=generator)
    graph = Graph.from_edges(edges, 200_000, outgoing=True)
    here, there = compress(graph), compress(graph, "cuda")
    assert torch.equal(here.data, there.data)
    assert torch.equal(here.positions, there.positions)
    placed = place(there, "cuda")
    assert torch.equal(bfs(placed, 5).cpu(), bfs(place(graph, "cpu"), 5))


def test_hot_blocks_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(20_000, (2, 600_000), generator=generator)
    graph = Graph.from_edges(edges, 20_000, symmetric=True)
    placed = place(graph, "cuda", hot_bytes=2 << 20)
    assert placed.hot is not None and placed.hot.num_slots > 10
    trace = Trace(timed=True)
    assert torch.equal(bfs(placed, 5, trace=trace).cpu(), bfs(place(graph, "cpu"), 5))
    assert all(step.seconds > 0 for step in trace.steps)
