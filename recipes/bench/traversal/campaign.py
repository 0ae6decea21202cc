"""Time traversals of generated graphs against the link, and check every result.

    python -m recipes.bench traversal.campaign --kinds GU GK --divisor 8 --out OUT.json

One JSON file: the machine, the peak of the copy engine measured in the same run, and
one cell a graph and system; a run with the same file adds to it. Times are wall times
of whole traversals, medians over the sources; levels are single steps of a timed trace.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pydirect.memory import reach
from pydirect.sampling import Graph
from pydirect.traversal import (
    Direction,
    PlacedGraph,
    Trace,
    Walk,
    bfs,
    connected_components,
    pagerank,
    place,
    sssp,
)
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import link_gb_per_s, wait
from recipes.bench.traversal.graphs import KINDS, Kind, make, weights_of

_LARGE_SHARE = 0.1


Traversal = Callable[..., Any]
"""Of a graph that is placed, from a source, with a trace."""


def ranks(placed: PlacedGraph, _: int, *, trace: Trace) -> Any:
    """Three iterations of PageRank."""
    return pagerank(placed, max_iterations=3, tolerance=0.0, trace=trace)


def components(placed: PlacedGraph, _: int, *, trace: Trace) -> Any:
    """Of the whole graph."""
    return connected_components(placed, trace=trace)


FORWARD = partial(bfs, direction=Direction.FORWARD)


def timed(call: Callable[[], Any]) -> float:
    """Wall seconds of a call and the device's work."""
    begun = wait()
    call()
    return wait() - begun


@dataclass(frozen=True)
class Settings:
    """What is measured.

    divisor: of the published sizes
    sources: of a traversal
    """

    kinds: tuple[str, ...] = tuple(kind.name for kind in KINDS)
    divisor: int = 16
    id_bytes: tuple[int, ...] = (8,)
    memory: tuple[str, ...] = ("table",)
    sources: int = 5
    trio: bool = False
    sssp: bool = False


class Campaign:
    """Measurements of one run, written after each so that none is lost."""

    def __init__(self, cells: Cells, sources: int, device: torch.device) -> None:
        self._cells = cells
        self._num_sources = sources
        self.device = device
        self.peak = link_gb_per_s(1 << (30 if device.type == "cuda" else 20), device)
        cells.data["cells"]["link"] = {"copy_peak_gb_s": round(self.peak, 2)}

    def note(self, name: str, head: dict[str, Any], **record: Any) -> None:
        """Keep one record: of a graph, and a system."""
        graph = f"{head['graph']} {head['id_bytes']} B {head['memory']}"
        self._cells.record(f"{graph}/{name}", {**head, "system": name, **record})

    def sources(self, graph: Graph) -> list[int]:
        """Random nodes with edges, the same for all systems."""
        generator = torch.Generator().manual_seed(1)
        some = torch.randint(graph.num_nodes, (4096,), generator=generator)
        some = some[graph.offsets[some + 1] > graph.offsets[some]]
        return [int(s) for s in some[: self._num_sources]]

    def traverse(
        self,
        placed: PlacedGraph,
        name: str,
        run: Traversal,
        head: dict[str, Any],
    ) -> None:
        """Time ``run`` from each source, and its steps once more with a timed trace."""
        sources = self.sources(placed.graph)
        run(placed, sources[0], trace=Trace())
        times = [timed(partial(run, placed, s, trace=Trace())) for s in sources]
        trace = Trace(timed=True)
        run(placed, sources[0], trace=trace)
        large = []
        for step in trace.steps:
            gb_s = step.bytes_read / max(step.seconds, 1e-9) / 1e9
            if step.num_edges > _LARGE_SHARE * placed.num_edges:
                large.append(round(gb_s / self.peak, 3))
        visited = [s for s in trace.steps if s.operation != "search"]
        list_bytes = placed.graph.neighbors.nbytes
        size = list_bytes / placed.num_edges
        if placed.weights is not None:
            size += placed.weights.element_size()
        useful = sum(s.num_edges for s in visited) * size
        self.note(
            name,
            head,
            peak_gb_s=round(self.peak, 2),
            seconds=round(statistics.median(times), 5),
            bytes=trace.bytes_read,
            of_edge_list=round(trace.bytes_read / list_bytes, 4),
            amplification=round(sum(s.bytes_read for s in visited) / max(1, useful), 4),
            large_of_peak=large,
        )


