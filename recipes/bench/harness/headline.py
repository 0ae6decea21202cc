"""The README's rows: one figure a question, with its date and device."""

from recipes.bench.gather import tables as gather
from recipes.bench.gnn import tables as gnn
from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import markdown
from recipes.bench.rgnn.records import Records, cells, compare, geometric_mean


def real_model(data: Data) -> list[str]:
    """A stock model in the memory that checkpointing takes, beside it."""
    plain, ours, theirs = (
        data["cells"][f"qwen3-4b/full/8k/eager/{name}"]
        for name in ("keep", "ours budget=1gc", "gc")
    )
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
    plain, ours, theirs = (
        data["cells"][f"12288x3/{name}"] for name in ("keep", "auto", "full recompute")
    )
    return [
        "[GPT blocks 12288x3, the planner's choice](docs/results/planner.md)",
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
    cell = gather.find(gather.sweep_cells(data, pinned=False), 16, gather.MILLION, 512)
    return [
        "[1M rows of 512 bytes gathered from host memory](docs/results/gather.md)",
        f"{cell['share']['ours']:.0%} of the link's peak",
        f"CPU gather and copy {cell['share']['stock cpu']:.0%}",
    ]


def epochs(data: Data) -> list[str]:
    """A GNN epoch over PyG's way."""
    sides = gnn.whole_cases(data["cells"])["feature-bound"]
    ours, theirs = (gnn.epoch_s(sides[name]) for name in ("pydirect", "pyg"))
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


ROWS = {
    "real_models": real_model,
    "planner": blocks,
    "graphs_cpu": right,
    "gather": rows_gathered,
    "gnn": epochs,
    "rgnn": layers,
}
"""By record."""


def headline(*found: Data) -> str:
    """A row a record."""
    rows = []
    for data in found:
        env = data["environment"]
        rows.append([*ROWS[data["file"]](data), f"{env['device']}, {env['date']}"])
    return markdown(["", "ssdtrain", "beside it", "measured"], rows, "--")
