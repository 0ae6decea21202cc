"""Predecessors, several sources, weighted and personalized ranks: kernels and CPU."""

from dataclasses import replace

import networkx
import numpy as np
import pytest
import torch

from pydirect.sampling import Graph
from pydirect.traversal import Walk, bfs, compress, pagerank, place, predecessors, sssp
from pydirect.traversal.on_cpu import CpuVisitor
from pydirect.traversal.visits import Visitor
from tests.pydirect.traversal.random_graphs import random_graph

WALKS = tuple(Walk)


def edges_of(graph: Graph) -> list[tuple[int, int, float]]:
    targets, sources = graph.to_edge_index().tolist()
    weights = graph.weights.tolist()
    return list(zip(sources, targets, weights, strict=True))


def check_tree(graph: Graph, sources: list[int], result: list, before: list) -> None:
    """Each predecessor explains its node's length, and leads to a source."""
    lengths = {}
    for u, v, w in edges_of(graph):
        lengths.setdefault((u, v), set()).add(w)
    for node, length in enumerate(result):
        if node in sources or length == -1 or length == float("inf"):
            assert before[node] == -1
            continue
        steps = {1} if isinstance(result, Levels) else lengths[before[node], node]
        assert any(result[before[node]] + step == length for step in steps)
        seen = set()
        while node not in sources:
            assert node not in seen, "a circle"
            seen.add(node)
            node = before[node]


class Levels(list):
    """Each edge adds 1."""


@pytest.mark.parametrize("form", ["plain", "compressed"])
def test_predecessors(kernels: Visitor, form: str) -> None:
    """Weights of 0 among them: nodes then precede one another; see [Note: Edges that
    add nothing]. Kernels and CPU agree."""
    for seed in range(32):
        graph = random_graph(seed)
        sources = [seed % graph.num_nodes, seed * 7 % graph.num_nodes]
        if form == "plain":
            placed = place(graph, "cpu", walk=WALKS[seed // 4 % 4])
        else:
            placed = place(compress(graph), "cpu")
        small = CpuVisitor(chunk_edges=1 + seed % 50)
        for search, kind in ((bfs, Levels), (sssp, list)):
            result = search(placed, sources)
            assert torch.equal(result, search(placed, sources, visitor=kernels))
            alone = [search(placed, source).double() for source in sources]
            far = [torch.where(one < 0, torch.inf, one) for one in alone]
            nearest = torch.minimum(*far)
            some = result.double()
            assert torch.equal(torch.where(some < 0, torch.inf, some), nearest)
            before = predecessors(placed, sources, result, visitor=small)
            assert torch.equal(
                before, predecessors(placed, sources, result, visitor=kernels)
            )
            check_tree(graph, sources, kind(result.tolist()), before.tolist())


def test_results_of_others_are_refused() -> None:
    graph = replace(random_graph(7), weights=None)
    level = bfs(graph, 0)
    with pytest.raises(ValueError, match=r"result: expects 0 at its sources, got \["):
        predecessors(graph, int((level != 0).int().argmax()), level)
    with pytest.raises(ValueError, match=r"expects torch.int32 for each of"):
        predecessors(graph, 0, level.double())
    level[int(level.argmax())] += 5
    with pytest.raises(ValueError, match="where no edge leads"):
        predecessors(graph, 0, level)
    assert torch.equal(bfs(graph, torch.tensor([0, 1])), bfs(graph, (0, 1)))
    assert torch.equal(bfs(graph, torch.tensor(1)), bfs(graph, 1))
    with pytest.raises(ValueError, match="source: expects a node or several, got none"):
        bfs(graph, [])


def dense_ranks(graph: Graph, start: np.ndarray | None, iterations: int) -> np.ndarray:
    n = graph.num_nodes
    step = np.zeros((n, n))
    for u, v, w in edges_of(graph):
        step[v, u] += w
    sums = step.sum(0)
    begin = np.full(n, 1 / n) if start is None else start / start.sum()
    step[:, sums > 0] /= sums[sums > 0]
    step[:, sums == 0] = begin[:, None]
    rank = np.full(n, 1 / n)
    for _ in range(iterations):
        rank = 0.85 * step @ rank + 0.15 * begin
    return rank


def test_weighted_ranks(kernels: Visitor) -> None:
    """Weights of both directions differ in half of the symmetric graphs: see [Note:
    Pull and weights]. Kernels and CPU agree to the last bit."""
    for seed in range(24):
        graph = random_graph(seed)
        if seed % 2:
            weights = torch.arange(graph.num_edges).to(graph.weights.dtype) % 9
            graph = replace(graph, weights=weights)
        start = None
        if seed % 3:
            start = torch.arange(graph.num_nodes).double() % 5 + 0.5
        want = dense_ranks(graph, None if start is None else start.numpy(), 6)
        reverse = graph.reverse() if seed % 4 < 2 else None
        forms = [place(graph, "cpu", walk=WALKS[seed // 4 % 4], reverse=reverse)]
        forms.append(place(compress(graph), "cpu"))
        for placed in forms:
            both = [
                pagerank(
                    placed,
                    weighted=True,
                    personalization=start,
                    tolerance=0,
                    max_iterations=6,
                    visitor=visitor,
                )
                for visitor in (kernels, CpuVisitor(chunk_edges=13))
            ]
            assert torch.equal(*both)
            np.testing.assert_allclose(both[0].numpy(), want, rtol=1e-9, atol=1e-15)


def test_networkx_gives_the_same_ranks() -> None:
    theirs = networkx.gnp_random_graph(80, 0.05, seed=3, directed=True)
    for u, v in theirs.edges:
        theirs[u][v]["weight"] = (u * 7 + v) % 4
    from pydirect.traversal import from_networkx

    graph, _ = from_networkx(theirs, weight="weight")
    start = {node: node % 3 + 0.25 for node in theirs}
    want = networkx.pagerank(theirs, personalization=start, tol=1e-13, max_iter=500)
    got = pagerank(
        graph,
        weighted=True,
        personalization=torch.tensor(list(start.values())),
        tolerance=1e-12,
    )
    np.testing.assert_allclose(got.numpy(), list(want.values()), rtol=1e-9)


@pytest.mark.parametrize(
    ("weights", "start", "message"),
    [
        (None, None, "weights: pagerank with weighted=True expects a graph with"),
        ([1.0, -2.0, 3.0], None, "0 or more, got -2.0 at edge 1"),
        ([1.0, float("inf"), 3.0], None, "got inf at edge 1"),
        ([1e-300, 1.0, 1.0], None, "got 1e-300 at node 0: scale them"),
        ([1.0, 1.0, 1.0], [1.0, 2.0], r"for each of 3 nodes, got shape \[2\]"),
        ([1.0, 1.0, 1.0], [1.0, -2.0, 0.0], "got -2.0 for node 1"),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], "a finite sum above 0, got 0.0"),
    ],
)
def test_what_ranks_refuse(
    weights: list[float] | None, start: list[float] | None, message: str
) -> None:
    graph = Graph(
        offsets=torch.tensor([0, 1, 2, 3]),
        neighbors=torch.tensor([1, 2, 0]),
        weights=None if weights is None else torch.tensor(weights, dtype=torch.double),
    )
    with pytest.raises(ValueError, match=message):
        pagerank(
            graph,
            weighted=True,
            personalization=None if start is None else torch.tensor(start),
        )
