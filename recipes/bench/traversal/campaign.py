"""Time traversals of generated graphs against the link, and check every result.

    python -m recipes.bench traversal.campaign --kinds GU GK --divisor 8 --out OUT.json

One JSON file: the machine, the peak of the copy engine measured in the same run, and
one cell a graph and system; a run with the same file adds to it. Times are wall times
of whole traversals, medians over the sources; levels are single steps of a timed trace.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pydirect.memory import empty_pinned, reach
from pydirect.sampling import Graph
from pydirect.traversal import (
    CompressedGraph,
    Direction,
    PlacedGraph,
    Trace,
    Walk,
    bfs,
    compress,
    connected_components,
    pagerank,
    place,
    sssp,
)
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait
from recipes.bench.traversal.graphs import KINDS, Kind, make, weights_of

_LARGE_SHARE = 0.1


def peak_gb_s(device: torch.device) -> float:
    """10^9 bytes a second of a copy from pinned memory."""
    num_bytes = 1 << 30 if device.type == "cuda" else 1 << 20
    host = empty_pinned((num_bytes,), torch.uint8)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    times = [timed(lambda: there.copy_(host, non_blocking=True)) for _ in range(5)]
    return num_bytes / min(times) / 1e9


Traversal = Callable[..., Any]
"""Of a graph that is placed, from a source, with a trace."""


def ranks(placed: PlacedGraph, _: int, *, trace: Trace) -> Any:
    """Three iterations of PageRank."""
    return pagerank(placed, max_iterations=3, tolerance=0.0, trace=trace)


def components(placed: PlacedGraph, _: int, *, trace: Trace) -> Any:
    """Of the whole graph."""
    return connected_components(placed, trace=trace)


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
    only_bytes: of compressed lists; no traversal
    """

    kinds: tuple[str, ...] = tuple(kind.name for kind in KINDS)
    divisor: int = 16
    id_bytes: tuple[int, ...] = (8,)
    memory: tuple[str, ...] = ("table",)
    sources: int = 5
    trio: bool = False
    sssp: bool = False
    compressed: bool = False
    only_bytes: bool = False


class Campaign:
    """Measurements of one run, written after each so that none is lost."""

    def __init__(self, cells: Cells, sources: int, device: torch.device) -> None:
        self._cells = cells
        self._num_sources = sources
        self.device = device
        self.peak = peak_gb_s(device)
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
        levels = []
        for step in trace.steps:
            share = step.num_edges / placed.num_edges
            gb_s = step.bytes_read / max(step.seconds, 1e-9) / 1e9
            levels.append(
                {
                    "operation": step.operation,
                    "edge_share": round(share, 5),
                    "bytes": step.bytes_read,
                    "ms": round(step.seconds * 1e3, 3),
                    "with_frontier_ms": round(step.walked_seconds * 1e3, 3),
                    "of_peak": round(gb_s / self.peak, 3),
                }
            )
        large = [v for v in levels if v["edge_share"] > _LARGE_SHARE]
        visited = [s for s in trace.steps if s.operation != "search"]
        size = list_bytes(placed) / placed.num_edges
        if placed.weights is not None:
            size += placed.weights.element_size()
        useful = sum(s.num_edges for s in visited) * size
        self.note(
            name,
            head,
            peak_gb_s=round(self.peak, 2),
            seconds=round(statistics.median(times), 5),
            bytes=trace.bytes_read,
            of_edge_list=round(trace.bytes_read / list_bytes(placed), 4),
            amplification=round(sum(s.bytes_read for s in visited) / max(1, useful), 4),
            large_of_peak=[v["of_peak"] for v in large],
            levels=levels[:40],
        )


def list_bytes(placed: PlacedGraph) -> int:
    """Of the edge list as the device reads it."""
    graph = placed.graph
    return graph.neighbors.nbytes if isinstance(graph, Graph) else graph.num_bytes


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


