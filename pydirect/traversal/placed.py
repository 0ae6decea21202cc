"""A graph made ready for traversal: node data on the device, edges where they are."""

import functools
from dataclasses import dataclass

import torch

from pydirect.coalesce import LINE_BYTES, SECTOR_BYTES
from pydirect.memory import device_alias, pin
from pydirect.sampling import Graph
from pydirect.sampling.graph import check_one_type
from pydirect.traversal.compressed import BLOCK_EDGES, CompressedGraph
from pydirect.traversal.walk import Walk

BLOCK_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class HotBlocks:
    """Blocks of the edge list (and of the weights) that GPU memory holds too."""

    edges: torch.Tensor
    """Shape (num_slots * 2**block_shift,)."""

    weights: torch.Tensor | None
    slots: torch.Tensor
    """int32: the slot of each block of the edge list, -1 for those on the host only."""

    block_shift: int

    @property
    def num_slots(self) -> int:
        return len(self.edges) >> self.block_shift


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Where the blocks of compressed lists lie, in the device's memory."""

    first: torch.Tensor
    """int64, shape (num_nodes + 1,): see `CompressedGraph.first_blocks`."""

    positions: torch.Tensor
    """int64, shape (num_blocks + 1,): first bytes."""


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Nodes whose lists are to be visited, with the units that they touch: lines, or
    blocks of compressed lists."""

    nodes: torch.Tensor | None
    """int64, ascending, all with edges; None: every node of the graph, in order."""

    sums: torch.Tensor
    """int64: inclusive sums of the units that each list adds to those before it."""

    num_nodes: int
    num_edges: int
    num_units: int
    limit: int
    """Edges that are visited of each list, from its first."""


class PlacedGraph:
    """A graph whose edges a device reads in place; made by `place`.

    Traversals of one graph share it: pinning, the device's offsets and the hot blocks
    are paid for once.
    """

    def __init__(
        self,
        graph: Graph | CompressedGraph,
        device: torch.device,
        walk: Walk,
        back: "PlacedGraph | None" = None,
    ) -> None:
        """``back``: the same edges, listed at their targets."""
        self.graph = graph
        self.back = self if graph.symmetric else back
        """Lists of sources, where there are any."""
        self.device = device
        self.walk = walk
        self.offsets = graph.offsets.to(device)
        self.blocks: Blocks | None = None
        """Of a compressed graph."""
        if isinstance(graph, CompressedGraph):
            self.blocks = Blocks(
                first=graph.first_blocks.to(device),
                positions=graph.positions.to(device),
            )
        data = graph.data if isinstance(graph, CompressedGraph) else graph.neighbors
        self.edges = _reachable(data, device)
        """Tensor on ``device`` over the host memory of the edges: ids, or the bytes of
        compressed lists."""
        self.weights = None
        if graph.weights is not None:
            self.weights = _reachable(graph.weights, device)
        self.hot: HotBlocks | None = None
        self.has_edges = self.offsets[1:] > self.offsets[:-1]
        self.num_with_edges = int(self.has_edges.sum())
        # Edges (or bytes) between the start of a line and the first one.
        self.shift = self.edges.data_ptr() % LINE_BYTES // self.edges.element_size()

    @property
    def num_nodes(self) -> int:
        return self.graph.num_nodes

    @property
    def num_edges(self) -> int:
        return self.graph.num_edges

    def unit_shift(self, *, weighted: bool) -> int:
        """Log2 of the edges that are read together; see visit.cu."""
        if self.blocks is not None:
            return BLOCK_EDGES.bit_length() - 1
        narrowest = self.edges.element_size()
        if weighted and self.weights is not None:
            narrowest = min(narrowest, self.weights.element_size())
        return (LINE_BYTES // narrowest).bit_length() - 1

    def frontier(
        self,
        nodes: torch.Tensor | None,
        *,
        weighted: bool = False,
        limit: int | None = None,
    ) -> Frontier:
        """Count the lines of a sorted frontier; waits for the device.

        Args:
            nodes: int64, ascending, distinct, each with edges; None: all nodes.
            weighted: weights are read next to the ids.
            limit: visit that many edges of each list at most.
        """
        if nodes is None and self.num_with_edges < self.num_nodes:
            nodes = self.has_edges.nonzero().squeeze(1)
        begin = self.offsets[:-1] if nodes is None else self.offsets[nodes]
        end = self.offsets[1:] if nodes is None else self.offsets[nodes + 1]
        bound = self.num_edges if limit is None else limit
        if limit is not None:
            end = torch.minimum(end, begin + limit)
        num_edges = (end - begin).sum()
        if self.blocks is None:
            unit = self.unit_shift(weighted=weighted)
            last = (end - 1 + self.shift) >> unit
            first = (begin + self.shift) >> unit
            added = last - first + 1
            # A list may start on the line on which the one before it ends.
            added[1:] -= (first[1:] <= last[:-1]).long()
        else:
            added = (end - begin + BLOCK_EDGES - 1) // BLOCK_EDGES
        sums = torch.cumsum(added, 0)
        totals = [0, 0]
        if len(sums):
            totals = torch.stack([num_edges, sums[-1]]).tolist()
        return Frontier(
            nodes=nodes,
            sums=sums,
            num_nodes=len(sums),
            num_edges=totals[0],
            num_units=totals[1],
            limit=bound,
        )

    def union_bytes(self, frontier: Frontier, *, weighted: bool = False) -> int:
        """Bytes that requests for a frontier's lists move, in 32-byte sectors, where
        no sector is read twice; waits for the device."""
        if frontier.num_nodes == 0:
            return 0
        nodes = frontier.nodes
        begin = self.offsets[:-1] if nodes is None else self.offsets[nodes]
        end = self.offsets[1:] if nodes is None else self.offsets[nodes + 1]
        end = torch.minimum(end, begin + frontier.limit)
        arrays = []
        if self.blocks is None:
            arrays.append((self.edges, begin, end))
        else:
            blocks = (
                self.blocks.first[:-1] if nodes is None else self.blocks.first[nodes]
            )
            after = blocks + (end - begin + BLOCK_EDGES - 1) // BLOCK_EDGES
            where = self.blocks.positions
            arrays.append((self.edges, where[blocks], where[after]))
        if weighted and self.weights is not None:
            arrays.append((self.weights, begin, end))
        total = 0
        for array, begin, end in arrays:
            per = SECTOR_BYTES // array.element_size()
            shift = array.data_ptr() % SECTOR_BYTES // array.element_size()
            first, last = (begin + shift) // per, (end - 1 + shift) // per
            shared = (first[1:] <= last[:-1]).sum()
            total += int((last - first + 1).sum() - shared) * SECTOR_BYTES
        return total

    @functools.cached_property
    def whole(self) -> Frontier:
        """All edges."""
        return self.frontier(None)

    def keep_hot(self, num_bytes: int) -> None:
        """Copy blocks of the edge list into the device's memory, ``num_bytes`` at most
        (weights included): those with the longest lists, whose nodes are reached from
        everywhere. 0 drops them.

        Raises:
            ValueError: fewer bytes than none, or blocks of compressed lists.
        """
        if num_bytes < 0:
            raise ValueError(f"hot_bytes: expects 0 or more, got {num_bytes}")
        if num_bytes and self.blocks is not None:
            raise ValueError(
                f"hot_bytes: expects 0 for a compressed graph, got {num_bytes}: the "
                "device reads all of its lists from host memory"
            )
        self.hot = None
        size = self.edges.element_size()
        shift = (BLOCK_BYTES // size).bit_length() - 1
        each = size + (0 if self.weights is None else self.weights.element_size())
        # Blocks are counted from the line in front of the edges; partial ones at the
        # ends stay on the host.
        first = 1 if self.shift else 0
        last = (self.num_edges + self.shift) >> shift
        num_slots = min(num_bytes // (each << shift), last - first)
        if num_slots <= 0:
            return
        begins = (self.offsets[:-1][self.has_edges] + self.shift) >> shift
        num_lists = torch.bincount(begins, minlength=last + 1)[first:last]
        chosen = num_lists.argsort(stable=True)[:num_slots].sort().values + first
        slots = torch.full((last + 1,), -1, dtype=torch.int32, device=self.device)
        slots[chosen] = torch.arange(num_slots, dtype=torch.int32, device=self.device)
        weights = self.weights
        self.hot = HotBlocks(
            edges=_blocks(self.edges, chosen, shift, self.shift),
            weights=(
                None if weights is None else _blocks(weights, chosen, shift, self.shift)
            ),
            slots=slots,
            block_shift=shift,
        )


def place(
    graph: Graph | CompressedGraph,
    device: torch.device | str = "auto",
    *,
    walk: Walk | str = Walk.LINES,
    hot_bytes: int = 0,
    reverse: Graph | CompressedGraph | None = None,
) -> PlacedGraph:
    """Make a graph ready for traversal on a device.

    The edges stay where they are: host memory is pinned in place and the GPU reads it
    over the link. (`pydirect.memory.to_table` copies edges to where GPUs read random
    lines fastest.) Offsets, 8 bytes a node, go to the device; of a compressed graph 16
    a node and 8 a block of 64 edges.

    Args:
        graph: lists of targets (``Graph.from_edges(..., outgoing=True)``), or what
            `compress` made of it.
        device: "auto" takes the GPU if there is one; without one the same results come
            from vectorised CPU code.
        walk: how kernels read the lists; compressed ones are read block by block.
        hot_bytes: of the edge list to keep in GPU memory.
        reverse: ``graph.reverse()`` of a directed graph, in host memory as well: lets
            breadth-first search read backwards and PageRank add up without conflicts.

    Raises:
        ValueError: no such device, an unknown walk, ``hot_bytes`` below 0, or a
            ``reverse`` that does not have the graph's numbers of nodes and edges or is
            not compressed where the graph is; a walk of its own or ``hot_bytes`` for a
            compressed graph.
        HostMemoryError: the edges cannot be pinned.
    """
    compressed = isinstance(graph, CompressedGraph)
    if compressed and Walk(walk) is not Walk.LINES:
        raise ValueError(
            "walk: expects 'lines' for a compressed graph, whose blocks are read one a "
            f"warp, got {Walk(walk).value!r}"
        )
    if isinstance(graph, Graph):
        check_one_type("place", graph)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expects a GPU for {device}, there is none: say cpu")
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    back = None
    if reverse is not None:
        sizes = [(g.num_nodes, g.num_edges) for g in (graph, reverse)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"reverse: expects {sizes[0][0]} nodes and {sizes[0][1]} edges, as the "
                f"graph has, got {sizes[1][0]} and {sizes[1][1]}"
            )
        if isinstance(reverse, CompressedGraph) is not compressed:
            raise ValueError(
                "reverse: expects both directions compressed or neither, got one: pass "
                "compress(graph.reverse())"
            )
        back = PlacedGraph(reverse, target, Walk(walk))
    placed = PlacedGraph(graph, target, Walk(walk), back)
    placed.keep_hot(hot_bytes)
    return placed


def _reachable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return device_alias(pin(tensor) if device.type == "cuda" else tensor, device)


def _blocks(
    source: torch.Tensor, chosen: torch.Tensor, shift: int, offset: int
) -> torch.Tensor:
    """Blocks of ``source``, one after the other, on its device."""
    size = 1 << shift
    first = 1 if offset else 0
    begin = first * size - offset
    whole = (len(source) - begin) >> shift
    rows = source[begin : begin + (whole << shift)].view(whole, size)
    return rows.index_select(0, chosen - first).flatten()
