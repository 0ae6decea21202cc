"""`gather.json` as a page's section, and every cell with the chooser's regret.

python -m recipes.bench.gather.tables [folder of gather.json]
"""

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes.bench.common import results
from recipes.bench.common.cells import RESULTS
from recipes.bench.common.text import markdown, where

MILLION = 1_000_000
# Where a million rows would be 16 GB of output.
LONG_ROW, FEWER = 16384, 200_000
PATHS = ("direct", "sorted", "cpu")
METHODS = (
    "ours", *PATHS, "alias", "crude sorted", "stock cpu", "stock cpu 4",
)  # fmt: skip
LEAST_SHARE_AT_1M = {128: 0.60, 256: 0.80} | dict.fromkeys(
    (512, 1024, 2052, 4096, 16384), 0.93
)
LEAST_SHIFTED = 0.88
# `dedup_below` of the engine: where more are distinct, all rows are read.
READ_ONCE_BELOW = 0.8
NEAR_BEST, NEAR_CPU, SAME = 1.05, 1.03, 1.03
ANOTHER_PATH = 0.8

Cell = dict[str, Any]


def gather(results_dir: Path | str) -> str:
    """The page's section; empty where `gather.json` is not in ``results_dir``."""
    data = results.find(Path(results_dir) / "gather.json")
    if data is None:
        return ""
    cells = sweep_cells(data, pinned=False)
    if not cells:
        return ""
    link = data["cells"]["link"]
    parts = [
        "**Gather.** `features[index]` on a table in host memory, random rows, as a "
        f"share of this run's DMA peak ({link['dma_peak_gb_s']:.1f} GB/s); batches of "
        "1M rows (of 16 KiB 200,000: the result has to fit), tables of 1 to 48 GiB. "
        "Where rows repeat and are read once, the share of the peak that crossed the "
        "link follows in brackets. *Unsorted* is `torch.index_select` on an alias of "
        "pinned memory, *CPU + DMA* is `index_select` on the CPU into a pinned buffer "
        "and one copy. Medians of bursts of calls, the ways taking turns.",
        share_table(data),
        "Smaller batches, 16 GiB: share of the peak, and times the crude sorted probe "
        "(sort, `index_select` on the alias of pinned memory, scatter).",
        batch_table(data),
        "Rows that start anywhere (Figure 4.7), 1M rows: share of the peak.",
        shifted_table(data),
        *(f"- {line}" for line in verdicts(data)),
        where(data),
    ]
    return "\n\n".join(join_lists(part for part in parts if part))


def one_call(data: Cell) -> str:
    """`table[index]`, one call and one wait."""
    calls = {name: cell for name, cell in data["cells"].items() if "burst_ms" in cell}
    if not calls:
        return ""
    sizes = list(dict.fromkeys(name.split("/", 1)[1] for name in calls))
    rows = []
    for size in sizes:
        row_bytes, num = (int(part) for part in size.split("/"))
        row = [f"{row_bytes} B x {num:,}"]
        for way in ("unify", "to"):
            cell = calls.get(f"{way}/{size}")
            row += (
                [f"{cell['share']:.2f} ({cell['burst_share']:.2f})", cell["path"]]
                if cell
                else ["-", "-"]
            )
        rows.append(row)
    regrets = [cell["regret"] for cell in calls.values()]
    near = sum(regret <= NEAR_BEST for regret in regrets)
    head = ["rows", "`unify`", "path", '`.to("unified")`', "path"]
    peak = data["cells"]["link"]["dma_peak_gb_s"]
    return "\n\n".join(
        [
            "**One call.** `table[index]` on a unified tensor of "
            f"{data['settings']['table_bytes'] / 2**30:.1f} GiB, one call and one "
            f"wait: share of the DMA peak of this run ({peak:.1f} GB/s), in brackets a "
            "call of a burst.",
            markdown(head, rows),
            f"- The chooser is within 5 % of the best path in {near} of "
            f"{len(regrets)} cells; worst {max(regrets):.2f} of its time.",
            where(data),
        ]
    )


def join_lists(parts: Iterable[str]) -> list[str]:
    """Neighbouring list items become one block."""
    joined: list[str] = []
    for part in parts:
        if joined and part.startswith("- ") and joined[-1].startswith("- "):
            joined[-1] += "\n" + part
        else:
            joined.append(part)
    return joined


def sweep_cells(data: Cell, *, pinned: bool) -> list[Cell]:
    """Finished cells of the sweep, on pinned memory or on what `empty_table` gives."""
    return [
        cell
        for cell in data["cells"].values()
        if "chosen" in cell and "ms" in cell and (cell["memory"] == "pinned") is pinned
    ]


def find(cells: list[Cell], table: int, batch: int, row: int) -> Cell:
    """One cell; empty if it was not measured."""
    wanted = (table, batch, row)
    for cell in cells:
        if (cell["table_gib"], cell["batch"], cell["row_bytes"]) == wanted:
            return cell
    return {"share": {}, "ms": {}}


