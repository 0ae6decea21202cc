"""DGL's mini-batches of edges: seeds are edges, and the blocks those of their ends."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hector.message.blocks import edges_by_type
from hector.message.dataloading import BlockSampler
from hector.message.graph import EID, NID, Graph
from hector.message.hetero import HeteroGraph, as_hetero
from hector.message.transforms import compact_graphs
from hector.message.typed import EdgeType
from hector.tracing import untraced

AnyGraph = Graph | HeteroGraph
Ends = tuple[Tensor, Tensor]


class _Negatives:
    """Draw edges that stand against given ones."""

    def __call__(self, g: AnyGraph, eids: Any) -> Any:
        """Return sources and destinations for edges `eids`, by type where they are."""
        if isinstance(eids, Mapping):
            kinds = {g.to_canonical_etype(k): ids for k, ids in eids.items()}
            return {k: self._generate(g, ids, k) for k, ids in kinds.items()}
        return self._generate(g, eids, g.to_canonical_etype(None))

    def _generate(self, g: Any, eids: Tensor, canonical_etype: EdgeType) -> Ends:
        raise NotImplementedError(
            f"{type(self).__name__} expects a method "
            "_generate(g, eids, canonical_etype), as DGL's subclasses have"
        )


class Uniform(_Negatives):
    """Draw `k` destinations for the source of each edge, whatever edges there are."""

    def __init__(self, k: int) -> None:
        self.k = k

    def _generate(self, g: Any, eids: Tensor, canonical_etype: EdgeType) -> Ends:
        src = g[canonical_etype].find_edges(eids)[0].repeat_interleave(self.k)
        count = g[canonical_etype].num_dst_nodes()
        return src, torch.randint(count, src.shape, device=src.device)


PerSourceUniform = Uniform


class GlobalUniform(_Negatives):
    """Draw `k` pairs an edge that are no edges; see `global_uniform_negative_sampling`,
    which may find fewer."""

    def __init__(
        self, k: int, exclude_self_loops: bool = True, replace: bool = False
    ) -> None:
        self.k, self.loops, self.replace = k, exclude_self_loops, replace

    def _generate(self, g: Any, eids: Tensor, canonical_etype: EdgeType) -> Ends:
        return global_uniform_negative_sampling(
            g, eids.numel() * self.k, self.loops, self.replace, canonical_etype
        )


@untraced
def global_uniform_negative_sampling(
    g: AnyGraph,
    num_samples: int,
    exclude_self_loops: bool = True,
    replace: bool = False,
    etype: Any = None,
) -> Ends:
    """Return up to `num_samples` sources and destinations between which there is no
    edge of a type, drawn uniformly; fewer where there are not many."""
    kind = g.to_canonical_etype(etype)
    r = g[kind]
    width, rows = r.num_dst_nodes(), r.num_src_nodes()
    src, dst = r.edges()
    there = (src * width + dst).unique()
    found = there[:0]
    for _ in range(20):
        if found.numel() >= num_samples or not width * rows:
            break
        more = torch.randint(rows * width, (2 * num_samples,), device=g.device)
        more = more[~torch.isin(more, there)]
        if exclude_self_loops and kind[0] == kind[2]:
            more = more[more // width != more % width]
        found = torch.cat((found, more))
        if not replace:
            found = found.unique()
            found = found[torch.randperm(found.numel(), device=g.device)]
    found = found[:num_samples]
    return found // max(width, 1), found % max(width, 1)


class EdgePredictionSampler(BlockSampler):
    """Make a graph of the edges of a batch, one of edges against them, and the blocks
    of the ends of both. See `as_edge_prediction_sampler`."""

    of_edges = True

    def __init__(
        self,
        sampler: BlockSampler,
        exclude: str | Callable[[Any], Any] | None = None,
        reverse_eids: Tensor | Mapping[Any, Tensor] | None = None,
        reverse_etypes: Mapping[Any, Any] | None = None,
        negative_sampler: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        kinds = (None, "self", "reverse_id", "reverse_types")
        if not callable(exclude) and exclude not in kinds:
            raise ValueError(f"expected exclude of {kinds[1:]}, got {exclude!r}")
        if exclude == "reverse_id" and reverse_eids is None:
            raise ValueError("expected reverse_eids for exclude='reverse_id'")
        if exclude == "reverse_types" and reverse_etypes is None:
            raise ValueError("expected reverse_etypes for exclude='reverse_types'")
        self.sampler, self.exclude, self.negatives = sampler, exclude, negative_sampler
        self.reverse_eids, self.reverse_etypes = reverse_eids, reverse_etypes

    @untraced
    def sample(
        self, g: AnyGraph, seed_nodes: Any, exclude_eids: Any = None
    ) -> tuple[Any, ...]:
        """Return input nodes, the graph of the edges `seed_nodes`, that of the edges
        against them if there is a sampler of those, and blocks. Both graphs have the
        nodes that the last block leads to."""
        whole = as_hetero(g)
        eids = edges_by_type(whole, seed_nodes)
        given: Any = eids if isinstance(g, HeteroGraph) else next(iter(eids.values()))
        pairs = [g.edge_subgraph(given, False)]
        ids = {k: pairs[0][k].edata[EID] for k in g.canonical_etypes}
        if self.negatives is not None:
            pairs.append(self._against(g, self.negatives(g, seed_nodes)))
        pairs = compact_graphs(pairs)
        for k, before in ids.items():
            pairs[0][k].edata[EID] = before
        nodes: Any = {n: pairs[0].frame_of(n)[NID] for n in g.ntypes}
        nodes = nodes if len(nodes) > 1 else next(iter(nodes.values()))
        without = self._without(whole, eids)
        inputs, _, blocks = self.sampler.sample(g, nodes, without)
        return (inputs, *pairs, blocks)

    @staticmethod
    def _against(g: AnyGraph, ends: Any) -> Any:
        if isinstance(g, Graph):
            return Graph(*ends, num_nodes=g.num_nodes(), programs=g.programs)
        if not isinstance(ends, Mapping):
            ends = {g.to_canonical_etype(None): ends}
        none = torch.empty(0, dtype=torch.int64, device=g.device)
        edges = {k: ends.get(k, (none, none)) for k in g.canonical_etypes}
        sizes = {n: g.num_nodes(n) for n in g.ntypes}
        return HeteroGraph(edges, sizes, programs=g.programs)

    def _without(self, g: HeteroGraph, eids: dict[EdgeType, Tensor]) -> Any:
        """Return the edges that no block may have."""
        if self.exclude is None:
            return None
        if callable(self.exclude):
            return self.exclude(eids if len(eids) > 1 else next(iter(eids.values())))
        found = {k: [ids] for k, ids in eids.items()}
        if self.exclude == "reverse_id":
            back: Any = self.reverse_eids
            if not isinstance(back, Mapping):
                back = dict.fromkeys(eids, back)
            by_type = {g.to_canonical_etype(k): t for k, t in back.items()}
            for k, ids in eids.items():
                found[k].append(by_type[k][ids])
        elif self.exclude == "reverse_types":
            for k, other in (self.reverse_etypes or {}).items():
                one = g.to_canonical_etype(k)
                if one in eids:
                    found.setdefault(g.to_canonical_etype(other), []).append(eids[one])
        return {k: torch.cat(parts).unique() for k, parts in found.items()}


def as_edge_prediction_sampler(
    sampler: BlockSampler,
    exclude: str | Callable[[Any], Any] | None = None,
    reverse_eids: Tensor | Mapping[Any, Tensor] | None = None,
    reverse_etypes: Mapping[Any, Any] | None = None,
    negative_sampler: Callable[[Any, Any], Any] | None = None,
    prefetch_labels: Any = None,
) -> EdgePredictionSampler:
    """Return a sampler of edges that takes its blocks from a sampler of nodes.

    `exclude`: edges that no block has: "self" those of the batch; "reverse_id" also
    `reverse_eids` of them; "reverse_types" also those of the same ids of types
    `reverse_etypes`; or what a function returns for the batch.
    """
    return EdgePredictionSampler(
        sampler, exclude, reverse_eids, reverse_etypes, negative_sampler
    )
