"""A campaign's files as the page of results on traversal."""

from pathlib import Path
from typing import Any

from recipes.bench.common import results
from recipes.bench.common.text import markdown, where

OURS = ("bfs auto, with reverse", "bfs auto", "bfs lines")
HOT = "bfs auto hot 25 %"
HEAD = [
    "graph, ids",
    "edges GB",
    "naive / merged / aligned / lines, ms",
    "amplification",
    "large levels, of the peak",
    "search, ms (read)",
    "times page cache",
    "times subgraph copy",
    "components, ms (read)",
    "PageRank, of the peak",
    "shortest paths, ms",
]
TEXT = (
    "**Traversal.** Graphs of the six kinds of EMOGI's Table 2.2, generated with its "
    "mean degrees and a fraction of its nodes; edges in host memory, large pages "
    "unless said otherwise. *Naive* to *lines*: breadth-first search, forward, by "
    "walk. *Amplification*: bytes of the sectors read over bytes of the edges "
    "visited, of the lines walk. *Large levels*: those that touch over a tenth of the "
    "edges, bytes read a second over the copy engine's peak of the same run. "
    "*Search*: the product's default, with the directed graphs' reverse beside them; "
    "what it read, in edge lists. *Page cache*: 64 KiB pages in GPU memory, a quarter "
    "of the edge list, free faults; in brackets ours with as much GPU memory for hot "
    "blocks, without a reverse. *Subgraph copy*: Subway's way, all cores. Every result "
    "is compared with the others'."
)
BYTES_HEAD = [
    "graph, ids",
    "million nodes",
    "mean degree",
    "bits an edge",
    "times fewer bytes",
    "device bytes for one of the lists",
]
BYTES_TEXT = (
    "**Compressed lists.** What `compress` makes of the same kinds of graphs, at a "
    "smaller fraction of their nodes: with every doubling of the nodes ids are a bit "
    "further apart, and an edge takes up to a bit more. *Device bytes*: where lists "
    "and blocks start."
)


def traversal(folder: Path) -> str:
    """The page's text; empty where nothing is recorded."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        data = results.read(path)
        graphs: dict[str, dict[str, dict[str, Any]]] = {}
        for name, cell in data["cells"].items():
            if "/" in name and "seconds" in cell:
                graph, system = name.split("/", 1)
                graphs.setdefault(graph, {})[system] = cell
        rows = [
            [graph.replace(" managed", ""), *_row(systems)]
            for graph, systems in graphs.items()
            if "bfs lines" in systems
        ]
        if rows:
            parts += [markdown(HEAD, rows), where(data)]
    return "\n\n".join([TEXT, *parts]) if parts else ""


def compressed(folder: Path) -> str:
    """Bytes of compressed lists, by graph; empty where nothing is recorded."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        data = results.read(path)
        rows = [
            [
                f"{cell['graph']} {cell['id_bytes']} B",
                f"{cell['num_nodes'] / 1e6:.2f}",
                f"{cell['num_edges'] / cell['num_nodes']:.0f}",
                f"{8 * cell['bytes'] / cell['num_edges']:.1f}",
                f"{cell['ratio']:.2f}",
                f"{cell['device_bytes'] / cell['bytes']:.2f}",
            ]
            for cell in data["cells"].values()
            if cell.get("system") == "compressed"
        ]
        if rows:
            parts.append(markdown(BYTES_HEAD, rows))
            parts += _both_ways(data["cells"])
            parts.append(where(data))
    return "\n\n".join([BYTES_TEXT, *parts]) if parts else ""


def _both_ways(cells: dict[str, Any]) -> list[str]:
    """Traversals of compressed lists beside those of plain ones."""
    rows = []
    for name, cell in cells.items():
        same = name.removesuffix(" compressed")
        # Without a reverse either way.
        plain = cells.get(same.replace("bfs auto", "bfs lines"), {})
        if name.endswith(" compressed") and "seconds" in plain and "seconds" in cell:
            graph, _, system = same.partition("/")
            rows.append(
                [
                    graph,
                    system,
                    *(f"{c['seconds'] * 1e3:.1f}" for c in (plain, cell)),
                    f"{plain['seconds'] / cell['seconds']:.2f}",
                    *(f"{c['bytes'] / 1e6:.0f}" for c in (plain, cell)),
                ]
            )
    head = ["graph", "traversal", "plain ms", "compressed ms", "times", "plain MB read"]
    return [markdown([*head, "compressed MB read"], rows)] if rows else []


def _row(systems: dict[str, dict[str, Any]]) -> list[str]:
    walked = systems["bfs lines"]
    best = next(systems[name] for name in OURS if name in systems)
    walks = [systems.get(f"bfs {walk}") for walk in ("naive", "merged", "aligned")]
    pages, copies = systems.get("bfs page cache"), systems.get("bfs subgraph copy")
    with_pages = _times(pages, best)
    if HOT in systems and pages:
        with_pages += f" ({_times(pages, systems[HOT])})"
    ranks = systems.get("pagerank 3, with reverse", systems.get("pagerank 3"))
    return [
        f"{walked['num_edges'] * walked['id_bytes'] / 1e9:.1f}",
        " / ".join([_ms(w) for w in (*walks, walked)]),
        f"{walked['amplification']:.2f}",
        ", ".join(f"{share:.2f}" for share in walked["large_of_peak"]),
        _with_read(best),
        with_pages,
        _times(copies, best),
        _with_read(systems.get("components")),
        f"{min(ranks['large_of_peak']):.2f}" if ranks else "-",
        _ms(systems.get("sssp")),
    ]


def _times(other: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    return f"{other['seconds'] / ours['seconds']:.1f}" if other else "-"


def _ms(cell: dict[str, Any] | None) -> str:
    return f"{cell['seconds'] * 1e3:.1f}" if cell else "-"


def _with_read(cell: dict[str, Any] | None) -> str:
    return f"{_ms(cell)} ({cell['of_edge_list']:.2f})" if cell else "-"