def share_table(data: Cell) -> str:
    """Batches of 1M rows."""
    large, pinned = (sweep_cells(data, pinned=kind) for kind in (False, True))
    tables = sorted({c["table_gib"] for c in large})
    middle = 16 if 16 in tables else tables[-1]
    head = ["row bytes", *(f"{t} GiB" for t in tables)]
    head += [f"unsorted, {middle} GiB", "CPU + DMA", "CPU + DMA, 4 cores"]
    rows = []
    for row in sorted({c["row_bytes"] for c in large}):
        batch = batch_of(row)
        beside = find(large, middle, batch, row)["share"]
        shares = [
            find(pinned, middle, batch, row)["share"].get("alias"),
            beside.get("stock cpu"),
            beside.get("stock cpu 4"),
        ]
        ours = [share_text(find(large, t, batch, row)) for t in tables]
        rows.append([str(row), *ours, *map(digits, shares)])
    return markdown(head, rows)


def batch_of(row_bytes: int) -> int:
    """The batch that stands for a million rows."""
    return MILLION if row_bytes < LONG_ROW else FEWER


def share_text(cell: Cell) -> str:
    """Ours; what crossed the link too, where that is not the same."""
    share, distinct = cell["share"].get("ours"), cell.get("distinct_share", 1.0)
    if share is None or distinct >= READ_ONCE_BELOW:
        return digits(share)
    if cell["chosen"] != "sorted" and share <= 1:
        return digits(share)
    return f"{share:.3f} ({share * distinct:.3f})"


def batch_table(data: Cell) -> str:
    """Ours by batch, and over the crude sorted probe on pinned memory."""
    large, pinned = (sweep_cells(data, pinned=kind) for kind in (False, True))
    batches = sorted({c["batch"] for c in large if c["table_gib"] == 16} - {MILLION})
    rows = []
    for row in sorted({c["row_bytes"] for c in large}):
        texts = [str(row)]
        for batch in batches:
            ours = find(large, 16, batch, row)
            crude = find(pinned, 16, batch, row)["ms"].get("crude sorted")
            text = digits(ours["share"].get("ours"))
            if crude and "ours" in ours["ms"]:
                text += f" ({crude / ours['ms']['ours']:.1f}x)"
            texts.append(text)
        rows.append(texts)
    return markdown(["row bytes", *(f"{b:,} rows" for b in batches)], rows)


def shifted_table(data: Cell) -> str:
    """Figure 4.7."""
    found = [c for n, c in data["cells"].items() if n.startswith("shifted/")]
    found = sorted((c for c in found if "ms" in c), key=lambda c: c["row_bytes"])
    if not found:
        return ""
    columns = {
        "ours": "ours",
        "aligned starts": "start at line",
        "row starts": "start at row",
        "`index_select` on an alias": "alias",
        "CPU + DMA": "stock cpu",
    }
    rows = [
        [
            str(c["row_bytes"]),
            *(digits(c["share"].get(m)) for m in columns.values()),
        ]
        for c in found
    ]
    return markdown(["row bytes", *columns], rows)


def digits(value: float | None) -> str:
    """A share, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def verdicts(data: Cell) -> list[str]:
    """One sentence a target: how many cells meet it."""
    large = sweep_cells(data, pinned=False)
    every = large + sweep_cells(data, pinned=True)
    found = [
        shares_met(large),
        *chooser_met(every),
        cpu_ratio(large),
        four_cores(data),
    ]
    return [line for line in (*found, shifts_met(data), budget(data)) if line]


def shares_met(cells: list[Cell]) -> str:
    """The least shares of the peak at 1M rows."""
    met, missed = 0, []
    for cell in cells:
        least = LEAST_SHARE_AT_1M.get(cell["row_bytes"])
        share = cell["share"].get("ours")
        at_scale = cell["batch"] == batch_of(cell["row_bytes"])
        if not at_scale or least is None or share is None:
            continue
        met += share >= least
        if share < least:
            missed.append(
                f"{cell['row_bytes']} B of {cell['table_gib']} GiB {share:.3f}"
            )
    tail = f"; below: {', '.join(missed)}" if missed else ""
    return (
        "Target at 1M rows (128 B 0.60, 256 B 0.80, 512 B and more 0.93): met in "
        f"{met} of {met + len(missed)} cells{tail}."
    )


def regret(cell: Cell) -> float | None:
    """The chosen path's own time over the best path's; None if one is missing.

    Where ours ran far faster than the recorded path, it took another: the survey that
    the recording saw was not yet this table's."""
    ms = cell["ms"]
    if not all(name in ms for name in (cell["chosen"], *PATHS)):
        return None
    took = ms[cell["chosen"]]
    if ms.get("ours", took) < took * ANOTHER_PATH:
        took = ms["ours"]
    return float(took / min(ms[path] for path in PATHS))


