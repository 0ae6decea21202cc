"""Uniform neighbour sampling without replacement (GraphSAGE; section 4.2.1).

Written in whole-tensor operations, which release the interpreter lock, so that several
threads sample several batches at once. The semantics are those of PyG's
``NeighborLoader`` with its defaults: hop h samples neighbours of the nodes that hop
h - 1 has added, and every node appears once in a batch. A node that is twice among the
seeds has a row for each, and edges lead from the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pydirect.sampling.graph import Graph, check_nodes, check_one_type


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """A sampled subgraph, with node numbers of its own."""

    node_ids: torch.Tensor
    """int64, shape (num_nodes,): global ids; the seeds come first, as they were
    given, then hop by hop."""

    edge_index: torch.Tensor
    """int64, shape (2, num_edges): local sources and targets, hop by hop."""

    num_seeds: int
    num_nodes_per_hop: tuple[int, ...]
    """Nodes added: seeds, first hop, second hop, ... (PyG's num_sampled_nodes)."""

    num_edges_per_hop: tuple[int, ...]
    edge_ids: torch.Tensor | None = None
    """int64, shape (num_edges,): the edges, as numbered in the graph; None from
    `NeighborSampler`, which does not keep them."""

    weight: float = 1.0
    """Of this batch's mean loss in the mean over the processes of a run."""


class NeighborSampler:
    """Samples batches of one graph. One object per thread: it holds scratch memory."""

    def __init__(self, graph: Graph, fanouts: Sequence[int]) -> None:
        """``fanouts``: neighbours a node and hop, at most; -1 for all of them.

        Raises:
            ValueError: no hop, a fanout that is neither positive nor -1, or neighbours
                of another type (`HeteroDeviceSampler` takes those).
        """
        check_one_type("NeighborSampler", graph)
        if not fanouts or any(k == 0 or k < -1 for k in fanouts):
            raise ValueError(
                f"fanouts: expects one positive number (or -1) a hop, got {fanouts}"
            )
        self._graph = graph
        self._fanouts = tuple(fanouts)
        # Local number of each global node, -1 where the batch does not have it.
        self._local = torch.full(
            (graph.num_nodes,), -1, dtype=torch.int64, device="cpu"
        )

    def sample(self, seeds: torch.Tensor, seed: int) -> SampledBatch:
        """Sample the neighbourhood of ``seeds``.

        Args:
            seeds: int64, shape (num_seeds,), CPU.
            seed: random seed: the batch depends on nothing else.

        Raises:
            ValueError: seeds that are no nodes.
        """
        check_nodes("seeds", seeds, self._graph.num_nodes)
        generator = torch.Generator().manual_seed(seed)
        local = self._local
        local[seeds] = len(seeds)
        numbers = torch.arange(len(seeds), device="cpu")
        local.scatter_reduce_(0, seeds, numbers, "amin")
        nodes, edges = [seeds], []
        num_nodes = len(seeds)
        try:
            frontier, first = seeds, 0
            for fanout in self._fanouts:
                source, target = self._hop(frontier, fanout, generator)
                added = self._number(source, num_nodes)
                nodes.append(added)
                edges.append(torch.stack([local[source], target + first]))
                first, frontier = num_nodes, added
                num_nodes += len(added)
        finally:
            for part in nodes:
                local[part] = -1
        return SampledBatch(
            node_ids=torch.cat(nodes),
            edge_index=torch.cat(edges, dim=1),
            num_seeds=len(seeds),
            num_nodes_per_hop=tuple(len(part) for part in nodes),
            num_edges_per_hop=tuple(part.shape[1] for part in edges),
        )

    def _number(self, source: torch.Tensor, num_nodes: int) -> torch.Tensor:
        """Give the new nodes among ``source`` the next local numbers; returns them.

        Duplicates are found without sorting: each occurrence writes its position, and
        the one that is read back is kept.
        """
        unknown = source[self._local[source] < 0]
        position = torch.arange(len(unknown), device="cpu")
        self._local[unknown] = position
        added = unknown[self._local[unknown] == position]
        self._local[added] = torch.arange(
            num_nodes, num_nodes + len(added), device="cpu"
        )
        return added

    def _hop(
        self, frontier: torch.Tensor, fanout: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Global sources and positions in ``frontier``, int64, shape (num_edges,)."""
        begin = self._graph.offsets[frontier]
        degree = self._graph.offsets[frontier + 1] - begin
        if fanout < 0:
            position, rank = _ranks(degree)
        else:
            few = degree <= fanout
            position, rank = _ranks(torch.where(few, degree, 0))
            many = torch.nonzero(~few).squeeze(1)
            chosen = _distinct(degree[many], fanout, generator)
            position = torch.cat([position, many.repeat_interleave(fanout)])
            rank = torch.cat([rank, chosen.flatten()])
        source = self._graph.neighbors[begin[position] + rank]
        return source.long(), position


def _ranks(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Item i repeated counts[i] times, and the rank of each repetition."""
    item = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    start = counts.cumsum(0) - counts
    return item, torch.arange(len(item), device="cpu") - start[item]


def _distinct(
    sizes: torch.Tensor, num: int, generator: torch.Generator
) -> torch.Tensor:
    """``num`` distinct numbers below each size, uniformly: shape (len(sizes), num).

    Floyd's algorithm, all rows at once: step j draws below size - num + j + 1, and
    takes size - num + j itself where the draw is already taken. Every size must exceed
    ``num``.
    """
    draws = torch.rand(
        num, len(sizes), generator=generator, dtype=torch.float64, device="cpu"
    )
    # Few operators in the loop: each gives up the interpreter lock and asks for it
    # again, beside the threads that fetch and train.
    last = sizes - num + torch.arange(num, device="cpu")[:, None]
    chosen = (draws * (last + 1)).long()
    for j in range(1, num):
        taken = (chosen[:j] == chosen[j]).any(0)
        torch.where(taken, last[j], chosen[j], out=chosen[j])
    return chosen.t()
