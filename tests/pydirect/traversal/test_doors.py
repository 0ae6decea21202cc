"""Graphs of other libraries, bad input, a real graph, traces."""

import importlib
import lzma
import math
from pathlib import Path
from types import ModuleType

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch

from pydirect.sampling import Graph
from pydirect.traversal import (
    Trace,
    bfs,
    connected_components,
    count_requests,
    from_networkx,
    from_pyg,
    from_scipy,
    pagerank,
    place,
    sssp,
    to_networkx,
    to_pyg,
)

ROOT = Path(__file__).resolve().parents[3]
SNAP = ROOT / "../shared/data/snap/arxiv-cit-hep-ph.csv.xz"


def test_networkx_there_and_back() -> None:
    theirs = networkx.MultiGraph()
    theirs.add_nodes_from("abcdef")
    theirs.add_weighted_edges_from(
        [("a", "b", 4), ("a", "b", 1), ("b", "c", 2), ("d", "d", 7), ("d", "e", 3)]
    )
    graph, nodes = from_networkx(theirs, weight="weight")
    assert graph.symmetric and graph.weights.dtype == torch.int64
    length = sssp(place(graph, "cpu"), nodes.index("a"))
    assert dict(zip(nodes, length.tolist(), strict=True)) == {
        "a": 0, "b": 1, "c": 3, "d": -1, "e": -1, "f": -1
    }  # fmt: skip
    label = connected_components(graph).tolist()
    parts = {
        frozenset(n for n, c in zip(nodes, label, strict=True) if c == k) for k in label
    }
    assert parts == {frozenset(c) for c in networkx.connected_components(theirs)}
    back = to_networkx(graph, length=length)
    assert back.nodes[nodes.index("c")]["length"] == 3
    assert sorted(d["weight"] for _, _, d in back.edges(data=True)) == [
        1, 1, 2, 2, 3, 3, 4, 4, 7
    ]  # fmt: skip


def test_networkx_ranks() -> None:
    theirs = networkx.gnp_random_graph(60, 0.05, seed=3, directed=True)
    graph, nodes = from_networkx(theirs)
    assert not graph.symmetric
    want = networkx.pagerank(theirs, tol=1e-10)
    got = pagerank(graph, tolerance=1e-10)
    np.testing.assert_allclose(got.numpy(), [want[n] for n in nodes], atol=1e-8)


def test_loops_and_multi_edges_rank_as_in_networkx() -> None:
    for kind in (
        networkx.Graph,
        networkx.DiGraph,
        networkx.MultiGraph,
        networkx.MultiDiGraph,
    ):
        theirs = kind([(0, 0), (0, 1), (1, 2), (1, 2), (2, 2), (2, 2), (3, 1)])
        graph, nodes = from_networkx(theirs)
        want = networkx.pagerank(theirs, tol=1e-12, max_iter=500)
        got = pagerank(graph, tolerance=1e-12)
        np.testing.assert_allclose(got.numpy(), [want[n] for n in nodes], atol=1e-10)
    edges = torch.tensor([[0, 0, 1], [0, 1, 2]])
    graph = Graph.from_edges(edges, 3, symmetric=True, weights=torch.tensor([5, 6, 7]))
    assert graph.to_edge_index().tolist() == [[0, 1, 0, 2, 1], [0, 0, 1, 1, 2]]
    assert graph.weights.tolist() == [5, 6, 6, 7, 7]
    plain = Graph.from_edges(edges, 3, symmetric=True)
    assert torch.equal(plain.neighbors, graph.neighbors)


@pytest.mark.parametrize("bad", [1j, "1", None, 2**70, torch.tensor(1.0)])
def test_networkx_weights_that_are_no_numbers(bad: object) -> None:
    theirs = networkx.DiGraph()
    theirs.add_edge("a", "b", weight=bad)
    with pytest.raises(ValueError, match=r"a number 'weight' on every edge, got .* on"):
        from_networkx(theirs, weight="weight")


