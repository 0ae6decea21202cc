"""An examination as text for a terminal, and its curves as a plot."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ssdtrain.tools.machine.doctor import POOR_FIT, Examination
from ssdtrain.tools.machine.findings import Level
from ssdtrain.tools.machine.links import Link, LinkFile
from ssdtrain.tools.printed import figures_table

if TYPE_CHECKING:
    from rich.table import Table

GRID_POINTS = 101
"""Of a fitted line."""
COLUMNS = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "256 MiB": 1 << 28}
"""Sizes of transfers, in bytes."""
COLOURS = {
    Level.GOOD: "green",
    Level.NOTE: "cyan",
    Level.WARNING: "yellow",
    Level.PROBLEM: "bold red",
}


def tables(found: Examination) -> Iterator["Table"]:
    """GPUs, measured links and findings as rich tables."""
    if found.gpu.gpus:
        yield _gpu_table(found)
    if found.links.links:
        yield _link_table(found.links)
    yield _finding_table(found)


def _gpu_table(found: Examination) -> "Table":
    rows = []
    for gpu in found.gpu.gpus:
        pcie = f"gen {gpu.pcie_generation_max or '?'} x{gpu.pcie_width or '?'}"
        rest = (gpu.numa_node, gpu.nvlinks, gpu.driver)
        memory = f"{gpu.memory_bytes / 1e9:.0f}"
        known = ("?" if value is None else str(value) for value in rest)
        rows.append((f"{gpu.index} {gpu.name}", memory, pcie, *known))
    columns = ("GPU", "memory GB", "PCIe", "NUMA node", "NVLinks", "driver")
    return figures_table("GPUs", columns, rows, words=len(columns))


def _link_table(links: LinkFile) -> "Table":
    rows = []
    for link in links.links:
        curve = link.curve
        way = link.kind.value, link.source, link.target, str(link.depth), link.mode
        rates = (f"{curve.gb_per_s(num_bytes):.2f}" for num_bytes in COLUMNS.values())
        startup, error = curve.startup_seconds * 1e6, curve.fit_error
        rows.append((*way, *rates, f"{startup:.1f}", f"{error:.0%}"))
    words = ("link", "from", "to", "in flight", "mode")
    heads = (*words, *COLUMNS, "start-up us", "fit error")
    title = "Links, GB/s by transfer size (fitted curve)"
    return figures_table(title, heads, rows, words=len(words))


def _finding_table(found: Examination) -> "Table":
    from rich.markup import escape

    rows = [
        (
            f"[{COLOURS[one.level]}]{one.level.value}[/]",
            one.subject,
            escape(one.text),
            escape(one.advice),
        )
        for one in found.findings
    ]
    return figures_table("Findings", ("", "about", "found", "advice"), rows, words=4)


def plot_links(links: LinkFile, path: str) -> None:
    """Bandwidth over transfer size: points measured, lines fitted. Raises ImportError:
    matplotlib is not installed; OSError: the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, link in enumerate(links.links):
        colour = f"C{number % 10}"
        sizes = [sample.size_bytes for sample in link.samples]
        rates = [sample.size_bytes / sample.seconds / 1e9 for sample in link.samples]
        axes.plot(sizes, rates, "o", color=colour, markersize=4)
        grid = np.geomspace(sizes[0], sizes[-1], GRID_POINTS).tolist()
        fitted = [link.curve.gb_per_s(size) for size in grid]
        style = "--" if link.curve.fit_error > POOR_FIT else "-"
        axes.plot(grid, fitted, style, color=colour, label=_label(link))
    axes.set(xscale="log", yscale="log", xlabel="transfer size (bytes)", ylabel="GB/s")
    axes.set_title("bandwidth by transfer size: points measured, lines fitted")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)


def _label(link: Link) -> str:
    error = link.curve.fit_error
    doubt = f" (dashed: misses by up to {error:.0%})" if error > POOR_FIT else ""
    place = f"{link.source} to {link.target}, {link.depth} in flight"
    return f"{link.kind.value} {place}{doubt}"
