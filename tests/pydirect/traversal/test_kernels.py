"""What the kernels read, in which order, and that 32-bit arithmetic is nowhere."""

import ctypes
import sys
from typing import Any

import pytest
import torch

from pydirect import coalesce
from pydirect.sampling import Graph
from pydirect.traversal import (
    PlacedGraph,
    Trace,
    Walk,
    bfs,
    connected_components,
    count_requests,
    pagerank,
    place,
    sssp,
)
from pydirect.traversal.on_gpu import GpuVisitor
from pydirect.traversal.visits import Mark, Relax, seen_bits
from tests.pydirect.traversal.random_graphs import Far, misaligned, random_graph

WIDE = (torch.int32, torch.int64)


def graph_of(degrees: list[int], dtype: torch.dtype, offset: int = 0) -> Graph:
    """Lists of the given lengths; weights beside."""
    sizes = torch.tensor(degrees)
    offsets = torch.zeros(len(degrees) + 1, dtype=torch.int64)
    torch.cumsum(sizes, 0, out=offsets[1:])
    ids = torch.arange(int(sizes.sum())) * 7 % len(degrees)
    weights = misaligned(torch.ones(len(ids), dtype=torch.int32), offset)
    return Graph(
        offsets=offsets, neighbors=misaligned(ids.to(dtype), offset), weights=weights
    )


def loads(module: Any, run: Any) -> list[tuple[int, int]]:
    """Thread and address of every load from host memory that ``run`` makes."""
    room = 100_000
    threads, addresses = torch.zeros(2, room, dtype=torch.int64)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (threads, addresses))
    module.library.record(*pointers, ctypes.c_longlong(room))
    run()
    num = module.library.num_loads()
    module.library.record(None, None, ctypes.c_longlong(0))
    assert num < room
    return list(zip(threads[:num].tolist(), addresses[:num].tolist(), strict=True))


