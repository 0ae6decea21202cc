"""Print results/gather.json as tables, and say which targets are met.

python recipes/bench/gather_table.py [path/to/gather.json]
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

METHODS = ("ours", "direct", "sorted", "cpu", "index_select on alias")
STOCK = ("stock cpu", "ours 4", "stock cpu 4")
PATHS = ("direct", "sorted", "cpu")
LEAST_SHARE_AT_1M = {128: 0.60, 256: 0.80, 512: 0.93, 1024: 0.93, 4096: 0.93}

Cell = dict[str, Any]
Key = tuple[str, int, int, int]


def by_combination(cells: list[Cell]) -> dict[Key, dict[str, Cell]]:
    """Cells of the sweep: (memory, table GiB, batch, row bytes) to method to cell."""
    found: dict[Key, dict[str, Cell]] = {}
    for cell in cells:
        if "batch" in cell:
            key = (
                cell["memory"],
                cell["table_gib"],
                cell["batch"],
                cell["row_bytes"],
            )
            found.setdefault(key, {})[cell.get("method", "chosen")] = cell
    return found


def print_sweep(found: dict[Key, dict[str, Cell]]) -> None:
    columns = [*METHODS, *STOCK]
    print(
        "| memory | table GiB | batch | row B | chosen | " + " | ".join(columns) + " |"
    )
    print("|--|--|--|--|--|" + "--|" * len(columns))
    for (kind, table, batch, row), cells in sorted(found.items()):
        shares = [f"{cells[m]['share']:.2f}" if m in cells else "-" for m in columns]
        chosen = cells.get("chosen", {}).get("chosen", "-")
        print(
            f"| {kind} | {table} | {batch} | {row} | {chosen} | "
            + " | ".join(shares)
            + " |"
        )


def print_targets(found: dict[Key, dict[str, Cell]]) -> None:
    """Counts of cells that meet what the gather promises."""
    near_best, above_cpu, total = 0, 0, 0
    for key, cells in sorted(found.items()):
        if not all(m in cells for m in ("ours", *PATHS)):
            continue
        total += 1
        ours = cells["ours"]["ms"]
        best = min(cells[path]["ms"] for path in PATHS)
        stock = cells.get("stock cpu", cells["cpu"])
        cpu = min(cells["cpu"]["ms"], stock["ms"])
        near_best += ours <= 1.05 * best
        above_cpu += ours <= 1.03 * cpu
        if ours > 1.05 * best or ours > 1.03 * cpu:
            chosen = cells.get("chosen", {}).get("chosen", "-")
            print(
                f"miss: {key} chose {chosen}: {ours:.3f} ms, best path {best:.3f}, "
                f"CPU gather + DMA {cpu:.3f}"
            )
    if total:
        print(f"within 5 % of the best path: {near_best} of {total} cells")
        print(f"at most 3 % below CPU gather + DMA: {above_cpu} of {total} cells")
    for (kind, table, batch, row), cells in sorted(found.items()):
        least = LEAST_SHARE_AT_1M.get(row)
        if batch != 1_000_000 or least is None or "ours" not in cells:
            continue
        share = cells["ours"]["share"]
        word = "met" if share >= least else "MISSED"
        print(f"{kind} {table} GiB, 1M x {row} B: {share:.2f} of {least:.2f} {word}")


def print_ratios(found: dict[Key, dict[str, Cell]]) -> None:
    """Against CPU gather + DMA, and with four cores instead of all."""
    for large in (True, False):
        faster, changes = [], []
        for (_, _, batch, row), cells in found.items():
            if "stock cpu" not in cells or (batch >= 1_000_000) is not large:
                continue
            if row >= 256:
                faster.append(cells["stock cpu"]["ms"] / cells["ours"]["ms"])
            if "ours 4" in cells:
                changes.append(cells["ours 4"]["ms"] / cells["ours"]["ms"] - 1)
        which = "1M indices and more" if large else "fewer than 1M indices"
        if faster:
            print(
                f"{which}, 256 B and up: {min(faster):.2f} to {max(faster):.2f} times "
                f"CPU gather + DMA, median {statistics.median(faster):.2f}"
            )
        if changes:
            within = sum(change <= 0.03 for change in changes)
            print(
                f"{which}, 4 cores: within 3 % in {within} of {len(changes)} cells, "
                f"median change {statistics.median(changes):+.1%}"
            )


def print_rest(cells: list[Cell]) -> None:
    for cell in cells:
        if "batch" not in cell:
            print(json.dumps(cell))


def main() -> None:
    default = Path(__file__).parent / "results" / "gather.json"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    data = json.loads(path.read_text())
    print(json.dumps(data["machine"]))
    found = by_combination(data["cells"])
    print_sweep(found)
    print_targets(found)
    print_ratios(found)
    print_rest(data["cells"])


if __name__ == "__main__":
    main()