def test_ranks_of_many_nodes_converge() -> None:
    """The tolerance is of all ranks together: more nodes must not make it larger."""
    num = 300_000
    chain = torch.stack([torch.arange(num - 1), torch.arange(1, num)])[:, : num // 2]
    some = torch.randint(99, (2, 9000), generator=torch.Generator().manual_seed(0))
    edges = torch.cat([chain, some], dim=1)
    placed = place(Graph.from_edges(edges, num, outgoing=True), "cpu")
    trace = Trace()
    got = pagerank(placed, tolerance=1e-5, trace=trace)
    assert trace.converged is True
    assert float((got - pagerank(placed, tolerance=1e-12)).abs().sum()) < 1e-4


def test_ranks_that_do_not_converge_say_so() -> None:
    graph = Graph.from_edges(torch.tensor([[0, 1, 1], [1, 0, 2]]), 3, outgoing=True)
    with pytest.warns(RuntimeWarning, match=r"max_iterations=2 before it converged"):
        pagerank(graph, max_iterations=2, trace=(trace := Trace()))
    assert trace.converged is False and len(trace.steps) == 2
    swing = Graph.from_edges(torch.tensor([[0, 1, 2], [1, 0, 1]]), 3, outgoing=True)
    with pytest.warns(RuntimeWarning, match=r"still change by 0.667 in all"):
        pagerank(swing, damping=1.0)
    for damping in (0.0, 0.5, 0.99):
        for start in (None, torch.arange(graph.num_nodes)):
            trace = Trace()
            how = {"personalization": start, "tolerance": 1e-13, "trace": trace}
            pagerank(graph, damping=damping, **how)
            assert trace.converged
    pagerank(graph, tolerance=0, max_iterations=4, trace=(trace := Trace()))
    assert len(trace.steps) == 4


def test_pyg_there_and_back(pyg: ModuleType) -> None:
    importlib.import_module("torch_geometric.data")
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]])
    data = pyg.data.Data(
        edge_index=edges, num_nodes=5, edge_weight=torch.tensor([1.0, 2, 3, 4])
    )
    graph = from_pyg(data, weight="edge_weight")
    assert not graph.symmetric
    assert bfs(graph, 0).tolist() == [0, 1, 2, 3, -1]
    back = to_pyg(graph, level=bfs(graph, 0))
    assert torch.equal(back.edge_index, edges)
    assert torch.equal(back.edge_weight, data.edge_weight)
    assert back.level.tolist() == [0, 1, 2, 3, -1]
    both = pyg.data.Data(edge_index=torch.cat([edges, edges.flip(0)], 1), num_nodes=5)
    assert from_pyg(both).symmetric
    # Shape (num_edges, 1), half precision, an EdgeIndex; weights differ both ways.
    both.edge_index = pyg.EdgeIndex(both.edge_index, sparse_size=(5, 5))
    both.heat = torch.arange(8.0).half()[:, None]
    found = from_pyg(both, weight="heat")
    assert found.symmetric and type(found.neighbors) is torch.Tensor
    assert found.reverse().weights.tolist() == [4, 2, 0, 5, 6, 1, 7, 3]
    with pytest.raises(ValueError, match=r"got HeteroData: .* to_homogeneous"):
        from_pyg(pyg.data.HeteroData())
    with pytest.raises(ValueError, match="weight: expects an attribute"):
        from_pyg(data, weight="missing")
    with pytest.raises(ValueError, match="level: expects one value for each of 5"):
        to_pyg(graph, level=torch.zeros(4))


def test_scipy_in() -> None:
    matrix = scipy.sparse.csr_array(([2.0, 3.0], ([0, 1], [1, 2])), shape=(3, 3))
    assert sssp(from_scipy(matrix, weighted=True), 0).tolist() == [0.0, 2.0, 5.0]
    with pytest.raises(ValueError, match="square"):
        from_scipy(scipy.sparse.csr_array((2, 3)))
    # An entry in parts is their sum, whatever the format, and the matrix stays.
    parts = (np.array([1, 2, 1]), (np.array([0, 0, 1]), np.array([1, 1, 2])))
    coo = scipy.sparse.coo_array(parts, shape=(3, 3))
    csr = scipy.sparse.csr_array((parts[0], [1, 1, 2], [0, 2, 3, 3]), shape=(3, 3))
    for matrix in (coo, csr, coo.todia(), coo.astype("int8")):
        entries = matrix.nnz
        assert sssp(from_scipy(matrix, weighted=True), 0).tolist() == [0, 3, 4]
        assert from_scipy(matrix).num_edges == 2
        assert matrix.nnz == entries
    for wrong in (coo.astype(complex), coo.astype(np.longdouble)):
        with pytest.raises(ValueError, match=r"weights: expects"):
            from_scipy(wrong, weighted=True)


