"""Compressed lists: their bytes, what kernels read of them, and bad input.

That results are scipy's on random graphs is test_traversal.py's.
"""

import ctypes
import itertools
from typing import Any

import pytest
import torch

from pydirect.sampling import Graph
from pydirect.traversal import (
    CompressedGraph,
    PlacedGraph,
    Trace,
    Walk,
    bfs,
    compress,
    pagerank,
    place,
)
from pydirect.traversal import compressed as home
from pydirect.traversal.on_cpu import CpuVisitor
from pydirect.traversal.on_gpu import GpuVisitor
from pydirect.traversal.visits import Mark, Pull, Push, seen_bits
from tests.pydirect.traversal.random_graphs import Far, random_graph


def lists(graph: Graph) -> list[list[tuple[int, float]]]:
    """Sorted pairs of neighbour and weight, node by node."""
    ids, weights = graph.neighbors.tolist(), graph.weights.tolist()
    bounds = graph.offsets.tolist()
    pairs = list(zip(ids, weights, strict=True))
    return [sorted(pairs[a:b]) for a, b in itertools.pairwise(bounds)]


def test_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay with their edges, also where chunks end between lists."""
    for seed in range(25):
        monkeypatch.setattr(home, "_CHUNK_EDGES", 1 + seed % 90)
        graph = random_graph(seed)
        made = compress(graph)
        back = made.decompress()
        assert lists(back) == lists(graph)
        assert made.num_nodes == graph.num_nodes and made.num_edges == graph.num_edges
        assert back.symmetric == made.symmetric == graph.symmetric
        assert made.plain_bytes == graph.neighbors.nbytes
        if graph.num_edges:
            assert made.ratio == graph.neighbors.nbytes / made.num_bytes > 1.8


def test_bytes_by_hand() -> None:
    """70 targets of node 0: a block of 64 and one of 6, then one target of node 2."""
    first = [3, 3, 300, 300 + 65536, 300 + 65536 + (1 << 24)]
    ids = [*first, *range(first[-1], first[-1] + 65), 9]
    wide = by_hand(
        [torch.tensor(ids[:70]), torch.tensor([], dtype=int), torch.tensor([9])]
    )
    assert wide.first_blocks.tolist() == [0, 2, 2, 3]
    # Element 0 is an id of 1 byte, 1 is 0 behind it, 2 is 297 behind 0, 3 is 65536
    # behind 2, 4 is more than 2**24 behind 0.
    data = wide.data.tolist()
    assert [data[0] >> (2 * i) & 3 for i in range(4)] == [0, 0, 1, 2]
    assert data[1] & 3 == 3
    assert data[16:24] == [3, 0, 297 & 255, 297 >> 8, 0, 0, 1, (ids[4] - 3) & 255]
    # 6 ids from a block's start on: an id of 4 bytes and differences of 1 byte.
    assert wide.positions.diff().tolist()[1:] == [2 + 4 + 5, 1 + 1]
    every = torch.arange(3)
    assert wide.neighbors_of(every, wide.offsets[1:]).tolist() == ids
    part = wide.neighbors_of(torch.tensor([2, 0]), torch.tensor([71, 67]))
    assert part.tolist() == [9, *ids[:67]]


def by_hand(neighbors: list[torch.Tensor]) -> CompressedGraph:
    """Lists of ids that need not be nodes: up to 2**32 - 1, without memory for them."""
    ids = torch.cat(neighbors)
    sizes = torch.tensor([len(part) for part in neighbors])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    blocks = torch.cat(
        [torch.zeros(1, dtype=torch.int64), ((sizes + 63) // 64).cumsum(0)]
    )
    rank = torch.cat([torch.arange(size) for size in sizes.tolist()])
    data, num_bytes = home.encode(ids.long(), rank)
    return CompressedGraph(
        offsets=offsets,
        first_blocks=blocks,
        positions=torch.cat([torch.zeros(1, dtype=torch.int64), num_bytes.cumsum(0)]),
        data=torch.cat([data, torch.zeros(8, dtype=torch.uint8)]),
        weights=None,
        symmetric=False,
        plain_bytes=8 * len(ids),
    )


def wide_lists(most: int) -> list[torch.Tensor]:
    """Lists with differences of 1 to 4 bytes, of every length up to three blocks."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in [*range(70), 127, 128, 129, 191, 192, 193]:
        reach = most >> int(torch.randint(28, (1,), generator=generator))
        ids = torch.randint(max(1, reach), (size,), generator=generator)
        ids[: size // 4] = torch.randint(most, (size // 4,), generator=generator)
        found.append(ids.sort().values)
    return found


def test_ids_of_four_bytes() -> None:
    parts = wide_lists((1 << 32) - 1)
    parts.append(torch.tensor([0, (1 << 32) - 1, (1 << 32) - 1]))
    made = by_hand(parts)
    found = made.neighbors_of(torch.arange(len(parts)), made.offsets[1:])
    assert torch.equal(found, torch.cat(parts))


@pytest.mark.parametrize("contiguous", [True, False])
def test_kernels_decode_wide_differences(kernels: GpuVisitor, contiguous: bool) -> None:
    """Every id is counted once; the sums are pages that nobody touches."""
    visitor = kernels.reshaped(num_blocks=3, contiguous=contiguous)
    most = 1 << 28
    parts = wide_lists(most)
    placed = PlacedGraph(by_hand(parts), torch.device("cpu"), Walk.LINES)
    sums = torch.zeros(most, dtype=torch.int64)
    shares = torch.arange(1, len(parts) + 1) ** 2
    visitor.visit(placed, placed.whole, Push(sums=sums, shares=shares))
    ids = torch.cat(parts)
    each, where = ids.unique(return_inverse=True)
    owner = torch.repeat_interleave(shares, torch.tensor([len(p) for p in parts]))
    want = torch.zeros(len(each), dtype=torch.int64).index_add_(0, where, owner)
    assert torch.equal(sums[each], want)


def clustered(num_nodes: int, degree: int) -> Graph:
    """Neighbours are near: most differences take a byte."""
    generator = torch.Generator().manual_seed(1)
    source = torch.arange(num_nodes).repeat_interleave(degree)
    steps = torch.randint(1, 40, (len(source),), generator=generator)
    target = (source + steps) % num_nodes
    return Graph.from_edges(torch.stack([source, target]), num_nodes, outgoing=True)


def test_a_block_is_read_by_one_warp_and_lists_share_lines(
    module: Any, kernels: GpuVisitor
) -> None:
    graph = clustered(400, 50)
    made = compress(graph)
    assert made.ratio > 3.1
    placed = place(made, "cpu")
    level = torch.full((400,), -1, dtype=torch.int32)
    room = 4_000_000
    thread, address = torch.zeros(2, room, dtype=torch.int64)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (thread, address))
    module.library.record(*pointers, ctypes.c_longlong(room))
    kernels.visit(placed, placed.whole, Mark(level=level, seen=seen_bits(level), now=0))
    num = module.library.num_loads()
    module.library.record(None, None, ctypes.c_longlong(0))
    assert num < room
    at = address[:num] - made.data.data_ptr()
    # Every word of the lists and none behind them (but what fills the last word).
    assert torch.equal(at.unique(), torch.arange(0, made.num_bytes, 4))
    warps = {(int(t) // 32, int(a)) for t, a in zip(thread[:num], at, strict=True)}
    words = (made.positions[1:] + 3) // 4 - made.positions[:-1] // 4
    assert len(warps) <= int(words.sum())


def test_bytes_of_traces() -> None:
    """Sectors that lists touch, each once; of a part, those of the part."""
    graph = clustered(3000, 40)
    made = compress(graph)
    placed = place(made, "cpu")
    whole = placed.union_bytes(placed.whole)
    assert made.num_bytes <= whole <= made.num_bytes + 64
    nodes = torch.arange(0, 3000, 3)
    starts, ends = made.first_blocks[nodes], made.first_blocks[nodes + 1]
    shift = made.data.data_ptr() % 32
    sectors = set()
    for a, b in zip(
        made.positions[starts].tolist(), made.positions[ends].tolist(), strict=True
    ):
        sectors |= set(range((a + shift) // 32, (b - 1 + shift) // 32 + 1))
    assert placed.union_bytes(placed.frontier(nodes)) == 32 * len(sectors)
    plain, packed = Trace(), Trace()
    here = bfs(place(graph, "cpu"), 0, trace=plain)
    assert torch.equal(bfs(made, 0, trace=packed), here)
    assert packed.num_edges == plain.num_edges
    assert packed.bytes_read < 0.5 * plain.bytes_read


def test_backward_steps_stop_at_the_first_hit(kernels: GpuVisitor) -> None:
    """Of a list of a thousand sources, the first in the frontier, one block is read."""
    size = 1000
    offsets = torch.tensor([0, size] + [2 * size] * size)
    ids = torch.cat([torch.arange(1, size + 1), torch.zeros(size)]).int()
    graph = compress(Graph(offsets=offsets, neighbors=ids, symmetric=True))
    placed = place(graph, "cpu")
    level = torch.full((size + 1,), -1, dtype=torch.int32)
    level[1] = 0
    mark = Mark(level=level, seen=seen_bits(level), now=0)
    num_bytes = kernels.search(placed, placed.frontier(torch.tensor([0])), mark)
    assert level[0] == 1 and int((level >= 0).sum()) == 2
    assert 0 < num_bytes <= 32 * 4  # 16 bytes of lengths, some 64 of differences


@pytest.mark.parametrize("first", [2**31 - 3, 2**32 + 5])
def test_beyond_32_bits(kernels: GpuVisitor, first: int) -> None:
    """Edges, blocks and bytes numbered past 2**31: only the last list exists."""
    made = compress(
        Graph(offsets=torch.tensor([0, 0, 70, 70]), neighbors=torch.tensor([0, 2] * 35))
    )
    placed = place(made, "cpu")
    placed.offsets = torch.tensor([0, first, first + 70, first + 70])
    begin = 4 * first
    placed.edges = Far(placed.edges, begin)
    assert placed.blocks is not None
    where = Far(placed.blocks.positions + begin, first)
    placed.blocks = type(placed.blocks)(
        first=placed.blocks.first + first, positions=where
    )
    level = torch.tensor([-1, 0, -1], dtype=torch.int32)
    frontier = placed.frontier(torch.tensor([1]))
    assert (frontier.num_edges, frontier.num_units) == (70, 2)
    kernels.visit(placed, frontier, Mark(level=level, seen=seen_bits(level), now=0))
    assert level.tolist() == [1, 0, 1]


def test_parts_of_lists(kernels: GpuVisitor) -> None:
    """A limit ends lists inside blocks."""
    graph = clustered(300, 70)
    placed, plain = place(compress(graph), "cpu"), place(graph, "cpu")
    for limit in (1, 63, 64, 65):
        nodes = torch.arange(0, 300, 7)
        found = []
        for over, visitor in (
            (placed, kernels),
            (placed, CpuVisitor(200)),
            (plain, kernels),
        ):
            sums = torch.zeros(300, dtype=torch.int64)
            pull = Pull(sums=sums, shares=torch.arange(300) ** 2)
            visitor.visit(over, over.frontier(nodes, limit=limit), pull)
            found.append(sums)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_bad_input_is_named() -> None:
    graph = clustered(300, 20)
    made = compress(graph)
    with pytest.raises(ValueError, match="two types"):
        ends = torch.tensor([0, 1])
        compress(Graph(offsets=ends, neighbors=torch.tensor([5]), num_sources=9))
    with pytest.raises(ValueError, match=r"at most 4294967296 nodes.*got 4294967297"):
        home.check_num_nodes(2**32 + 1)
    home.check_num_nodes(2**32)
    with pytest.raises(ValueError, match=r"walk: expects 'lines'.*got 'merged'"):
        place(made, "cpu", walk="merged")
    with pytest.raises(ValueError, match="hot_bytes: expects 0 for a compressed"):
        place(made, "cpu", hot_bytes=1 << 20)
    for pair in ((made, graph.reverse()), (graph, compress(graph.reverse()))):
        with pytest.raises(ValueError, match="both directions compressed or neither"):
            place(pair[0], "cpu", reverse=pair[1])
    given = {name: getattr(made, name) for name in made.__dataclass_fields__}
    for changes, words in (
        ({"data": made.data[:-1]}, "and 8 more"),
        ({"data": made.data.int()}, "data: expects 1-D uint8"),
        ({"data": torch.cat([made.data, made.data])[1:]}, "multiple of 4 bytes"),
        ({"first_blocks": made.first_blocks[:-1]}, "expects 301 entries"),
        ({"positions": made.positions[:-1]}, r"blocks \(299\)"),
    ):
        with pytest.raises(ValueError, match=words):
            CompressedGraph(**{**given, **changes})


def test_nothing_to_compress() -> None:
    none = compress(Graph(offsets=torch.tensor([0]), neighbors=torch.empty(0).int()))
    assert (none.num_nodes, none.num_edges, none.num_bytes, none.ratio) == (
        0,
        0,
        0,
        1.0,
    )
    assert pagerank(none).tolist() == []
    apart = Graph(offsets=torch.zeros(4).long(), neighbors=torch.empty(0).int())
    assert bfs(compress(apart), 1).tolist() == [-1, 0, -1]
    assert compress(apart).decompress().num_edges == 0
