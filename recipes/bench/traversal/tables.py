"""A campaign's files as tables of results on traversal."""

from typing import Any

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table, where

OURS = ("bfs auto, with reverse", "bfs auto", "bfs lines")


def traversal(*found: Data) -> str:
    """Searches, components, ranks and paths by graph."""
    columns: dict[str, Column] = {
        "graph, ids": lambda s: s["name"].replace(" managed", ""),
        "edges GB": lambda s: _gigabytes(s["bfs lines"]),
        "naive / merged / aligned / lines, ms": lambda s: " / ".join(
            _ms(s.get(f"bfs {walk}"))
            for walk in ("naive", "merged", "aligned", "lines")
        ),
        "amplification": "{bfs lines[amplification]:.2f}",
        "large levels, of the peak": lambda s: ", ".join(
            f"{share:.2f}" for share in s["bfs lines"]["large_of_peak"]
        ),
        "search, ms (read)": lambda s: _with_read(_best(s)),
        "components, ms (read)": lambda s: _with_read(s.get("components")),
        "PageRank, of the peak": _ranks,
        "shortest paths, ms": lambda s: _ms(s.get("sssp")),
    }
    parts = []
    for data in found:
        graphs: dict[str, dict[str, Data]] = {}
        for name, cell in data["cells"].items():
            if "/" in name and "seconds" in cell:
                graph, system = name.split("/", 1)
                graphs.setdefault(graph, {})[system] = cell
        if rows := table(graphs, columns, needs="bfs lines"):
            parts += [rows, where(data)]
    return paragraphs(*parts)


def _gigabytes(walked: Data) -> str:
    return f"{walked['num_edges'] * walked['id_bytes'] / 1e9:.1f}"


def _best(systems: dict[str, Data]) -> Data:
    return next(systems[name] for name in OURS if name in systems)


def _ranks(systems: dict[str, Data]) -> str:
    ranks = systems.get("pagerank 3, with reverse", systems.get("pagerank 3"))
    return f"{min(ranks['large_of_peak']):.2f}" if ranks else "-"


def _ms(cell: Data | None) -> str:
    return f"{cell['seconds'] * 1e3:.1f}" if cell else "-"


def _with_read(cell: Data | None) -> str:
    return f"{_ms(cell)} ({cell['of_edge_list']:.2f})" if cell else "-"


def compressed(*found: Data) -> str:
    """Bytes of compressed lists by graph, and what traversing them takes."""
    sizes = {
        "graph, ids": "{graph} {id_bytes} B",
        "million nodes": lambda c: f"{c['num_nodes'] / 1e6:.2f}",
        "mean degree": lambda c: f"{c['num_edges'] / c['num_nodes']:.0f}",
        "bits an edge": lambda c: f"{8 * c['bytes'] / c['num_edges']:.1f}",
        "times fewer bytes": "{ratio:.2f}",
        "device bytes for one of the lists": lambda c: "{:.2f}".format(
            c["device_bytes"] / c["bytes"]
        ),
    }
    times: dict[str, Column] = {
        "graph": "{graph}",
        "traversal": "{system}",
        "plain ms": lambda c: _ms(c["plain"]),
        "compressed ms": lambda c: _ms(c["own"]),
        "times": lambda c: f"{c['plain']['seconds'] / c['own']['seconds']:.2f}",
        "plain MB read": lambda c: f"{c['plain']['bytes'] / 1e6:.0f}",
        "compressed MB read": lambda c: f"{c['own']['bytes'] / 1e6:.0f}",
    }
    parts = []
    for data in found:
        cells = data["cells"]
        own = [c for c in cells.values() if c.get("system") == "compressed"]
        if own:
            parts += [table(own, sizes), table(_both(cells), times), where(data)]
    return paragraphs(*parts)


def _both(cells: dict[str, Any]) -> list[Data]:
    """Traversals of compressed and of plain lists, without a reverse either way."""
    rows = []
    for name, cell in cells.items():
        same = name.removesuffix(" compressed")
        plain = cells.get(same.replace("bfs auto", "bfs lines"), {})
        if same != name and "seconds" in plain and "seconds" in cell:
            graph, _, system = same.partition("/")
            rows.append({"graph": graph, "system": system, "plain": plain, "own": cell})
    return rows