EDGES = [0, 1, 15, 16, 17, 31, 32, 33, 0, 0, 5, 64, 100, 3, 1]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("walk", list(Walk))
@pytest.mark.parametrize("offset", [0, 3])
def test_every_edge_is_read_once(
    module: Any, kernels: GpuVisitor, dtype: torch.dtype, walk: Walk, offset: int
) -> None:
    graph = graph_of(EDGES, dtype, offset)
    placed = place(graph, "cpu", walk=walk)
    level = torch.full((len(EDGES),), -1, dtype=torch.int32)
    mark = Mark(level=level, seen=seen_bits(level), now=0)
    found = loads(module, lambda: kernels.visit(placed, placed.whole, mark))
    base, size = graph.neighbors.data_ptr(), graph.neighbors.element_size()
    edges = sorted((address - base) // size for _, address in found)
    assert edges == list(range(graph.num_edges))
    lines = {}
    for thread, address in found:
        lines.setdefault(address // 128, set()).add(thread // 32)
        if walk is Walk.ALIGNED:  # lanes and places in a line go together
            assert address // size % (128 // size) == thread % (128 // size)
    if walk is Walk.LINES:
        assert all(len(warps) == 1 for warps in lines.values())
        assert len(lines) == placed.whole.num_units


@pytest.mark.parametrize("walk", [Walk.ALIGNED, Walk.LINES])
def test_weights_start_on_lines_too(
    module: Any, kernels: GpuVisitor, walk: Walk
) -> None:
    """Wide ids beside narrow weights: the line of the weights decides."""
    graph = graph_of(EDGES, torch.int64)
    placed = place(graph, "cpu", walk=walk)
    relax = Relax(
        distance=torch.zeros(len(EDGES), dtype=torch.int64),
        marks=torch.zeros(len(EDGES), dtype=torch.uint8),
    )
    frontier = placed.frontier(None, weighted=True)
    found = loads(module, lambda: kernels.visit(placed, frontier, relax))
    low = graph.weights.data_ptr()
    weights = [(t, a) for t, a in found if low <= a < low + graph.weights.nbytes]
    assert len(weights) == graph.num_edges
    assert all(address // 4 % 32 == thread % 32 for thread, address in weights)


def test_backward_steps_stop_at_the_first_hit(module: Any, kernels: GpuVisitor) -> None:
    """A list of a thousand sources, the first in the frontier: one unit is read, by
    whatever threads run before the hit is seen."""
    size = 1000
    offsets = torch.tensor([0, size] + [2 * size] * size)
    ids = torch.cat([torch.arange(1, size + 1), torch.zeros(size)]).int()
    graph = Graph(offsets=offsets, neighbors=misaligned(ids, 0), symmetric=True)
    placed = place(graph, "cpu")
    level = torch.full((size + 1,), -1, dtype=torch.int32)
    level[1] = 0
    mark = Mark(level=level, seen=seen_bits(level), now=0)
    frontier = placed.frontier(torch.tensor([0]))
    num_bytes = []
    found = loads(
        module, lambda: num_bytes.append(kernels.search(placed, frontier, mark))
    )
    assert level[0] == 1
    assert num_bytes == [128]
    assert len(found) == 1  # threads run one by one here: the first one hits


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("walk", list(Walk))
@pytest.mark.parametrize("first", [2**31 - 3, 2**31, 2**32 + 5])
def test_edges_beyond_32_bits(
    kernels: GpuVisitor, dtype: torch.dtype, walk: Walk, first: int
) -> None:
    """Only the last list of a graph of that many edges exists: the pointer to the edge
    list lies so far in front of it."""
    ids = misaligned(torch.tensor([2, 0, 2] + [1] * 50, dtype=dtype), first % 32)
    placed = place(graph_of([1, 1, 1], dtype), "cpu", walk=walk)
    placed.offsets = torch.tensor([0, first, first + 53, first + 53])
    placed.edges = Far(ids, first)
    level = torch.tensor([-1, 0, -1], dtype=torch.int32)
    placed.shift = placed.edges.data_ptr() % 128 // ids.element_size()
    placed.__dict__["graph"] = Sized(first + 53)
    kernels.visit(
        placed,
        placed.frontier(torch.tensor([1])),
        Mark(level=level, seen=seen_bits(level), now=0),
    )
    assert level.tolist() == [1, 0, 1]


class Sized:
    """As much of a graph as a frontier asks for."""

    num_nodes = 3
    weights = None

    def __init__(self, num_edges: int) -> None:
        self.num_edges = num_edges


@pytest.mark.parametrize("offset", [0, 5])
def test_hot_blocks_change_nothing_but_the_reads(
    module: Any, kernels: GpuVisitor, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    home = sys.modules[place.__module__]
    monkeypatch.setattr(home, "BLOCK_BYTES", 256)
    for seed in range(40):
        graph = random_graph(seed)
        graph = Graph(
            offsets=graph.offsets,
            neighbors=misaligned(graph.neighbors, offset),
            weights=graph.weights,
            symmetric=graph.symmetric,
        )
        cold, hot = place(graph, "cpu"), place(graph, "cpu", hot_bytes=3000)
        held = 0 if hot.hot is None else hot.hot.edges.nbytes
        assert held <= 3000
        reads = []
        for placed in (cold, hot):
            reads.append(loads(module, lambda p=placed: results(p, kernels)))
        assert all(map(torch.equal, results(cold, kernels), results(hot, kernels)))
        assert (len(reads[1]) < len(reads[0])) == (held > 0)


def results(placed: PlacedGraph, visitor: GpuVisitor) -> list[torch.Tensor]:
    return [
        bfs(placed, 0, direction="forward", visitor=visitor),
        sssp(placed, 0, visitor=visitor),
        connected_components(placed, visitor=visitor),
        pagerank(placed, tolerance=0, max_iterations=3, visitor=visitor),
    ]


def test_the_anchor_stays(kernels: GpuVisitor) -> None:
    """See [Note: One anchor]: clusters that overtake one another in size, joined by
    edges that only late rounds would read."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        num = 64 * 16 * 2
        edges = []
        for _ in range(6):
            nodes = torch.randperm(num, generator=generator)[: num // 5]
            edges.append(torch.stack([nodes[:-1], nodes[1:]]))
        graph = Graph.from_edges(torch.cat(edges, dim=1), num, symmetric=True)
        directed = Graph(offsets=graph.offsets, neighbors=graph.neighbors)
        some = connected_components(place(graph, "cpu"), visitor=kernels)
        everything = connected_components(place(directed, "cpu"), visitor=kernels)
        assert torch.equal(some, everything)


def test_components_read_a_part(kernels: GpuVisitor) -> None:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(20_000, (2, 320_000), generator=generator)
    graph = Graph.from_edges(edges, 20_000, symmetric=True)
    trace = Trace()
    label = connected_components(place(graph, "cpu"), trace=trace, visitor=kernels)
    assert int(label.max()) == 0
    assert trace.bytes_read < 0.2 * graph.neighbors.nbytes


def test_request_counts() -> None:
    """EMOGI's ladder, and the closed form of the coalescing model."""
    generator = torch.Generator().manual_seed(0)
    degrees = torch.poisson(torch.full((4000,), 32.0), generator=generator).long()
    graph = graph_of(degrees.tolist(), torch.int64)
    found = {walk: count_requests(graph, walk) for walk in Walk}
    for walk in (Walk.MERGED, Walk.ALIGNED):
        access = coalesce.Access(walk.value)
        want = coalesce.traversal_requests(graph.offsets.numpy(), access, id_bytes=8)
        assert found[walk] == want
    totals = [found[walk].total for walk in Walk]
    assert totals == sorted(totals, reverse=True)
    assert found[Walk.LINES].total == -(-graph.num_edges // 16)
    assert found[Walk.LINES].full_share > 0.999
    assert found[Walk.NAIVE].counts[0] > 0.9 * found[Walk.NAIVE].total
    assert 0.9 < found[Walk.NAIVE].moved_bytes / 32 / graph.num_edges <= 1
    # Of lists of 4, 0, 1 and 5 ids of 8 bytes an id each at a time, 4 of them in a
    # sector: edges (0, 4, 5), (1, 6), (2, 7), (3, 8) and 9.
    few = graph_of([4, 0, 1, 5], torch.int64)
    assert count_requests(few, Walk.NAIVE).counts == (3, 3, 0, 0)
    none = graph_of([0, 0], torch.int64)
    assert all(count_requests(none, walk).total == 0 for walk in Walk)
    some = torch.arange(0, 4000, 7)
    read = count_requests(graph, Walk.LINES, some)
    assert read.useful_bytes == int(degrees[some].sum()) * 8
    assert 1 <= read.moved_bytes / read.useful_bytes < 1.31