def graph_of(**changes: object) -> Graph:
    given = {
        "offsets": torch.tensor([0, 2, 3, 3]),
        "neighbors": torch.tensor([1, 2, 0]),
        "weights": None,
    }
    return Graph(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offsets": torch.tensor([0, 3, 2, 3])}, r"got 2 after 3 at node 1"),
        ({"offsets": torch.tensor([1, 2, 3, 3])}, r"the first to be 0, got 1"),
        ({"offsets": torch.tensor([0, 2, 3])[:0]}, r"num_nodes \+ 1 entries, got none"),
        ({"offsets": torch.tensor([0, 2, 3, 4])}, r"number of edges \(3\), got \[4\]"),
        ({"offsets": torch.tensor([0.0, 3.0])}, r"1-D int64, got 1-D torch.float32"),
        ({"neighbors": torch.tensor([1, 3, 0])}, r"nodes 0 to 2, got 0 to 3"),
        ({"neighbors": torch.tensor([1, -1, 0])}, r"nodes 0 to 2, got -1 to 1"),
        ({"neighbors": torch.tensor([1.0, 2, 0])}, r"int64, got 1-D torch.float"),
        ({"neighbors": torch.arange(6)[::2] // 2}, r"contiguous CPU tensor"),
        ({"weights": torch.ones(2)}, r"3 edges, got torch.float32 of shape \[2\]"),
        ({"weights": torch.ones(3).half()}, r"got torch.float16"),
    ],
)  # fmt: skip
def test_bad_graphs_are_named(changes: dict[str, object], words: str) -> None:
    if "neighbors" in changes and words.startswith("contiguous"):
        changes = {"neighbors": torch.tensor([1, 9, 2, 9, 0, 9])[::2]}
    with pytest.raises(ValueError, match=words):
        graph_of(**changes)


def test_bad_questions_are_named() -> None:
    plain = graph_of()
    for source in (-1, 3):
        with pytest.raises(ValueError, match=rf"a node, 0 to 2, got {source}"):
            bfs(plain, source)
    with pytest.raises(ValueError, match="source: expects a graph with nodes"):
        bfs(Graph(offsets=torch.tensor([0]), neighbors=torch.tensor([]).int()), 0)
    with pytest.raises(ValueError, match="stored in one direction, got backward"):
        bfs(plain, 0, direction="backward")
    with pytest.raises(ValueError, match="sssp expects a graph with weights"):
        sssp(plain, 0)
    for bad in (-0.5, math.nan):
        weights = torch.tensor([1.0, 2.0, bad])
        with pytest.raises(ValueError, match=r"0 or more, got .* at edge 2"):
            sssp(graph_of(weights=weights), 0)
    # Two edges in a row must stay below the largest int64, which says "no path".
    heavy = torch.tensor([2**62, 1, 2])
    with pytest.raises(ValueError, match="longer than int64"):
        sssp(graph_of(weights=heavy), 0)
    assert sssp(graph_of(weights=heavy - 1), 0).tolist() == [0, 2**62 - 1, 0]
    pair = {"offsets": torch.tensor([0, 1, 1]), "neighbors": torch.tensor([1])}
    with pytest.raises(ValueError, match="longer than int64"):
        sssp(Graph(**pair, weights=torch.tensor([2**63 - 1])), 0)
    longest = sssp(Graph(**pair, weights=torch.tensor([2**63 - 2])), 0)
    assert longest.tolist() == [0, 2**63 - 2]
    with pytest.raises(ValueError, match="reverse: expects 3 nodes and 3 edges"):
        place(plain, "cpu", reverse=Graph(**pair))
    with pytest.raises(ValueError, match="delta: expects more than 0"):
        sssp(graph_of(weights=torch.ones(3)), 0, delta=0.0)
    with pytest.raises(ValueError, match="damping: expects 0 to 1"):
        pagerank(plain, damping=1.5)
    with pytest.raises(ValueError, match="max_iterations: expects at least 1"):
        pagerank(plain, max_iterations=0)
    with pytest.raises(ValueError, match="hot_bytes: expects 0 or more"):
        place(plain, "cpu", hot_bytes=-1)
    with pytest.raises(ValueError, match="two types"):
        place(graph_of(num_sources=9), "cpu")


def test_graphs_without_nodes_or_edges() -> None:
    none = Graph(offsets=torch.tensor([0]), neighbors=torch.empty(0).int())
    assert connected_components(none).tolist() == pagerank(none).tolist() == []
    apart = Graph(
        offsets=torch.zeros(4, dtype=torch.int64),
        neighbors=torch.empty(0).int(),
        weights=torch.empty(0),
    )
    assert bfs(apart, 1).tolist() == [-1, 0, -1]
    assert sssp(apart, 1).tolist() == [math.inf, 0, math.inf]
    assert connected_components(apart).tolist() == [0, 1, 2]
    torch.testing.assert_close(pagerank(apart), torch.full((3,), 1 / 3).double())


def test_a_real_graph() -> None:
    """High-energy physics citations: 34,546 papers, with networkx as the oracle."""
    if not SNAP.is_file():
        pytest.skip(f"{SNAP.name} is not beside this checkout")
    with lzma.open(SNAP, "rt") as file:
        head = file.readline().split(",")
        edges = np.loadtxt(file, dtype=np.int64, delimiter=",").T - 1
    num_nodes = int(head[0])
    index = torch.from_numpy(np.ascontiguousarray(edges))
    graph = Graph.from_edges(index, num_nodes, outgoing=True)
    theirs = networkx.DiGraph()
    theirs.add_nodes_from(range(num_nodes))
    theirs.add_edges_from(edges.T.tolist())
    source = int(graph.degrees().argmax())
    trace = Trace()
    level = bfs(graph, source, trace=trace)
    want = networkx.single_source_shortest_path_length(theirs, source)
    assert {n: d for n, d in enumerate(level.tolist()) if d >= 0} == dict(want)
    assert trace.num_edges == int(graph.degrees()[level >= 0].sum())
    found = len(set(connected_components(graph).tolist()))
    assert found == networkx.number_weakly_connected_components(theirs)
    both = Graph.from_edges(index, num_nodes, symmetric=True)
    assert torch.equal(connected_components(both), connected_components(graph))


def test_numbers_at_the_edge() -> None:
    path = Graph.from_edges(
        torch.tensor([[0, 1], [1, 2]]), 3, weights=torch.tensor([1, 2]), outgoing=True
    )
    assert sssp(path, 0, delta=math.inf).tolist() == [0, 1, 3]
    for source in (True, 0.5):
        with pytest.raises(ValueError, match=f"expects an integer, got {source}"):
            bfs(path, source)
    with pytest.raises(ValueError, match="tolerance: expects 0 or more, got nan"):
        pagerank(path, tolerance=math.nan)
    with pytest.raises(ValueError, match="nodes: expects nodes 0 to 2, got -1"):
        count_requests(path, "lines", torch.tensor([-1]))


def test_reverse_takes_the_weights_of_a_symmetric_graph() -> None:
    graph = Graph(
        offsets=torch.tensor([0, 1, 2]),
        neighbors=torch.tensor([1, 0]),
        weights=torch.tensor([1.0, 5.0]),
        symmetric=True,
    )
    back = graph.reverse()
    assert back.symmetric and back.weights is not None
    assert back.weights.tolist() == [5.0, 1.0]


def test_reverse() -> None:
    graph = graph_of(weights=torch.tensor([5, 6, 7]))
    back = graph.reverse()
    assert back.offsets.tolist() == [0, 1, 2, 3]
    assert back.neighbors.tolist() == [1, 0, 0]
    assert back.weights.tolist() == [7, 5, 6]
    again = back.reverse()
    assert again.neighbors.tolist() == graph.neighbors.tolist()
    assert again.weights.tolist() == graph.weights.tolist()
