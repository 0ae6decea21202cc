"""Random graphs with the size, relation skew and compaction ratio of real ones.

[Note: generated graphs] A compiled relational layer's time depends on the number of
nodes, edges and types (Wu, Table 3.3), on how unevenly edges fall on relations and
nodes, and on the entity compaction ratio: unique (source, edge type) pairs over
edges (Wu, section 3.4.3). A generated graph meets the sizes exactly and the ratio
to a rounding error: each relation gets its share of distinct sources, each of them at
least one edge, and the rest of its edges fall on the same sources with a heavy tail.
Every relation goes from one node type to one node type, as HGT needs.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hector.graph import HeteroGraph


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """What a generated graph looks like."""

    num_nodes: int
    num_node_types: int
    num_edges: int
    num_edge_types: int
    compaction_ratio: float
    """Unique (source, edge type) pairs over edges, in (0, 1]."""
    relation_skew: float = 1.0
    """Zipf exponent of the relation sizes: 0 makes all equal."""
    degree_skew: float = 2.0
    """Power u ** skew that bends uniform picks of nodes towards a few hubs: 1 bends
    nothing."""
    ratio_source: str = "chosen"
    """Where the compaction ratio is from."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "num_node_types", "num_edge_types"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.num_node_types > self.num_nodes:
            raise ValueError(
                f"expected num_node_types <= num_nodes = {self.num_nodes}, got "
                f"{self.num_node_types}"
            )
        if self.num_edges < self.num_edge_types:
            raise ValueError(
                f"expected num_edges >= num_edge_types = {self.num_edge_types} (an "
                f"edge a relation), got {self.num_edges}"
            )
        if not 0 < self.compaction_ratio <= 1:
            raise ValueError(
                f"expected compaction_ratio in (0, 1], got {self.compaction_ratio}"
            )
        if self.relation_skew < 0 or self.degree_skew < 1:
            raise ValueError(
                "expected relation_skew >= 0 and degree_skew >= 1, got "
                f"{self.relation_skew} and {self.degree_skew}"
            )


def _table_3_3() -> dict[str, GraphSpec]:
    """Sizes as DGL and OGB publish them, which Table 3.3 rounds. Ratios: am and fb15k
    from Wu (57 and 26 %), mutag measured on the RDF graph with inverses; the
    others are estimates from the published type counts."""
    rows = {
        "aifb": (7_262, 7, 48_810, 104, 0.45, 1.0, "estimated"),
        "am": (1_885_136, 7, 5_668_682, 108, 0.57, 1.0, "Wu"),
        "bgs": (94_806, 27, 672_884, 122, 0.60, 1.0, "estimated"),
        "biokg": (93_773, 5, 4_762_678, 51, 0.06, 1.0, "estimated"),
        "fb15k": (14_541, 1, 620_232, 474, 0.26, 0.8, "Wu"),
        "mag": (1_939_743, 4, 21_111_007, 4, 0.15, 0.5, "estimated"),
        "mutag": (27_163, 5, 148_100, 50, 0.51, 1.2, "measured"),
        "wikikg2": (2_500_604, 1, 16_109_182, 535, 0.70, 1.2, "estimated"),
    }
    return {
        name: GraphSpec(
            num_nodes=nodes,
            num_node_types=node_types,
            num_edges=edges,
            num_edge_types=edge_types,
            compaction_ratio=ratio,
            relation_skew=skew,
            ratio_source=source,
        )
        for name, (nodes, node_types, edges, edge_types, ratio, skew, source) in (
            rows.items()
        )
    }


TABLE_3_3 = _table_3_3()


def scaled(spec: GraphSpec, factor: float) -> GraphSpec:
    """`spec` with nodes and edges times `factor`, types and ratio unchanged."""
    return replace(
        spec,
        num_nodes=max(int(spec.num_nodes * factor), spec.num_node_types),
        num_edges=max(int(spec.num_edges * factor), spec.num_edge_types),
    )


def generate(
    spec: GraphSpec, *, seed: int = 0, device: torch.device | str = "cpu"
) -> HeteroGraph:
    """A graph as [Note: generated graphs] says; the same for a seed on any device.

    Raises ValueError when the ratio cannot be met: more distinct sources than the
    relations' source types hold.
    """
    gen = torch.Generator().manual_seed(seed)
    node_sizes = _zipf_sizes(spec.num_nodes, spec.num_node_types, 1.0)
    edge_sizes = _zipf_sizes(spec.num_edges, spec.num_edge_types, spec.relation_skew)
    wanted = round(spec.compaction_ratio * spec.num_edges)
    ends = _endpoint_types(edge_sizes, node_sizes, wanted, gen)
    from_sizes = [node_sizes[s] for s, _ in ends]
    to_sizes = [node_sizes[d] for _, d in ends]
    num_src = _num_distinct(edge_sizes, from_sizes, wanted)
    # The destinations' ratio follows the sources' as far as their types have nodes.
    caps = [min(e, n) for e, n in zip(edge_sizes, to_sizes, strict=True)]
    num_dst = _num_distinct(edge_sizes, to_sizes, min(wanted, sum(caps)))
    src, dst = [], []
    for i, size in enumerate(edge_sizes):
        s = _side(size, num_src[i], from_sizes[i], spec.degree_skew, gen)
        d = _side(size, num_dst[i], to_sizes[i], spec.degree_skew, gen)
        src.append(s)
        dst.append(d[torch.randperm(size, generator=gen, device="cpu")])
    first, label = _labels(node_sizes, gen)
    kinds = torch.arange(spec.num_edge_types, device="cpu")
    counts = torch.tensor(edge_sizes, device="cpu")
    kind = kinds.repeat_interleave(counts)
    offset = torch.tensor([[first[s], first[d]] for s, d in ends], device="cpu")[kind]
    graph = HeteroGraph.from_arrays(
        label[torch.cat(src) + offset[:, 0]].to(device),
        label[torch.cat(dst) + offset[:, 1]].to(device),
        kind.to(device),
        node_type=torch.arange(len(node_sizes), device="cpu").repeat_interleave(
            torch.tensor(node_sizes, device="cpu")
        ),
        num_edge_types=spec.num_edge_types,
    )
    names = tuple((f"n{s}", f"r{i}", f"n{d}") for i, (s, d) in enumerate(ends))
    return graph.replace(edge_type_names=names)


