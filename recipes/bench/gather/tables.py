"""`gather.json` as a page's tables and sentences."""

import statistics

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table

MILLION = 1_000_000
# Where a million rows would be 16 GB of output.
LONG_ROW, FEWER = 16384, 200_000
PATHS = ("direct", "sorted", "cpu")
# `dedup_below` of the engine: where more are distinct, all rows are read.
READ_ONCE_BELOW = 0.8
NEAR_BEST, NEAR_CPU = 1.05, 1.03
ANOTHER_PATH = 0.8


def gather(data: Data) -> str:
    """Shares of the peak at 1M rows."""
    large, pinned = (sweep_cells(data, pinned=kind) for kind in (False, True))
    tables = sorted({cell["table_gib"] for cell in large})
    if not tables:
        return ""
    middle = 16 if 16 in tables else tables[-1]

    def at(row: int, table_gib: int, cells: list[Data]) -> Data:
        return find(cells, table_gib, batch_of(row), row)

    columns: dict[str, Column] = {"row bytes": str}
    for each in tables:
        columns[f"{each} GiB"] = lambda row, t=each: share_text(at(row, t, large))
    columns |= {
        f"unsorted, {middle} GiB": lambda row: digits(
            at(row, middle, pinned)["share"].get("alias")
        ),
        "CPU + DMA": lambda row: digits(
            at(row, middle, large)["share"].get("stock cpu")
        ),
    }
    return paragraphs(
        f"The DMA peak of this run is "
        f"{data['cells']['link']['dma_peak_gb_s']:.1f} GB/s.",
        table(sorted({c["row_bytes"] for c in large}), columns),
    )


def batches(data: Data) -> str:
    """Ours by batch, and over the crude sorted probe on pinned memory."""
    large, pinned = (sweep_cells(data, pinned=kind) for kind in (False, True))
    sizes = sorted({c["batch"] for c in large if c["table_gib"] == 16} - {MILLION})

    def entry(row: int, batch: int) -> str:
        ours = find(large, 16, batch, row)
        crude = find(pinned, 16, batch, row)["ms"].get("crude sorted")
        text = digits(ours["share"].get("ours"))
        if crude and "ours" in ours["ms"]:
            text += f" ({crude / ours['ms']['ours']:.1f}x)"
        return text

    columns: dict[str, Column] = {"row bytes": str}
    for batch in sizes:
        columns[f"{batch:,} rows"] = lambda row, b=batch: entry(row, b)
    return table(sorted({cell["row_bytes"] for cell in large}), columns)


def shifted(data: Data) -> str:
    """Figure 4.7."""
    found = [c for n, c in data["cells"].items() if n.startswith("shifted/")]
    ways = {
        "ours": "ours",
        "aligned starts": "start at line",
        "row starts": "start at row",
        "`index_select` on an alias": "alias",
        "CPU + DMA": "stock cpu",
    }
    columns: dict[str, Column] = {"row bytes": "{row_bytes}"}
    columns |= {head: f"{{share[{way}]:.3f}}" for head, way in ways.items()}
    rows = sorted((c for c in found if "ms" in c), key=lambda c: c["row_bytes"])
    return table(rows, columns)


def verdicts(data: Data) -> str:
    """One sentence a target: how many cells meet it."""
    large = sweep_cells(data, pinned=False)
    every = large + sweep_cells(data, pinned=True)
    found = [*chooser_met(every), cpu_ratio(large)]
    return "\n".join(f"- {line}" for line in found if line)


def sweep_cells(data: Data, *, pinned: bool) -> list[Data]:
    """Finished cells of the sweep, on pinned memory or on what `empty_table` gives."""
    return [
        cell
        for cell in data["cells"].values()
        if "chosen" in cell and "ms" in cell and (cell["memory"] == "pinned") is pinned
    ]


def find(cells: list[Data], table_gib: int, batch: int, row: int) -> Data:
    """One cell; empty if it was not measured."""
    for cell in cells:
        found = cell["table_gib"], cell["batch"], cell["row_bytes"]
        if found == (table_gib, batch, row):
            return cell
    return {"share": {}, "ms": {}}


def batch_of(row_bytes: int) -> int:
    """The batch that stands for a million rows."""
    return MILLION if row_bytes < LONG_ROW else FEWER


def digits(value: float | None) -> str:
    """A share, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def share_text(cell: Data) -> str:
    """Ours; what crossed the link too, where that is not the same."""
    share, distinct = cell["share"].get("ours"), cell.get("distinct_share", 1.0)
    if share is None or distinct >= READ_ONCE_BELOW:
        return digits(share)
    if cell["chosen"] != "sorted" and share <= 1:
        return digits(share)
    return f"{share:.3f} ({share * distinct:.3f})"


def regret(cell: Data) -> float | None:
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


def chooser_met(cells: list[Data]) -> list[str]:
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


def cpu_ratio(cells: list[Data]) -> str:
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