def check(placed: PlacedGraph, level: torch.Tensor, source: int) -> None:
    """Levels are those of a breadth-first search: no edge skips one, and every node
    but the source has a neighbour one level nearer. Edges are read a part at a time."""
    offsets, edges = placed.offsets, placed.edges
    near = torch.full_like(level, torch.iinfo(torch.int32).max)
    for first in range(0, placed.num_edges, 1 << 27):
        last = min(first + (1 << 27), placed.num_edges)
        number = torch.arange(first, last, device=level.device)
        node = torch.searchsorted(offsets, number, right=True) - 1
        following = edges[first:last].long()
        one, other = level[node], level[following]
        reached = one >= 0
        if bool((reached & ((other < 0) | (other > one + 1))).any()):
            raise RuntimeError("bfs: an edge leads past its level")
        near.scatter_reduce_(0, following[reached], one[reached], "amin")
    ahead = (level >= 0) & (torch.arange(len(level), device=level.device) != source)
    if bool((near[ahead] + 1 != level[ahead]).any()) or int(level[source]) != 0:
        raise RuntimeError("bfs: a node without a neighbour one level nearer")


def systems(
    device: torch.device, graph: Graph, reverse: Graph | None, settings: Settings
) -> Iterator[tuple[str, PlacedGraph, Traversal]]:
    """All that is timed on one graph, by name."""
    placed = place(graph, device)
    for walk in Walk:
        if settings.trio or walk not in (Walk.NAIVE, Walk.MERGED, Walk.ALIGNED):
            placed.walk = walk
            yield f"bfs {walk.value}", placed, FORWARD
    placed.walk = Walk.LINES
    if reverse is None:
        yield "bfs auto", placed, bfs
    else:
        both = place(graph, device, reverse=reverse)
        yield "bfs auto, with reverse", both, bfs
        yield "pagerank 3, with reverse", both, ranks
    yield "components", placed, components
    yield "pagerank 3", placed, ranks
    if settings.sssp:
        yield "sssp", place(weights_of(graph), device), sssp


def main(bench: Bench, settings: Settings) -> None:
    """Measure; a run with the same file adds to it."""
    device = bench.device
    campaign = Campaign(bench.cells({"device": device.type}), settings.sources, device)
    for kind, id_bytes, memory in itertools.product(
        KINDS, settings.id_bytes, settings.memory
    ):
        if kind.name in settings.kinds:
            measure(campaign, settings, kind, id_bytes, memory)


def measure(
    campaign: Campaign, settings: Settings, kind: Kind, id_bytes: int, memory: str
) -> None:
    """All that is asked for of one graph; every search's levels are compared."""
    device = campaign.device
    made = partial(make, kind, settings.divisor, id_bytes=id_bytes, memory=memory)
    graph = made(device=device.type)
    head = {
        "graph": kind.name,
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "id_bytes": id_bytes,
        "memory": reach(graph.neighbors).value,
    }
    source, placed = campaign.sources(graph)[0], place(graph, device)
    want = FORWARD(placed, source)
    check(placed, want, source)
    reverse = None if graph.symmetric else made(device=device.type, reverse=True)
    for name, where, run in systems(device, graph, reverse, settings):
        if name.startswith("bfs") and not torch.equal(run(where, source), want):
            raise RuntimeError(f"{name} differs")
        campaign.traverse(where, name, run, head)
    del graph, placed
    if device.type == "cuda":
        torch.cuda.empty_cache()
