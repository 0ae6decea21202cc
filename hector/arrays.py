"""The index arrays that compiled programs read, made from a graph when first asked.

The lowering collects which of them a program needs (Wu, section 3.3.6: the
preprocessing is read off the generated code); asking here is that preprocessing. All
of it happens once a graph, never in the hot path: host synchronisation is allowed
here and nowhere else, and not for graphs that are sampled anew in every step.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.compact import CompactMap, bounded_map
from hector.graph import HeteroGraph
from hector.ir.types import PAIR_DOMAINS, Domain, Index
from hector.kept import kept


class Segments(NamedTuple):
    """Items of a domain, grouped by where an index leads."""

    ptr: Tensor
    """[num_groups + 1]."""
    items: Tensor | None
    """[num_items] item ids, or None when the items already lie in order."""


class Tiles(NamedTuple):
    """Blocks of rows that never cross a type: the work list of a typed GEMM."""

    segment: Tensor
    """[num_tiles] type of each tile."""
    start: Tensor
    """[num_tiles] first row."""
    end: Tensor
    """[num_tiles] row after the last."""
    segment_ptr: Tensor
    """[num_types + 1] tiles of each type."""

    @property
    def num_tiles(self) -> int:
        return self.segment.numel()


class GraphArrays:
    """Index arrays of one graph on one device, cached by what they are."""

    def __init__(self, graph: HeteroGraph) -> None:
        self.graph = graph
        self.dtype = graph.index_dtype
        self._indices: dict[tuple[Domain, Index], Tensor] = {}
        self._segments: dict[tuple[Domain, Index], Segments] = {}
        self._tiles: dict[tuple[Domain, Index, int], Tiles] = {}
        self._segment_indices: dict[tuple[Domain, Index, Index], Tensor] = {}
        self._num_heavy: dict[tuple[Domain, Index, int], int] = {}
        self._longest: dict[tuple[Domain, Index], int] = {}
        self._remaps: dict[tuple[Domain, Index], Tensor] = {}
        self._numbers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.known: dict[object, Any] = {}
        """What back ends make of them."""

    def rows(self, domain: Domain) -> int:
        g = self.graph
        match domain:
            case Domain.NODE:
                return g.num_nodes
            case Domain.EDGE:
                return g.num_edges
            case Domain.SRC_PAIR:
                return self.pairs(Domain.SRC_PAIR).num_unique
            case Domain.DST_PAIR:
                return self.pairs(Domain.DST_PAIR).num_unique
            case Domain.ETYPE:
                return g.num_edge_types
            case Domain.NTYPE:
                return g.num_node_types
            case Domain.GLOBAL:
                return 1

    def pairs(self, domain: Domain) -> CompactMap:
        """The pairs of SRC_PAIR or DST_PAIR."""
        g = self.graph
        return g.unique_src() if domain is Domain.SRC_PAIR else g.unique_dst()

    def num_types(self, domain: Domain, index: Index) -> int:
        """Types of a typed index: one less than `type_ptr` has elements."""
        if index is Index.ALL:
            return 1
        node = domain is Domain.NODE
        return self.graph.num_node_types if node else self.graph.num_edge_types

    def index(self, domain: Domain, index: Index) -> Tensor:
        """[rows of domain] where each row leads."""
        return kept(
            self._indices,
            (domain, index),
            lambda: self._make_index(domain, index).to(self.dtype),
        )

    def _make_index(self, domain: Domain, index: Index) -> Tensor:
        g = self.graph
        if index is Index.ALL:
            return torch.zeros(self.rows(domain), dtype=self.dtype, device=g.device)
        if domain is Domain.EDGE:
            return {
                Index.SRC: lambda: g.src,
                Index.DST: lambda: g.dst,
                Index.ETYPE: lambda: g.edge_type,
                Index.SRC_PAIR: lambda: self.pairs(Domain.SRC_PAIR).edge_to_unique,
                Index.DST_PAIR: lambda: self.pairs(Domain.DST_PAIR).edge_to_unique,
            }[index]()
        if domain in PAIR_DOMAINS:
            pairs = self.pairs(domain)
            if index is Index.PAIR_NODE:
                return pairs.unique_node
            types = torch.arange(g.num_edge_types, device=g.device)
            return types.repeat_interleave(
                pairs.etype_ptr.diff(), output_size=pairs.num_unique
            )
        return g.node_type

    def type_ptr(self, domain: Domain, index: Index) -> Tensor:
        """[num_types + 1] int64: rows of each type; rows are sorted by type."""
        g = self.graph
        if index is Index.ALL:
            return torch.arange(2, device=g.device) * self.rows(domain)
        if domain is Domain.NODE:
            return g.node_type_ptr
        return self._by_relation(domain).etype_ptr

    def type_offsets(self, domain: Domain, index: Index) -> tuple[int, ...]:
        """`type_ptr` on the host, without a copy from the device after the first."""
        g = self.graph
        if index is Index.ALL:
            return (0, self.rows(domain))
        if domain is Domain.NODE:
            return g.node_type_offsets
        return self._by_relation(domain).etype_offsets

    def _by_relation(self, domain: Domain) -> HeteroGraph | CompactMap:
        """Edges or pairs, whose rows are sorted by relation."""
        return self.graph if domain is Domain.EDGE else self.pairs(domain)

    def segments(self, domain: Domain, index: Index) -> Segments:
        """The items of `domain` grouped by `index`."""
        key = (domain, index)
        return kept(self._segments, key, lambda: self._make_segments(domain, index))

    def _make_segments(self, domain: Domain, index: Index) -> Segments:
        g = self.graph
        if index in (Index.ETYPE, Index.NTYPE, Index.ALL):
            return Segments(self.type_ptr(domain, index).to(self.dtype), None)
        source = partial(self.pairs, Domain.SRC_PAIR)
        target = partial(self.pairs, Domain.DST_PAIR)
        if (domain, index) == (Domain.EDGE, Index.DST_PAIR):
            # Edges are sorted by (type, destination): the pairs are runs of edges.
            return Segments(target().edges().ptr.to(self.dtype), None)
        group = {
            (Domain.EDGE, Index.DST): lambda: g.csc(),
            (Domain.EDGE, Index.SRC): lambda: g.csr(),
            (Domain.EDGE, Index.SRC_PAIR): lambda: source().edges(),
            (Domain.SRC_PAIR, Index.PAIR_NODE): lambda: source().by_node(),
            (Domain.DST_PAIR, Index.PAIR_NODE): lambda: target().by_node(),
        }[domain, index]()
        return Segments(group.ptr.to(self.dtype), group.items.to(self.dtype))

    def segment_index(self, domain: Domain, group: Index, index: Index) -> Tensor:
        """Where `index` leads from the items of `segments(domain, group)`, in their
        order."""

        def make() -> Tensor:
            items = self.segments(domain, group).items
            found = self.index(domain, index)
            return found if items is None else found[items]

        return kept(self._segment_indices, (domain, group, index), make)

    def heavy_first(self, domain: Domain, index: Index) -> Tensor:
        """Groups by falling size: the row remapping that balances load (Table 3.6)."""

        def make() -> Tensor:
            sizes = self.segments(domain, index).ptr.diff()
            order = torch.argsort(sizes, descending=True, stable=True)
            return order.to(self.dtype)

        return kept(self._remaps, (domain, index), make)

    def num_heavy(self, domain: Domain, index: Index, rows: int) -> int:
        """Groups of more than `rows` rows: the first ones of `heavy_first`."""
        key = (domain, index, rows)
        if key not in self._num_heavy:
            sizes = self.segments(domain, index).ptr.diff()
            self._num_heavy[key] = int((sizes > rows).sum())
        return self._num_heavy[key]

    def longest(self, domain: Domain, index: Index) -> int:
        """Rows of the largest group. Counted without the segments: the cost model asks
        for groups that no kernel may ever walk."""
        key = (domain, index)
        if key not in self._longest:
            leads = self._make_index(domain, index)
            sizes = torch.bincount(leads) if leads.numel() else leads.new_zeros(1)
            self._longest[key] = int(sizes.max())
        return self._longest[key]

    def tiles(self, domain: Domain, index: Index, block: int) -> Tiles:
        """Row blocks of at most `block` rows, none crossing a type."""
        key = (domain, index, block)
        return kept(self._tiles, key, lambda: self._make_tiles(domain, index, block))

    def _make_tiles(self, domain: Domain, index: Index, block: int) -> Tiles:
        ptr = self.type_ptr(domain, index)
        counts = (ptr.diff() + block - 1) // block
        num = int(counts.sum())
        first = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        kinds = torch.arange(counts.numel(), device=ptr.device)
        segment = kinds.repeat_interleave(counts, output_size=num)
        within = torch.arange(num, device=ptr.device) - first[segment]
        start = ptr[segment] + within * block
        end = torch.minimum(start + block, ptr[segment + 1])
        return Tiles(
            *(t.to(self.dtype).contiguous() for t in (segment, start, end, first))
        )

    def number(self, name: str, dtype: torch.dtype) -> Tensor:
        """A number that the graph gives, as [rows, 1]: see `GRAPH_NUMBERS`."""

        def make() -> Tensor:
            sizes = self.segments(*GRAPH_NUMBERS[name]).ptr.diff()
            return sizes.to(dtype).view(-1, 1)

        return kept(self._numbers, (name, dtype), make)


class BoundedArrays(GraphArrays):
    """Index arrays whose sizes are bounds, so that none of them waits for the device.

    There is a row a pair that could exist and a tile that could be needed; those after
    the real ones are empty: they belong to no type, node or edge, and what kernels
    compute for them is read by none.
    """

    def __init__(self, graph: HeteroGraph) -> None:
        super().__init__(graph)
        self._pairs: dict[Domain, CompactMap] = {}

    def pairs(self, domain: Domain) -> CompactMap:
        g = self.graph
        node = g.src if domain is Domain.SRC_PAIR else g.dst
        return kept(
            self._pairs,
            domain,
            lambda: bounded_map(g.edge_type, node, g.num_edge_types, g.num_nodes),
        )

    def type_ptr(self, domain: Domain, index: Index) -> Tensor:
        if index is Index.ALL and domain in PAIR_DOMAINS:
            last = self.pairs(domain).etype_ptr[-1:]
            return torch.cat((torch.zeros_like(last), last))
        return super().type_ptr(domain, index)

    def _make_index(self, domain: Domain, index: Index) -> Tensor:
        if domain in PAIR_DOMAINS and index is Index.ETYPE:
            return self._types(domain, self.rows(domain))
        return super()._make_index(domain, index)

    def _types(self, domain: Domain, rows: int) -> Tensor:
        """[rows]: the last type for rows after all types."""
        ends = self.type_ptr(domain, Index.ETYPE)[1:]
        places = torch.arange(rows, device=ends.device)
        found = torch.searchsorted(ends, places, right=True)
        return found.clamp_(max=max(ends.numel() - 1, 0))

    def _make_tiles(self, domain: Domain, index: Index, block: int) -> Tiles:
        ptr = self.type_ptr(domain, index)
        num = self.rows(domain) // block + self.num_types(domain, index)
        if ptr.is_cuda:
            from hector.tile_kernels import tiled

            return Tiles(*tiled(ptr.contiguous(), num, block, self.dtype))
        counts = (ptr.diff() + block - 1) // block
        first = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        places = torch.arange(num, device=ptr.device)
        segment = torch.searchsorted(first[1:], places, right=True)
        segment = segment.clamp_(max=counts.numel() - 1)
        ends = ptr[segment + 1]
        start = torch.minimum(ptr[segment] + (places - first[segment]) * block, ends)
        end = torch.minimum(start + block, ends)
        return Tiles(
            *(t.to(self.dtype).contiguous() for t in (segment, start, end, first))
        )

    def num_heavy(self, domain: Domain, index: Index, rows: int) -> int:
        raise ValueError("expected a schedule that counts no groups for sampled graphs")


GRAPH_NUMBERS: dict[str, tuple[Domain, Index]] = {
    "in_degree": (Domain.EDGE, Index.DST),
    "out_degree": (Domain.EDGE, Index.SRC),
    "dst_pair_degree": (Domain.EDGE, Index.DST_PAIR),
    "src_pair_degree": (Domain.EDGE, Index.SRC_PAIR),
}
"""Group sizes that a program may ask for by name."""
