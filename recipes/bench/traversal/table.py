"""Print a campaign's JSON as the tables of docs/traversal.md.

python -m recipes.bench.traversal.table recipes/bench/results/traversal/h100.json
"""

import json
import sys
from pathlib import Path
from typing import Any

OURS = ("bfs auto, with reverse", "bfs auto", "bfs lines")
HOT = "bfs auto hot 25 %"


def table(found: dict[str, Any]) -> list[str]:
    """Markdown lines."""
    graphs: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for record in found["records"]:
        if "system" in record and "seconds" in record:
            key = (record["graph"], record["id_bytes"])
            graphs.setdefault(key, {})[record["system"]] = record
    lines = [
        "| graph, ids | edges GB | naive / merged / aligned / lines, ms | amplification "
        "| levels over a tenth, of the copy peak | best search, ms, read | over page "
        "cache, subgraph copy | components, ms, read | PageRank, 3 | shortest paths |",
        "|--|--:|--|--:|--|--|--|--|--|--|",
    ]
    for (name, id_bytes), systems in graphs.items():
        lines.append(f"| {name}, {id_bytes} B | {' | '.join(_row(systems))} |")
    return lines


def _row(systems: dict[str, dict[str, Any]]) -> list[str]:
    walked = systems["bfs lines"]
    best = next(systems[name] for name in OURS if name in systems)
    walks = [systems.get(f"bfs {walk}") for walk in ("naive", "merged", "aligned")]
    rivals = [systems.get(f"bfs {r}") for r in ("page cache", "subgraph copy")]
    hot = systems.get(HOT)
    over = [f"{r['seconds'] / best['seconds']:.1f}x" if r else "-" for r in rivals]
    if rivals[0] and hot:
        over[0] += f" ({rivals[0]['seconds'] / hot['seconds']:.1f}x with its memory)"
    return [
        f"{walked['num_edges'] * walked['id_bytes'] / 1e9:.1f}",
        " / ".join([_ms(w) for w in (*walks, walked)]),
        f"{walked['amplification']:.2f}",
        ", ".join(f"{share:.2f}" for share in walked["large_of_peak"]),
        f"{_ms(best)}, {best['of_edge_list']:.2f}",
        ", ".join(over),
        f"{_ms(systems.get('components'))}, {_read(systems.get('components'))}",
        f"{_ms(systems.get('pagerank 3'))}, {_peak(systems.get('pagerank 3'))} of peak",
        f"{_ms(systems.get('sssp'))}",
    ]


def _ms(record: dict[str, Any] | None) -> str:
    return "-" if record is None else f"{record['seconds'] * 1e3:.1f}"


def _read(record: dict[str, Any] | None) -> str:
    return "-" if record is None else f"{record['of_edge_list']:.2f}"


def _peak(record: dict[str, Any] | None) -> str:
    return "-" if record is None else f"{min(record['large_of_peak']):.2f}"


def main() -> None:
    """See the module."""
    for name in sys.argv[1:]:
        found = json.loads(Path(name).read_text())
        print(f"{found['device']}, copy peak {found['copy_peak_gb_s']} GB/s\n")
        print("\n".join(table(found)), "\n")


if __name__ == "__main__":
    main()
