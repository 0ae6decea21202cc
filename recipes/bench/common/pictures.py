"""The pictures of docs/results, drawn from recorded results."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.bench.common.results import Data, find
from recipes.bench.gather import tables as gather_tables
from recipes.bench.models.tables import chart
from recipes.bench.rgnn import plot as rgnn_plot
from recipes.bench.rgnn.records import Records


@dataclass(frozen=True)
class Picture:
    """A picture of one record.

    page: of docs/results. file: in docs/img. record: below results/, without `.json`.
    """

    page: str
    file: str
    caption: str
    record: str
    draw: Callable[[Any, Data], None]
    """Draws the record on a figure of matplotlib."""
    width: float = 8.0

    def write(self, results: Path, directory: Path) -> None:
        """Draw it, if its record is there."""
        data = find(results / f"{self.record}.json")
        if data is None:
            return
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        # Text as text: small files, the reader's own font.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ssdtrain"}):
            figure = Figure(figsize=(self.width, 4), layout="constrained")
            self.draw(figure, data)
            figure.savefig(directory / self.file, metadata={"Date": None})


def frontier(figure: Any, panels: dict[str, dict[str, Data]]) -> None:
    """Step over keep against peak, a marker a column, a panel a model."""
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axis, (name, columns) in zip(axes, panels.items(), strict=False):
        for number, (column, cell) in enumerate(columns.items()):
            marker = "o" if column.startswith("ours") else "^"
            axis.plot(
                [cell["peak_gb"]],
                [cell["step_ratio"]],
                marker=marker,
                linestyle="",
                color=f"C{number % 10}",
                label=column,
            )
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("activation peak (GB)")
        axis.set_ylabel("step / keep")
    axes[-1].legend(fontsize=7)


def by_cell(data: Data) -> dict[str, dict[str, Data]]:
    """Cells that have a ratio, by what stands before the last `/`."""
    found: dict[str, dict[str, Data]] = {}
    for name, cell in data["cells"].items():
        if "step_ratio" in cell and "/" in name:
            panel, column = name.rsplit("/", 1)
            found.setdefault(panel, {})[column] = cell
    return found


def placement(figure: Any, data: Data) -> None:
    """Every way to place activations but the slowest, so that the others are told."""
    panels = by_cell(data)
    slow = ("save_on_cpu", "trl")
    frontier(
        figure,
        {n: {c: v for c, v in p.items() if c not in slow} for n, p in panels.items()},
    )


def real(figure: Any, data: Data) -> None:
    """Real models, the host's rows left out."""
    panels = {n: p for n, p in by_cell(data).items() if "/512/" not in n}
    frontier(figure, dict(list(panels.items())[:4]))


def gather(figure: Any, data: Data) -> None:
    """Share of the link's peak by row size, 1M rows of a table of 16 GiB."""
    axes = figure.subplots()
    lines = (
        ("pydirect", "ours", False),
        ("unsorted, pinned memory", "alias", True),
        ("CPU gather and copy", "stock cpu", False),
    )
    for label, key, pinned in lines:
        points = [
            (cell["row_bytes"], cell["share"][key])
            for cell in gather_tables.sweep_cells(data, pinned=pinned)
            if cell["table_gib"] == 16
            and cell["batch"] == gather_tables.batch_of(cell["row_bytes"])
            and cell["share"].get(key) is not None
        ]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("row bytes")
    axes.set_ylabel("share of the DMA peak")
    axes.set_ylim(0, 1)
    axes.legend()


def relational(draw: Callable[[Any, Records], None]) -> Callable[[Any, Data], None]:
    """One of rgnn's drawings."""
    return lambda figure, data: draw(figure.subplots(), Records(data))


PICTURES = (
    Picture(
        "real-models",
        "results-real-models.svg",
        "Step time over the plain step against activation peak; lower left is better",
        "models/real_models",
        real,
        14,
    ),
    Picture(
        "real-models",
        "results-models.svg",
        "BERT, GPT and T5 at the dissertation's sizes (Figure 5.11)",
        "models/models",
        chart,
        12,
    ),
    Picture(
        "placement",
        "results-placement.svg",
        "Step time over keep against activation peak, GPT blocks; lower left is better",
        "offload/placement",
        placement,
        12,
    ),
    Picture(
        "gather",
        "results-gather.svg",
        "Share of the link's peak by row size: 1M random rows of a 16 GiB table",
        "gather/gather",
        gather,
    ),
    Picture(
        "relational",
        "results-relational-speedup.svg",
        "Compiled layers over the fastest other, float32",
        "rgnn/rgnn",
        relational(rgnn_plot.speedup),
    ),
    Picture(
        "relational",
        "results-relational-ablation.svg",
        "What compaction and reordering bring over neither; the cross is the choice",
        "rgnn/rgnn",
        relational(rgnn_plot.ablation),
        12,
    ),
    Picture(
        "relational",
        "results-relational-memory.svg",
        "Memory of HGT with compaction over without, by entity compaction ratio",
        "rgnn/rgnn",
        relational(rgnn_plot.memory),
    ),
)