def _zipf_sizes(total: int, count: int, skew: float) -> list[int]:
    """`total` split into `count` parts of at least 1, falling as rank ** -skew."""
    weights = [(rank + 1) ** -skew for rank in range(count)]
    scale = (total - count) / sum(weights)
    sizes = [1 + math.floor(w * scale) for w in weights]
    for i in range(total - sum(sizes)):
        sizes[i % count] += 1
    return sizes


def _endpoint_types(
    edge_sizes: list[int], node_sizes: list[int], wanted: int, gen: torch.Generator
) -> list[tuple[int, int]]:
    """(source type, destination type) a relation: large types are picked more often,
    and the largest relations start at the largest types. Relations move to the
    largest type until there are `wanted` distinct sources to pick.
    """
    weights = torch.tensor(node_sizes, dtype=torch.float64, device="cpu").sqrt()
    picks = torch.multinomial(
        weights, 2 * len(edge_sizes), replacement=True, generator=gen
    )
    sources = sorted(picks[: len(edge_sizes)].tolist())
    for i, kind in enumerate(sources):
        caps = [min(e, node_sizes[s]) for e, s in zip(edge_sizes, sources, strict=True)]
        if sum(caps) >= wanted:
            break
        sources[i] = 0 if kind else kind
    return list(zip(sources, picks[len(edge_sizes) :].tolist(), strict=True))


def _num_distinct(edge_sizes: list[int], limits: list[int], wanted: int) -> list[int]:
    """Distinct endpoints a relation: a common share of its edges, at least 1, at most
    its edges and its node type's nodes; they sum to `wanted`."""
    caps = [min(e, n) for e, n in zip(edge_sizes, limits, strict=True)]
    if not len(edge_sizes) <= wanted <= sum(caps):
        raise ValueError(
            f"expected {len(edge_sizes)} to {sum(caps)} distinct (edge type, source) "
            f"pairs over {sum(edge_sizes)} edges, got {wanted}; set a larger "
            "data.scale (more edges), or another compaction_ratio"
        )

    def at(share: float) -> list[int]:
        return [
            min(max(1, math.floor(share * e)), c)
            for e, c in zip(edge_sizes, caps, strict=True)
        ]

    low, high = 0.0, float(max(edge_sizes))
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) <= wanted else (low, middle)
    counts = at(low)
    missing = wanted - sum(counts)
    for i, cap in enumerate(caps):
        step = min(missing, cap - counts[i])
        counts[i] += step
        missing -= step
    return counts


def _stride(size: int, gen: torch.Generator) -> int:
    """A random step that visits all of 0..size - 1: coprime to `size`."""
    if size == 1:
        return 1
    step = int(torch.randint(1, size, (1,), generator=gen, device="cpu"))
    while math.gcd(step, size) != 1:
        step = step % (size - 1) + 1
    return step


def _side(
    num_edges: int, distinct: int, size: int, skew: float, gen: torch.Generator
) -> Tensor:
    """One endpoint of a relation's edges, int64 [num_edges] in [0, size): `distinct`
    different nodes, each at least once, low numbers more often."""
    start = int(torch.randint(0, size, (1,), generator=gen, device="cpu"))
    pool = (start + torch.arange(distinct, device="cpu") * _stride(size, gen)) % size
    pool = pool.sort().values
    uniform = torch.rand(
        num_edges - distinct, generator=gen, dtype=torch.float64, device="cpu"
    )
    extra = (uniform.pow_(skew) * distinct).long().clamp_(max=distinct - 1)
    return torch.cat([pool, pool[extra]])


def _labels(node_sizes: list[int], gen: torch.Generator) -> tuple[list[int], Tensor]:
    """The first node of each type, and a random renumbering inside the types: hubs
    are low numbers in every relation and must not be neighbours in memory."""
    first = [sum(node_sizes[:t]) for t in range(len(node_sizes))]
    parts = [
        f + torch.randperm(n, generator=gen, device="cpu")
        for f, n in zip(first, node_sizes, strict=True)
    ]
    return first, torch.cat(parts)
