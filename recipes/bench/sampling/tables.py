"""`rates.json` as tables of results on sampling."""

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table


def sampling(data: Data) -> str:
    """Edges a second by who samples, and epochs with their stages alone."""
    cells, given = data["cells"], data["settings"]
    worker, fleet = (cells.get(f"{n} PyG worker", {}) for n in ("one", "all"))
    fleet = cells.get("all PyG workers", fleet)
    rates = {
        "who samples": "{name}",
        "M edges/s": lambda c: f"{c['edges_per_s'] / 1e6:.1f}",
        "ms a batch": "{ms_a_batch:.2f}",
    }
    for head, way in (
        ("times one CPU thread", cells["one CPU thread"]),
        ("one PyG worker", worker),
        ("all of them", fleet),
    ):
        rates[head] = lambda c, w=way: f"{c['edges_per_s'] / w['edges_per_s']:.1f}"
    epochs: dict[str, Column] = {}
    epochs["sampling"] = lambda c: c["name"].removeprefix("epoch, ")
    for head, key in (
        ("epoch", "epoch_s"),
        ("drawing alone", "drawing_alone_s"),
        ("fetching", "copying_alone_s"),
        ("training", "training_alone_s"),
    ):
        epochs[head] = f"{{{key}:.2f}}"
    equal = [cell["equal"] for cell in cells.values() if "equal" in cell]
    missing = f"PyG's own sampler: {worker['missing']}. " if "missing" in worker else ""
    return paragraphs(
        f"{missing}{sum(equal)} of {len(equal)} samples of the device equal the CPU's.",
        table(cells, rates, needs="edges_per_s"),
        f"GraphSAGE, hidden 256, fan-outs {given['train_fanouts']}, "
        f"{given['features']} features in host memory: seconds an epoch, and its "
        "stages alone.",
        table({n: c for n, c in cells.items() if n.startswith("epoch")}, epochs),
    )
