"""The README's rows: one figure a question, with its date and device."""

from collections.abc import Callable
from pathlib import Path

from recipes.bench.common.results import Data, find
from recipes.bench.common.text import markdown
from recipes.bench.gather import tables as gather_tables
from recipes.bench.gnn import tables as gnn_tables
from recipes.bench.rgnn.records import Records, cells, compare, geometric_mean

REAL = "qwen3-4b/full/8k/eager"
FITTED = "ours budget=1gc"
BLOCKS = "12288x3"


def real_model(data: Data) -> list[str]:
    """A stock model in the memory that checkpointing takes, beside it."""
    cells = data["cells"]
    plain, ours, theirs = (cells[f"{REAL}/{name}"] for name in ("keep", FITTED, "gc"))
    less = 1 - ours["peak_gb"] / plain["peak_gb"]
    return [
        "[Qwen3 4B, stock, 8k tokens, in checkpointing's memory]"
        "(docs/results/real-models.md)",
        f"{less:.0%} less activation memory ({plain['peak_gb']:.1f} to "
        f"{ours['peak_gb']:.1f} GB) for {ours['step_ratio'] - 1:.0%} of the step",
        f"checkpointing: {1 - theirs['peak_gb'] / plain['peak_gb']:.0%} less for "
        f"{theirs['step_ratio'] - 1:.0%}",
    ]


def blocks(data: Data) -> list[str]:
    """Wide GPT blocks under the planner."""
    cells = data["cells"]
    plain, ours, theirs = (
        cells[f"{BLOCKS}/{name}"] for name in ("keep", "auto", "full recompute")
    )
    return [
        f"[GPT blocks {BLOCKS}, the planner's choice](docs/results/planner.md)",
        f"{1 - ours['peak_gb'] / plain['peak_gb']:.0%} less activation memory for "
        f"{ours['step_ms'] / plain['step_ms'] - 1:.1%} of the step",
        "recomputing everything: "
        f"{1 - theirs['peak_gb'] / plain['peak_gb']:.0%} less for "
        f"{theirs['step_ms'] / plain['step_ms'] - 1:.0%}",
    ]


def right(data: Data) -> list[str]:
    """Random graphs whose gradients are byte-equal."""
    cell = data["cells"]["campaign"]
    return [
        "[random graphs against plain autograd, byte for byte](docs/results/safety.md)",
        f"{cell['equal']:,} equal, {len(cell['different'])} different",
        f"{cell['refused']:,} refused by both",
    ]


def rows_gathered(data: Data) -> list[str]:
    """The gather's share of the link."""
    cells = gather_tables.sweep_cells(data, pinned=False)
    cell = gather_tables.find(cells, 16, gather_tables.MILLION, 512)
    return [
        "[1M rows of 512 bytes gathered from host memory](docs/results/gather.md)",
        f"{cell['share']['ours']:.0%} of the link's peak",
        f"CPU gather and copy {cell['share']['stock cpu']:.0%}",
    ]


def epochs(data: Data) -> list[str]:
    """A GNN epoch over PyG's way."""
    sides = gnn_tables.whole_cases(data["cells"])["feature-bound"]
    ours, theirs = (gnn_tables.epoch_s(sides[name]) for name in ("pydirect", "pyg"))
    return [
        "[GraphSAGE epoch, 9 GiB of features in host memory](docs/results/gnn.md)",
        f"{ours:.1f} s",
        f"PyG {theirs:.1f} s",
    ]


def layers(data: Data) -> list[str]:
    """Compiled relational layers over the best other, all graphs and models."""
    records = Records(data)
    found = [
        speedup
        for _, cell in cells(records, ("float32",))
        if cell["task"] == "training" and (speedup := compare(records, **cell).speedup)
    ]
    return [
        "[RGCN, RGAT and HGT layers, training](docs/results/relational.md)",
        f"{geometric_mean(found):.0f} times faster (geometric mean of {len(found)})",
        "the fastest of PyG's and two grouped products",
    ]


ROWS: tuple[tuple[str, Callable[[Data], list[str]]], ...] = (
    ("models/real_models", real_model),
    ("planner/planner", blocks),
    ("safety/graphs_cpu", right),
    ("gather/gather", rows_gathered),
    ("gnn/gnn", epochs),
    ("rgnn/rgnn", layers),
)


def headline(results: Path) -> str:
    """The table; a row whose results are not recorded is left out."""
    rows = []
    for name, build in ROWS:
        data = find(results / f"{name}.json")
        if data is not None:
            env = data["environment"]
            rows.append([*build(data), f"{env['device']}, {env['date']}"])
    return markdown(["", "ssdtrain", "beside it", "measured"], rows, "--")
