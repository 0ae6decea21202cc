"""Traversals equal scipy's on random graphs, with the CPU's code and the kernels."""

import numpy as np
import scipy.sparse
from scipy.sparse import csgraph

from pydirect.sampling import Graph
from pydirect.traversal import (
    Direction,
    Walk,
    bfs,
    compress,
    connected_components,
    pagerank,
    place,
    sssp,
)
from pydirect.traversal.on_cpu import CpuVisitor
from pydirect.traversal.visits import Visitor
from tests.pydirect.traversal.random_graphs import random_graph

NUM_GRAPHS = 160
WALKS = tuple(Walk)


def matrix_of(graph: Graph, *, weighted: bool = False) -> scipy.sparse.csr_array:
    """The smallest weight of parallel edges, as paths see them; zeros stay edges."""
    rows = np.repeat(np.arange(graph.num_nodes), graph.degrees().numpy())
    columns = graph.neighbors.numpy().astype(np.int64)
    values = np.ones(graph.num_edges)
    if weighted and graph.weights is not None:
        values = graph.weights.numpy().astype(np.float64)
    order = np.lexsort((values, columns, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    first = np.ones(len(rows), dtype=bool)
    first[1:] = (np.diff(rows) != 0) | (np.diff(columns) != 0)
    shape = (graph.num_nodes, graph.num_nodes)
    found = scipy.sparse.coo_array(
        (values[first], (rows[first], columns[first])), shape
    )
    return found.tocsr()


def levels(graph: Graph, source: int) -> list[int]:
    found = csgraph.shortest_path(matrix_of(graph), unweighted=True, indices=source)
    return [-1 if np.isinf(d) else int(d) for d in found]


def distances(graph: Graph, source: int) -> np.ndarray:
    """Bellman's equations solved by relaxing every edge until nothing changes."""
    rows = np.repeat(np.arange(graph.num_nodes), graph.degrees().numpy())
    weights = graph.weights.double().numpy()
    best = np.full(graph.num_nodes, np.inf)
    best[source] = 0
    while True:
        through = best.copy()
        np.minimum.at(through, graph.neighbors.numpy(), best[rows] + weights)
        if np.array_equal(through, best):
            return best
        best = through


def components(graph: Graph) -> list[int]:
    _, label = csgraph.connected_components(matrix_of(graph), connection="weak")
    first = {}
    return [first.setdefault(c, node) for node, c in enumerate(label.tolist())]


def ranks(graph: Graph, iterations: int) -> np.ndarray:
    """Dense power iteration; parallel edges count as often as they are stored."""
    n = graph.num_nodes
    rows = np.repeat(np.arange(n), graph.degrees().numpy())
    step = np.zeros((n, n))
    np.add.at(step, (graph.neighbors.numpy(), rows), 1.0)
    degree = step.sum(0)
    step[:, degree == 0] = 1 / n
    step[:, degree > 0] /= degree[degree > 0]
    rank = np.full(n, 1 / n)
    for _ in range(iterations):
        rank = 0.85 * step @ rank + 0.15 / n
    return rank


def check(
    graph: Graph, walk: Walk, visitor: Visitor, seed: int, *, compressed: bool = True
) -> None:
    """As it is and, where wanted, compressed."""
    source = seed % graph.num_nodes
    reverse = graph.reverse() if seed % 2 else None
    level, parts = levels(graph, source), components(graph)
    length = distances(graph, source)
    if not graph.weights.is_floating_point():
        length = np.where(np.isinf(length), -1, length)
    forms = [place(graph, "cpu", walk=walk, reverse=reverse)]
    if compressed:
        packed = None if reverse is None else compress(reverse)
        forms.append(place(compress(graph), "cpu", reverse=packed))
    for placed in forms:
        ways = [Direction.FORWARD, Direction.AUTO]
        ways += [Direction.BACKWARD] if placed.back is not None else []
        for way in ways:
            found = bfs(placed, source, direction=way, visitor=visitor)
            assert found.tolist() == level
        delta = (None, 0.5, 100.0)[seed % 3]
        found = sssp(placed, source, delta=delta, visitor=visitor)
        assert found.is_floating_point() == graph.weights.is_floating_point()
        assert np.array_equal(found.numpy(), length)
        assert connected_components(placed, visitor=visitor).tolist() == parts
        if seed % 5 == 0:
            got = pagerank(placed, max_iterations=7, tolerance=0, visitor=visitor)
            np.testing.assert_allclose(got.numpy(), ranks(graph, 7), rtol=1e-9)


def test_random_graphs(kernels: Visitor) -> None:
    for seed in range(NUM_GRAPHS):
        check(random_graph(seed), WALKS[seed // 4 % 4], kernels, seed)


def test_the_cpu_gives_the_same() -> None:
    """Decoding a few edges at a time is slow: one graph in eight is compressed too."""
    for seed in range(56):
        visitor = CpuVisitor(chunk_edges=1 + seed % 50)
        check(random_graph(seed), Walk.LINES, visitor, seed, compressed=seed % 8 == 1)