def chooser_met(cells: list[Cell]) -> list[str]:
    """Against the best path, and against CPU gather + DMA."""
    regrets = [found for cell in cells if (found := regret(cell)) is not None]
    if not regrets:
        return []
    near = sum(found <= NEAR_BEST for found in regrets)
    cpu = [
        c["ms"]["ours"] / min(c["ms"][m] for m in ("cpu", "stock cpu") if m in c["ms"])
        for c in cells
        if "ours" in c["ms"] and "cpu" in c["ms"]
    ]
    above = sum(found <= NEAR_CPU for found in cpu)
    return [
        f"The chooser is within 5 % of the best path in {near} of {len(regrets)} cells "
        f"({near / len(regrets):.0%}); median {statistics.median(regrets):.3f}, worst "
        f"{max(regrets):.2f} of the best path's time.",
        f"Ours is at most 3 % slower than CPU gather + DMA in {above} of {len(cpu)} "
        f"cells; worst {max(cpu):.2f} of its time.",
    ]


def cpu_ratio(cells: list[Cell]) -> str:
    """At least twice CPU gather + DMA from 256 bytes and 1M rows."""
    times = [
        c["ms"]["stock cpu"] / c["ms"]["ours"]
        for c in cells
        if c["batch"] >= MILLION and c["row_bytes"] >= 256
        if "stock cpu" in c["ms"] and "ours" in c["ms"]
    ]
    if not times:
        return ""
    twice = sum(ratio >= 2 for ratio in times)
    return (
        f"1M rows and more of 256 bytes and more: {min(times):.2f} to {max(times):.2f} "
        f"times CPU gather + DMA (all cores); at least twice in {twice} of "
        f"{len(times)} cells."
    )


def four_cores(data: Cell) -> str:
    """Figure 4.6's point: ours does not need the CPU. Recordings from before the cells
    of their own have the turns of the sweep."""
    cells = data["cells"]
    how = "in alternate turns"
    ratios = [c["ratio"] for n, c in cells.items() if "cores/" in n and "ratio" in c]
    if not ratios:
        how = "every turn right behind a CPU gather with 4 cores"
        times = [c.get("ms", {}) for c in cells.values()]
        ratios = [
            ms["ours 4"] / ms["ours"] for ms in times if {"ours", "ours 4"} <= {*ms}
        ]
    if not ratios:
        return ""
    same = sum(ratio <= SAME for ratio in ratios)
    return (
        f"With 4 cores instead of all, {how}, ours is at most 3 % slower in {same} of "
        f"{len(ratios)} cells (median {statistics.median(ratios) - 1:+.1%}, worst "
        f"{max(ratios) - 1:+.1%})."
    )


def shifts_met(data: Cell) -> str:
    """Rows of 2048 to 2076 bytes."""
    shares = [
        c["share"]["ours"]
        for n, c in data["cells"].items()
        if n.startswith("shifted/") and "ours" in c.get("share", {})
    ]
    if not shares:
        return ""
    met = sum(share >= LEAST_SHIFTED for share in shares)
    return (
        f"Rows of 2048 to 2076 bytes by 4: at least {LEAST_SHIFTED} of the peak in "
        f"{met} of {len(shares)} sizes, least {min(shares):.3f}."
    )


def budget(data: Cell) -> str:
    """What a gather costs matrix products beside it, by multiprocessors."""
    cell = data["cells"].get("sm budget", {})
    if "by_sms" not in cell:
        return ""
    alone = cell["products_ms"]
    parts = [
        f"{sms} SMs {found['gather_ms']:.1f} ms alone, "
        f"{found['both_ms'] - alone:+.1f} ms to the products"
        for sms, found in cell["by_sms"].items()
    ]
    return (
        f"Beside bf16 matrix products of {alone:.1f} ms, a gather of 512 MB: "
        + "; ".join(parts)
        + "."
    )


def every_cell(data: Cell) -> str:
    """Shares and regret, cell by cell."""
    head = ["memory", "table GiB", "batch", "row bytes", "chosen", "regret", *METHODS]
    rows = []
    cells = sweep_cells(data, pinned=False) + sweep_cells(data, pinned=True)
    for cell in cells:
        names = ("memory", "table_gib", "batch", "row_bytes", "chosen")
        shares = [digits(cell["share"].get(method)) for method in METHODS]
        rows.append([*(str(cell[n]) for n in names), digits(regret(cell)), *shares])
    return markdown(head, rows)


def main() -> None:
    """The section, every cell, and what else was measured."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "gather"
    print(gather(folder) or f"no sweep in {folder}/gather.json")
    data = results.find(folder / "gather.json")
    if data is None:
        return
    print("\n" + every_cell(data) + "\n")
    for name, cell in data["cells"].items():
        if "chosen" not in cell or "errors" in cell or "error" in cell:
            print(name, json.dumps(cell))
    print({k: v for k, v in data.items() if k not in ("cells", "environment")})


if __name__ == "__main__":
    main()
