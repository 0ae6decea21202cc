"""Adjacency lists in fewer bytes, of which any element is decoded by itself.

[Note: Compressed lists] A sorted list is cut into blocks of 64 ids. Neighbouring ids
are near one another, so a block stores differences, each in the 1, 2, 3 or 4 bytes that
it needs: first the lengths, 2 bits each, then the bytes (the control codes of Lemire,
Kurz and Rupp, "Stream VByte", 2018). The bytes in front of a difference are counted by
a sum over 2-bit fields. Differences from the id just before would have to be added up
one by one; so element i is the difference from element i - lowbit(i), as in a Fenwick
tree ("A new data structure for cumulative frequency tables", 1994), and element 0 is
the id itself. An element is then a sum of 7 numbers at most, and all lanes of a warp
decode at once. A difference spans up to 32 ids instead of one, which costs a fraction
of a bit an edge. Blocks of a list, and lists, follow one another without gaps; the
device holds where each block starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pydirect.sampling import Graph
from pydirect.sampling.graph import check_one_type

BLOCK_EDGES = 64
"""Ids of a block; visit.cu has the same number."""
_LEVELS = 6
_MOST_NODES = 1 << 32
_CHUNK_EDGES = 1 << 20
# Words of 4 bytes are read whole.
_TAIL_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class CompressedGraph:
    """A `Graph` for traversal in fewer bytes of host memory; made by `compress`."""

    offsets: torch.Tensor
    """int64, shape (num_nodes + 1,), CPU: of edges, as in `Graph`."""

    first_blocks: torch.Tensor
    """int64, shape (num_nodes + 1,), CPU: the first block of each node's list."""

    positions: torch.Tensor
    """int64, shape (num_blocks + 1,), CPU: the first byte of each block."""

    data: torch.Tensor
    """uint8, CPU: see [Note: Compressed lists]."""

    weights: torch.Tensor | None
    """As in `Graph`, in the order of the sorted lists; not compressed."""

    symmetric: bool
    plain_bytes: int
    """Of the neighbours that were compressed."""

    def __post_init__(self) -> None:
        data = self.data
        if data.dtype != torch.uint8 or data.device.type != "cpu" or data.dim() != 1:
            raise ValueError(
                f"data: expects 1-D uint8 in host memory, got {data.dim()}-D "
                f"{data.dtype} on {data.device}"
            )
        if data.data_ptr() % 4 or not data.is_contiguous():
            raise ValueError(
                "data: expects contiguous memory that starts at a multiple of 4 bytes, "
                f"got strides {data.stride()} at {data.data_ptr() % 4} bytes behind one"
            )
        sizes = [len(self.offsets), len(self.first_blocks)]
        if (
            sizes[0] != sizes[1]
            or len(self.positions) != int(self.first_blocks[-1]) + 1
        ):
            raise ValueError(
                f"first_blocks: expects {sizes[0]} entries, the last one the number of "
                f"blocks ({len(self.positions) - 1}), got {sizes[1]} up to "
                f"{int(self.first_blocks[-1])}"
            )
        if self.num_bytes + _TAIL_BYTES > len(data):
            raise ValueError(
                f"data: expects {self.num_bytes} bytes and {_TAIL_BYTES} more, which "
                f"kernels may read, got {len(data)}"
            )

    @property
    def num_nodes(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_edges(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the lists, which stay in host memory."""
        return int(self.positions[-1])

    @property
    def ratio(self) -> float:
        """Bytes of the plain lists for one of the compressed; 1 without edges."""
        return self.plain_bytes / self.num_bytes if self.num_bytes else 1.0

    def decompress(self) -> Graph:
        """Make the graph with sorted lists and ids of 4 bytes where they suffice."""
        neighbors = torch.empty(
            self.num_edges, dtype=_dtype_of(self.num_nodes), device="cpu"
        )
        for nodes, edges in _chunks(self.offsets):
            index = torch.arange(nodes.start, nodes.stop, device="cpu")
            ends = self.offsets[index + 1]
            neighbors[edges] = self.neighbors_of(index, ends).to(neighbors.dtype)
        return Graph(
            offsets=self.offsets,
            neighbors=neighbors,
            weights=self.weights,
            symmetric=self.symmetric,
        )

    def neighbors_of(self, nodes: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Decode the beginnings of lists.

        Args:
            nodes: int64, shape (num_lists,), in any order.
            ends: int64, shape (num_lists,): decode each list up to this edge.

        Returns:
            int64, shape (number of these edges,), one list after the other.
        """
        begins = self.offsets[nodes]
        lists = _Lists.of(ends - begins)
        block = self.first_blocks[nodes][lists.owner] + lists.rank // BLOCK_EDGES
        rank = lists.rank % BLOCK_EDGES
        start = self.positions[block]
        code = self.data[start + rank // 4].long() >> (2 * (rank % 4)) & 3
        first = self.offsets[nodes + 1][lists.owner] - begins[lists.owner]
        in_block = (first - (lists.rank - rank)).clamp(max=BLOCK_EDGES)
        length = code + 1
        before = length.cumsum(0) - length
        at = start + (in_block + 3) // 4 + before - _at_block_start(before, rank)
        value = torch.zeros_like(rank)
        for byte in range(4):
            part = (code >= byte).nonzero().squeeze(1)
            value[part] += self.data[at[part] + byte].long() << (8 * byte)
        # From the widest differences down, each rests on one that is final.
        for level in reversed(range(_LEVELS)):
            part = (_lowest_bit(rank) == level).nonzero().squeeze(1)
            value[part] += value[part - (1 << level)]
        return value


def compress(graph: Graph, device: torch.device | str = "cpu") -> CompressedGraph:
    """Compress the lists of a graph; traversals then read fewer bytes of host memory.

    Results of traversals do not change. Lists are sorted on the way, weights with them.
    Takes some 100 bytes of memory for each of a million edges at a time, or for each of
    the longest list's.

    Args:
        graph: lists of targets (``Graph.from_edges(..., outgoing=True)``).
        device: that encodes the lists; a GPU is faster.

    Raises:
        ValueError: neighbours of another type, or more than 2**32 nodes.
    """
    check_one_type("compress", graph)
    check_num_nodes(graph.num_nodes)
    degrees = graph.degrees()
    first_blocks = torch.zeros(graph.num_nodes + 1, dtype=torch.int64, device="cpu")
    torch.cumsum((degrees + BLOCK_EDGES - 1) // BLOCK_EDGES, 0, out=first_blocks[1:])
    sizes = torch.zeros(int(first_blocks[-1]) + 1, dtype=torch.int64, device="cpu")
    weights = None if graph.weights is None else torch.empty_like(graph.weights)
    parts = []
    for nodes, edges in _chunks(graph.offsets):
        lists = _Lists.of(degrees[nodes].to(device))
        given = graph.neighbors[edges].to(device).long()
        ids, order = _sorted(given, lists, graph.num_nodes)
        if weights is not None and graph.weights is not None:
            weights[edges] = graph.weights[edges][order.cpu()]
        blocks = slice(
            int(first_blocks[nodes.start]) + 1, int(first_blocks[nodes.stop]) + 1
        )
        part, num_bytes = encode(ids, lists.rank)
        parts.append(part.cpu())
        sizes[blocks] = num_bytes.cpu()
    parts.append(torch.zeros(_TAIL_BYTES, dtype=torch.uint8, device="cpu"))
    return CompressedGraph(
        offsets=graph.offsets,
        first_blocks=first_blocks,
        positions=sizes.cumsum(0),
        data=torch.cat(parts),
        weights=weights,
        symmetric=graph.symmetric,
        plain_bytes=graph.neighbors.nbytes,
    )


def check_num_nodes(num_nodes: int) -> None:
    """
    Raises:
        ValueError: ids that do not fit the codes.
    """
    if num_nodes > _MOST_NODES:
        raise ValueError(
            f"compress expects at most {_MOST_NODES} nodes, whose numbers fit 4 bytes, "
            f"got {num_nodes}: traverse the graph as it is"
        )


@dataclass(frozen=True, kw_only=True)
class _Lists:
    """Edges one list after the other."""

    owner: torch.Tensor
    """int64: which list each edge is of, from 0."""

    rank: torch.Tensor
    """int64: its place in the list."""

    @classmethod
    def of(cls, degrees: torch.Tensor) -> "_Lists":
        where = degrees.device
        owner = torch.repeat_interleave(
            torch.arange(len(degrees), device=where), degrees
        )
        begin = degrees.cumsum(0) - degrees
        place = torch.arange(len(owner), device=where)
        return cls(owner=owner, rank=place - begin[owner])


def _chunks(offsets: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut nodes and edges at whole lists, up to `_CHUNK_EDGES` of each, or one list."""
    first, num_nodes = 0, len(offsets) - 1
    while first < num_nodes:
        bound = offsets[first] + _CHUNK_EDGES
        last = int(torch.searchsorted(offsets, bound, right=True)) - 1
        last = min(max(first + 1, last), first + _CHUNK_EDGES, num_nodes)
        yield slice(first, last), slice(int(offsets[first]), int(offsets[last]))
        first = last


def _sorted(
    ids: torch.Tensor, lists: _Lists, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids in ascending order within each list, and where they were."""
    ascending = (ids[1:] >= ids[:-1]) | (lists.owner[1:] != lists.owner[:-1])
    if bool(ascending.all()):
        return ids, torch.arange(len(ids), device=ids.device)
    # Below 2**53: a chunk has 2**20 lists, an id 32 bits.
    order = (lists.owner * num_nodes + ids).argsort(stable=True)
    return ids[order], order


def encode(ids: torch.Tensor, rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode the blocks of sorted lists; return the bytes, and how many each block has.

    Args:
        ids: int64, shape (num_edges,), 0 to 2**32 - 1.
        rank: int64: the place of each in its list.
    """
    rank = rank % BLOCK_EDGES
    edge = torch.arange(len(ids), device=ids.device)
    low = torch.bitwise_and(rank, -rank)
    value = torch.where(low > 0, ids - ids[edge - low], ids)
    code = torch.zeros_like(value)
    for bits in (8, 16, 24):
        code += value >= 1 << bits
    block = (rank == 0).long().cumsum(0) - 1
    in_block = torch.bincount(block)
    length = code + 1
    control = (in_block + 3) // 4
    sizes = control.clone().index_add_(0, block, length)
    start = sizes.cumsum(0) - sizes
    made = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device=ids.device)
    made.index_add_(0, start[block] + rank // 4, (code << (2 * (rank % 4))).byte())
    before = length.cumsum(0) - length
    at = (start + control)[block] + before - _at_block_start(before, rank)
    for byte in range(4):
        part = (code >= byte).nonzero().squeeze(1)
        made[at[part] + byte] = (value[part] >> (8 * byte) & 255).byte()
    return made, sizes


def _at_block_start(values: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Return for each edge the value at the first edge of its block."""
    return values[torch.arange(len(rank), device=rank.device) - rank]


def _lowest_bit(rank: torch.Tensor) -> torch.Tensor:
    """Find the number of the lowest bit that is set; `_LEVELS` for 0."""
    found = torch.full_like(rank, _LEVELS)
    for level in reversed(range(_LEVELS)):
        found[(rank >> level & 1).bool()] = level
    return found


def _dtype_of(num_nodes: int) -> torch.dtype:
    return torch.int32 if num_nodes < 2**31 else torch.int64
