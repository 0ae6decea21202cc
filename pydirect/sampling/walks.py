"""Random walks along edges of one or several types: uniform, weighted, node2vec,
metapaths with restarts, and the neighbours that PinSAGE makes of them.

[Note: Keyed walks] Step s of walk i of a call reads numbers of a counter of (i, s)
under a key of (seed, batch), as draws do (see [Note: Keyed draws]). So a walk depends
on nothing else, and is the same on a CPU and on a GPU; two walks from one node differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from pydirect.sampling import philox
from pydirect.sampling.device import EdgeType
from pydirect.sampling.graph import lists_of
from pydirect.sampling.resident import Residence, ResidentGraph, settle

_ATTEMPTS = 32
"""Candidates of a node2vec step; after so many its weights are added up."""
_STRIDE = 2 * (_ATTEMPTS + 1)
"""Numbers of one step."""
ENDED = -1
"""In place of nodes after the end of a walk, as DGL and PyG write them."""


class Neighbors(NamedTuple):
    """What PinSAGE's walks visited: edges from visited nodes to seeds."""

    source: torch.Tensor
    """int64, shape (num_edges,): visited nodes."""

    position: torch.Tensor
    """int64, shape (num_edges,): positions among the seeds."""

    visits: torch.Tensor
    """int64, shape (num_edges,): how often, falling for each seed."""


@dataclass(frozen=True)
class _Lists:
    graph: ResidentGraph
    """Targets of each node, sorted."""

    pairs: torch.Tensor
    """int64, shape (num_edges,): node * num_targets + target, ascending."""

    num_targets: int


