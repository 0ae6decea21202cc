"""The tables of the placement benchmarks."""

from typing import Any

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, grouped, paragraphs, table
from recipes.bench.models.tables import ratio_and_peak, rows_of, scatter


def placement(data: Data) -> str:
    """Step ratio and activation peak of every way to place activations."""
    cells = data["cells"]
    equal = all(c["losses_equal"] for c in cells.values() if "losses_equal" in c)
    link = "Link: {d2h_gb_per_s:.1f} GB/s out, {h2d_gb_per_s:.1f} in."
    return (
        f"All losses were equal to the last bit: {equal}. "
        f"{link.format(**cells['link'])}\n\n{by_way(data, errors=True)}"
    )


def by_way(data: Data, *, errors: bool = False) -> str:
    """A row for each way, a column for each model."""
    models = grouped(data["cells"], "" if errors else "step_ratio")
    ways = {way: {} for cells in models.values() for way in cells}
    columns: dict[str, Column] = {"": "{name}"}
    for model, cells in models.items():
        columns[model] = lambda row, cells=cells: _entry(cells.get(row["name"]))
    return table(ways, columns)


def _entry(cell: Data | None) -> str:
    if cell is None or "step_ratio" in cell:
        return ratio_and_peak(cell)
    return str(cell.get("error", "-"))[:40]


def rivals(data: Data) -> str:
    """Other people's ways beside ours."""
    failed = ", ".join(
        f"{name.split('/', 1)[1]} ({cell['error'][:60]})"
        for name, cell in data["cells"].items()
        if "error" in cell
    )
    return paragraphs(failed and f"Did not run: {failed}.", by_way(data))


def host_actions(data: Data) -> str:
    """What a kept, a moved and a rebuilt tensor cost the host."""
    cells = {
        name.removesuffix("/ours"): cell
        for name, cell in data["cells"].items()
        if "kept_us" in cell
    }
    columns: dict[str, Column] = {
        "": "{name}",
        "kept, or a parameter": "{kept_us:.0f}",
        "moved": "{moved_us:.0f}",
        "rebuilt": "{rebuilt_us:.0f}",
    }
    for way, title in (("bare", "moved, bare hooks"), ("trl", "moved, TRL")):
        if any(way in cell for cell in cells.values()):
            columns[title] = f"{{{way}[moved_us]:.0f}}"
    columns["plain step, ms"] = "{plain[host_least_ms]:.1f}"
    return table(cells, columns)


def frontier(figure: Any, data: Data) -> None:
    """Every way to place activations but the slowest, so that the others are told."""
    panels = rows_of(data)
    for ways in panels.values():
        for slow in ("save_on_cpu", "trl"):
            ways.pop(slow, None)
    scatter(figure, panels)
