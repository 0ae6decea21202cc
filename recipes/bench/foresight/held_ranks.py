"""Steps of two GPUs at shapes that no model was made on, predicted.

    python -m recipes.bench.foresight.held_ranks [RANKS.json]

Reads `results/foresight/ranks_held_h200.json`, whose steps were measured after the
models were made, and writes the predictions of the present code beside them: DDP and
`fully_shard` from one rank's graph on the meta device, tensor and pipeline parallelism
from the graphs of both ranks, captured while they ran (`graphs` of RANKS.json, which is
what a measurement gives; without it those two predictions stay as recorded).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from recipes.bench.common import results
from recipes.bench.common.cells import RESULTS
from recipes.bench.foresight.errors import errors
from recipes.bench.foresight.over_ranks import NUM_RANKS, spread
from ssdtrain.foresight.collectives import load_fabric
from ssdtrain.foresight.device import load_device
from ssdtrain.foresight.graph import read_graph
from ssdtrain.foresight.price import estimate_step
from ssdtrain.foresight.ranks import estimate_graphs
from ssdtrain.foresight.wires import Wires

FILE = RESULTS / "foresight" / "ranks_held_h200.json"
FROM_META = ("ddp", "fsdp")


def predicted_us(
    cell: dict[str, Any], wires: Wires, graphs: Path | None
) -> float | None:
    """The step by the present code; None: its graphs are not here."""
    device = load_device("h200")
    if cell["how"] in FROM_META:
        return estimate_step(spread(cell), device, wires).step_us
    if graphs is None:
        return None
    name = f"graph_{cell['how']}_{cell['model']}_{cell['batch']}"
    paths = [graphs / f"{name}.rank{rank}.json" for rank in range(NUM_RANKS)]
    if not all(path.is_file() for path in paths):
        return None
    own = [read_graph(path) for path in paths]
    return estimate_graphs(own, device, wires).step_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="?", type=Path, help="a new measurement")
    args = parser.parse_args()
    source = FILE if args.ranks is None else args.ranks
    graphs = None if args.ranks is None else args.ranks.parent
    wires = Wires(fabric=load_fabric("nvlink"), num_ranks=NUM_RANKS)
    rows = []
    found = json.loads(source.read_text())
    for cell in found["steps"]:
        now_us = predicted_us(cell, wires, graphs)
        kept = cell.get("predicted_us")
        row = {**cell, "predicted_us": kept if now_us is None else now_us}
        row["measured_us"] = row.pop("step_us", cell.get("measured_us"))
        rows.append(row)
        if row["predicted_us"] is not None:
            ratio = row["predicted_us"] / row["measured_us"]
            print(f"{row['how']:>9} {row['model']:>6} x{ratio:.3f}")
    known = [row for row in rows if row["predicted_us"] is not None]
    summary = {
        how: errors(
            [r for r in known if r["how"] in hows], "predicted_us", "measured_us"
        )
        for how, hows in {
            "data parallel": FROM_META,
            "tensor parallel": ("tp",),
            "pipeline": ("pipeline",),
        }.items()
    }
    print(summary)
    summary = {**found.get("errors", {}), **summary}
    results.write(FILE, {"errors": summary, "steps": rows})


if __name__ == "__main__":
    main()