class KeyedWalks:
    """Walks along edges, from sources to targets."""

    def __init__(
        self,
        edges: Mapping[EdgeType, tuple[torch.Tensor, torch.Tensor]],
        num_nodes: Mapping[str, int],
        *,
        device: torch.device | str = "auto",
        residence: Residence | str = Residence.DEVICE,
        weights: Mapping[EdgeType, torch.Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            edges: sources and targets by type, copied into lists.
            num_nodes: of each type.
            device: that walks; "auto" takes the GPU if there is one.
            residence: where the edges lie.
            weights: of the edges of every type, to step in proportion to.
            seed: of all walks.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.seed, self.device = seed, torch.device(device)
        self._num_nodes, self._weighted = dict(num_nodes), weights is not None
        self._lists: dict[EdgeType, _Lists] = {}
        for kind, (src, dst) in edges.items():
            num = num_nodes[kind[2]]
            graph, order = lists_of(
                src,
                dst,
                num_nodes[kind[0]],
                num,
                weights=None if weights is None else weights[kind],
                by=dst,
            )
            pairs = (src.cpu().long() * num + dst.cpu().long())[order]
            settled = settle(graph, device, residence, weighted=self._weighted)
            self._lists[kind] = _Lists(settled, pairs.to(self.device), num)

    def walk(
        self,
        seeds: torch.Tensor,
        *,
        length: int | None = None,
        metapath: Sequence[EdgeType] | None = None,
        restart_prob: float | Sequence[float] = 0.0,
        batch: int = 0,
    ) -> torch.Tensor:
        """Walk from each seed, a step a time.

        Args:
            seeds: int64, shape (num_walks,); a node may be there more than once.
            length: steps along the only edge type.
            metapath: the edge type of each step instead.
            restart_prob: of ending before a step, one for all or one a step.
            batch: number of the call: another one walks elsewhere.

        Returns:
            int64, shape (num_walks, steps + 1): nodes; `ENDED` after the end.

        Raises:
            ValueError: neither length nor metapath, or both; types that do not lead on
                from one another; seeds that are no nodes.
        """
        path = self._path(length, metapath)
        if isinstance(restart_prob, int | float):
            stops = [float(restart_prob)] * len(path)
        else:
            stops = list(restart_prob)
        if len(stops) != len(path):
            raise ValueError(
                f"restart_prob: expects one for each of {len(path)} steps, got "
                f"{len(stops)}"
            )
        node = self._checked(seeds, path[0][0] if path else None)
        number = torch.arange(len(node), device=self.device)
        key = philox.key_of(self.seed, batch)
        found = [node]
        for step, (kind, stop) in enumerate(zip(path, stops, strict=True)):
            parts = philox.uniform(number, step * _STRIDE, 2, key=key, relation=0)
            node = torch.where(parts[:, 1] < stop, ENDED, node)
            node = self._step(self._lists[kind], node, parts[:, 0])
            found.append(node)
        return torch.stack(found, 1)

    def node2vec(
        self,
        seeds: torch.Tensor,
        length: int,
        *,
        p: float = 1.0,
        q: float = 1.0,
        batch: int = 0,
    ) -> torch.Tensor:
        """Walk so that a step back is 1 / p as likely, and one to a node that is no
        target of the node before 1 / q (Grover and Leskovec, arXiv 1607.00653).

        Args and returns as `walk`. Raises ValueError on p or q that are not positive,
        and on several edge types.
        """
        if p <= 0 or q <= 0:
            raise ValueError(f"p and q: expects positive numbers, got {p} and {q}")
        path = self._path(length, None)
        lists = self._lists[path[0]]
        node = self._checked(seeds, path[0][0])
        number = torch.arange(len(node), device=self.device)
        key = philox.key_of(self.seed, batch)
        found = [node]
        bias = (1 / p, 1.0, 1 / q)
        for step in range(length):
            first = philox.uniform(number, step * _STRIDE, 1, key=key, relation=0)
            if step == 0:
                node = self._step(lists, node, first[:, 0])
            else:
                at = (number, step * _STRIDE, key)
                node = self._biased(lists, found[-2], node, bias, at)
            found.append(node)
        return torch.stack(found, 1)

    def pinsage(
        self,
        seeds: torch.Tensor,
        traversal: Sequence[EdgeType],
        *,
        num_traversals: int,
        termination_prob: float,
        num_walks: int,
        num_neighbors: int,
        batch: int = 0,
    ) -> Neighbors:
        """The nodes that walks from each seed visit most (arXiv 1806.01973).

        Args:
            seeds: int64, shape (num_seeds,).
            traversal: edge types from the seeds' type back to it; a visit is its end.
            num_traversals: of a walk, at most.
            termination_prob: of ending before each traversal but the first.
            num_walks: from each seed.
            num_neighbors: kept for each seed, at most; of equal counts the smaller ids.
            batch: number of the call.

        Raises:
            ValueError: a traversal that ends at another type.
        """
        if not traversal or traversal[0][0] != traversal[-1][2]:
            raise ValueError(
                f"traversal: expects edge types that lead back, got {list(traversal)}"
            )
        size = len(traversal)
        stops = [termination_prob] + [0.0] * (size - 1)
        walks = self.walk(
            seeds.repeat_interleave(num_walks),
            metapath=list(traversal) * num_traversals,
            restart_prob=[0.0] * size + stops * (num_traversals - 1),
            batch=batch,
        )
        visited = walks[:, size::size]
        owner = torch.arange(len(seeds), device=self.device)
        owner = owner.repeat_interleave(num_walks)[:, None].expand(visited.shape)
        there = visited != ENDED
        num = self._num_nodes[traversal[0][0]]
        pairs, visits = (owner[there] * num + visited[there]).unique(return_counts=True)
        position = pairs // max(num, 1)
        order = torch.sort(visits, descending=True, stable=True).indices
        order = order[torch.sort(position[order], stable=True).indices]
        position = position[order]
        starts = torch.searchsorted(position, position)
        rank = torch.arange(len(order), device=self.device) - starts
        kept = rank < num_neighbors
        order = order[kept]
        return Neighbors(pairs[order] % max(num, 1), position[kept], visits[order])

    def _path(
        self, length: int | None, metapath: Sequence[EdgeType] | None
    ) -> list[EdgeType]:
        if (length is None) is (metapath is None):
            raise ValueError("length or metapath: expects one of them")
        if metapath is None:
            if len(self._lists) != 1:
                raise ValueError(
                    f"metapath: expects one where there are {len(self._lists)} edge "
                    "types"
                )
            (kind,) = self._lists
            path = [kind] * (length or 0)
        else:
            path = list(metapath)
        for kind in path:
            if kind not in self._lists:
                raise ValueError(
                    f"metapath: expects edge types of {list(self._lists)}, got {kind}"
                )
        for one, other in pairwise(path):
            if one[2] != other[0]:
                raise ValueError(f"metapath: expects {other} to begin at {one[2]!r}")
        return path

    def _checked(self, seeds: torch.Tensor, ntype: str | None) -> torch.Tensor:
        node = seeds.to(self.device, torch.int64)
        num = self._num_nodes[ntype] if ntype is not None else None
        if num is not None and len(node):
            low, high = (int(v) for v in torch.aminmax(node))
            if low < 0 or high >= num:
                raise ValueError(
                    f"seeds: expects nodes 0 to {num - 1}, got {low} to {high}"
                )
        return node

    def _step(
        self, lists: _Lists, node: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        """The nodes that are reached with numbers ``part``; `ENDED` where a walk has
        ended or a node has no targets."""
        graph = lists.graph
        if not graph.num_nodes or not graph.num_edges:
            return torch.full_like(node, ENDED)
        inside = node.clamp(min=0)
        begin, end = graph.offsets[inside], graph.offsets[inside + 1]
        size = end - begin
        live = (node >= 0) & (size > 0)
        if graph.running is None or graph.weights is None:
            edge = begin + (part * size).long()
        else:
            last = (end - 1).clamp(min=0)
            total = torch.where(live, graph.running[last], 0.0)
            live &= total > 0
            begin = torch.minimum(begin, last)
            edge = _under(graph.running, begin, last, part * total, graph.weights)
        edge = edge.clamp(max=graph.num_edges - 1)
        return torch.where(live, graph.neighbors_at(edge), ENDED)

    def _biased(
        self,
        lists: _Lists,
        before: torch.Tensor,
        node: torch.Tensor,
        bias: tuple[float, float, float],
        at: tuple[torch.Tensor, int, int],
    ) -> torch.Tensor:
        """One step of node2vec, by rejection; see `_ATTEMPTS`."""
        number, first, key = at
        found = torch.full_like(node, ENDED)
        left = (node >= 0).nonzero().squeeze(1)
        most = max(bias)
        for attempt in range(_ATTEMPTS):
            if not len(left):
                return found
            draw = first + 2 * attempt
            parts = philox.uniform(number[left], draw, 2, key=key, relation=0)
            picked = self._step(lists, node[left], parts[:, 0])
            factor = self._bias(lists, before[left], picked, bias)
            done = (picked == ENDED) | (parts[:, 1] * most < factor)
            found[left[done]] = picked[done]
            left = left[~done]
        draw = first + 2 * _ATTEMPTS
        parts = philox.uniform(number[left], draw, 1, key=key, relation=0)[:, 0]
        for i, part in zip(left.tolist(), parts.tolist(), strict=True):
            found[i] = self._exact(lists, int(before[i]), int(node[i]), bias, part)
        return found

    def _bias(
        self,
        lists: _Lists,
        before: torch.Tensor,
        picked: torch.Tensor,
        bias: tuple[float, float, float],
    ) -> torch.Tensor:
        """1 / p for a step back, 1 to a target of the node before, else 1 / q."""
        pairs = lists.pairs
        wanted = before * lists.num_targets + picked
        place = torch.searchsorted(pairs, wanted).clamp(max=max(len(pairs) - 1, 0))
        near = pairs[place] == wanted
        far = torch.where(near, bias[1], bias[2]).double()
        return torch.where(picked == before, bias[0], far)

    def _exact(
        self,
        lists: _Lists,
        before: int,
        node: int,
        bias: tuple[float, float, float],
        part: float,
    ) -> int:
        """A step by the weights of all targets."""
        graph = lists.graph
        begin, end = graph.offsets[node : node + 2].tolist()
        edges = torch.arange(begin, end, device=self.device)
        targets = graph.neighbors_at(edges)
        weights = self._bias(lists, torch.full_like(targets, before), targets, bias)
        if graph.weights is not None:
            weights = weights * graph.weights[edges]
        sums = weights.cumsum(0)
        place = torch.searchsorted(sums, part * sums[-1:], right=True)
        return int(targets[place.clamp(max=len(targets) - 1)])


def _under(
    running: torch.Tensor,
    begin: torch.Tensor,
    last: torch.Tensor,
    at: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The edges begin to last under whose weight ``at`` falls; edges without a weight
    are none."""
    low, high = begin, last
    while bool((low < high).any()):
        middle = low + (high - low) // 2
        right = (low < high) & (running[middle] <= at)
        low, high = (
            torch.where(right, middle + 1, low),
            torch.where(right, high, middle),
        )
    # Rounding may lead to the end of a list, whose last edges may have none.
    while bool(((weights[low] == 0) & (low > begin)).any()):
        low = torch.where((weights[low] == 0) & (low > begin), low - 1, low)
    return low
