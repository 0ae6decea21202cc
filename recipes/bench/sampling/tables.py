"""`rates.json` as the page of results on sampling."""

from pathlib import Path

from recipes.bench.common import results
from recipes.bench.common.text import markdown, where


def sampling(folder: Path) -> str:
    """The page's text; empty where nothing is recorded."""
    data = results.find(folder / "rates.json")
    if data is None:
        return ""
    cells, given = data["cells"], data["settings"]
    thread = cells["one CPU thread"]["edges_per_s"]
    worker = cells["one PyG worker"]
    ways = [cells.get(n, {}) for n in ("one PyG worker", "all PyG workers")]
    rates = [
        [
            name,
            f"{cell['edges_per_s'] / 1e6:.1f}",
            f"{cell['ms_a_batch']:.2f}",
            f"{cell['edges_per_s'] / thread:.1f}",
            *(
                f"{cell['edges_per_s'] / way['edges_per_s']:.1f}"
                if "edges_per_s" in way
                else "-"
                for way in ways
            ),
        ]
        for name, cell in cells.items()
        if "edges_per_s" in cell
    ]
    epochs = [
        [
            name.removeprefix("epoch, "),
            *(
                f"{cell[key]:.2f}"
                for key in (
                    "seconds",
                    "sampling_alone_s",
                    "fetching_alone_s",
                    "training_alone_s",
                )
            ),
        ]
        for name, cell in cells.items()
        if name.startswith("epoch")
    ]
    equal = [cell["equal"] for name, cell in cells.items() if "equal" in cell]
    missing = f" PyG's own sampler: {worker['missing']}." if "missing" in worker else ""
    return "\n\n".join(
        [
            f"**Sampling.** A graph with the statistics of ogbn-products, batches of "
            f"{given['batch_size']} seeds, fan-outs {given['fanouts']}; one CPU thread "
            f"is our `NeighborSampler`.{missing} {sum(equal)} of {len(equal)} samples "
            "of the device equal the CPU's.",
            markdown(
                [
                    "who samples",
                    "M edges/s",
                    "ms a batch",
                    "times one CPU thread",
                    "one PyG worker",
                    "all of them",
                ],
                rates,
            ),
            f"GraphSAGE, hidden 256, fan-outs {given['train_fanouts']}, "
            f"{given['features']} features in host memory: seconds an epoch, and its "
            "stages alone.",
            markdown(["sampling", "epoch", "sampling", "fetching", "training"], epochs),
            where(data),
        ]
    )