def compare(
    campaign: Campaign, graph: Graph, head: dict[str, Any], settings: Settings
) -> None:
    """All systems on one graph."""
    placed = place(graph, campaign.device)
    source = campaign.sources(graph)[0]
    want = bfs(placed, source, direction=Direction.FORWARD)
    check(placed, want, source)
    for walk in Walk:
        if walk in (Walk.NAIVE, Walk.MERGED, Walk.ALIGNED) and not settings.trio:
            continue
        placed.walk = walk
        forward = partial(bfs, direction=Direction.FORWARD)
        campaign.traverse(placed, f"bfs {walk.value}", forward, head)
        if not torch.equal(bfs(placed, source, direction="forward"), want):
            raise RuntimeError(f"bfs {walk.value} differs")
    placed.walk = Walk.LINES
    if graph.symmetric:
        campaign.traverse(placed, "bfs auto", bfs, head)
        if not torch.equal(bfs(placed, source), want):
            raise RuntimeError("bfs auto differs")
    if not graph.symmetric:
        backwards(campaign, graph, want, head, settings)
    if settings.compressed:
        in_fewer_bytes(campaign, graph, want, head)
    others(campaign, placed, head, settings)


def compressed(
    campaign: Campaign, graph: Graph, head: dict[str, Any]
) -> CompressedGraph:
    """Compress, and note how many bytes the lists have."""
    begun = time.perf_counter()
    made = compress(graph, campaign.device)
    campaign.note(
        "compressed",
        head,
        plain_bytes=made.plain_bytes,
        bytes=made.num_bytes,
        ratio=round(made.ratio, 4),
        device_bytes=made.first_blocks.nbytes + made.positions.nbytes,
        seconds=round(time.perf_counter() - begun, 3),
    )
    return made


def in_fewer_bytes(
    campaign: Campaign, graph: Graph, want: torch.Tensor, head: dict[str, Any]
) -> None:
    """The same lists compressed, and what that saves."""
    made = compressed(campaign, graph, head)
    placed = place(made, campaign.device)
    source = campaign.sources(graph)[0]
    ways = [Direction.FORWARD, Direction.AUTO] if graph.symmetric else [Direction.AUTO]
    for way in ways:
        if not torch.equal(bfs(placed, source, direction=way), want):
            raise RuntimeError(f"bfs {way.value} compressed differs")
        run = partial(bfs, direction=way)
        campaign.traverse(placed, f"bfs {way.value} compressed", run, head)
    campaign.traverse(placed, "pagerank 3 compressed", ranks, head)


def others(
    campaign: Campaign, placed: PlacedGraph, head: dict[str, Any], settings: Settings
) -> None:
    """Components, PageRank, shortest paths."""
    graph = placed.graph
    campaign.traverse(placed, "components", components, head)
    campaign.traverse(placed, "pagerank 3", ranks, head)
    if settings.sssp:
        weighted = place(weights_of(graph), campaign.device)
        campaign.traverse(weighted, "sssp", sssp, head)


def backwards(
    campaign: Campaign,
    graph: Graph,
    want: torch.Tensor,
    head: dict[str, Any],
    settings: Settings,
) -> None:
    """A directed graph with its reverse beside it."""
    kind = next(k for k in KINDS if k.name == head["graph"])
    made = make(
        kind,
        settings.divisor,
        id_bytes=head["id_bytes"],
        memory="table" if head["memory"] == "managed" else "pinned",
        device=campaign.device.type,
        reverse=True,
    )
    placed = place(graph, campaign.device, reverse=made)
    source = campaign.sources(graph)[0]
    if not torch.equal(bfs(placed, source), want):
        raise RuntimeError("bfs with the reverse differs")
    campaign.traverse(placed, "bfs auto, with reverse", bfs, head)
    campaign.traverse(placed, "pagerank 3, with reverse", ranks, head)


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
    """All that is asked for of one graph."""
    begun = time.perf_counter()
    graph = make(
        kind,
        settings.divisor,
        id_bytes=id_bytes,
        memory=memory,
        device=campaign.device.type,
    )
    head = {
        "graph": kind.name,
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "id_bytes": id_bytes,
        "memory": reach(graph.neighbors).value,
    }
    campaign.note("made", head, seconds=round(time.perf_counter() - begun, 1))
    if settings.only_bytes:
        compressed(campaign, graph, head)
    else:
        compare(campaign, graph, head, settings)
    del graph
    if campaign.device.type == "cuda":
        torch.cuda.empty_cache()
