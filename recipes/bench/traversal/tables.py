"""A campaign's files as tables of results on traversal."""

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table, where

OURS = ("bfs auto, with reverse", "bfs auto", "bfs lines")


def traversal(*found: Data) -> str:
    """Searches, components, ranks and paths by graph."""
    columns: dict[str, Column] = {
        "graph, ids": lambda s: s["name"].replace(" managed", ""),
        "edges GB": lambda s: "{:.1f}".format(
            s["bfs lines"]["num_edges"] * s["bfs lines"]["id_bytes"] / 1e9
        ),
        "naive / merged / aligned / lines, ms": lambda s: " / ".join(
            _ms(s.get(f"bfs {walk}"))
            for walk in ("naive", "merged", "aligned", "lines")
        ),
        "amplification": "{bfs lines[amplification]:.2f}",
        "large levels, of the peak": lambda s: ", ".join(
            f"{share:.2f}" for share in s["bfs lines"]["large_of_peak"]
        ),
        "search, ms (read)": lambda s: _with_read(
            next(s[name] for name in OURS if name in s)
        ),
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


def _ranks(systems: dict[str, Data]) -> str:
    ranks = systems.get("pagerank 3, with reverse", systems.get("pagerank 3"))
    return f"{min(ranks['large_of_peak']):.2f}" if ranks else "-"


def _ms(cell: Data | None) -> str:
    return f"{cell['seconds'] * 1e3:.1f}" if cell else "-"


def _with_read(cell: Data | None) -> str:
    return f"{_ms(cell)} ({cell['of_edge_list']:.2f})" if cell else "-"
