"""Steps of two GPUs at shapes that no model was made on, predicted.

    python -m recipes.bench foresight.held_ranks
    python -m recipes.bench foresight.held_ranks RANKS.json --device mine.json \
        --own-collectives --out ranks_h100.json

Without a measurement it reads `results/foresight/ranks_held_h200.json`, whose steps
were measured after the models were made, and writes the predictions of the present code
beside them. RANKS.json is what `collectives` writes, the graphs of all ranks beside it.
DDP and `fully_shard` are predicted from one rank's graph on the meta device, tensor and
pipeline parallelism from the graphs of both ranks, captured while they ran (without
them those predictions stay as recorded); tensor parallelism, too, from the meta device,
by the usual plan: which layers the recorded run had split was not written down.
`--own-collectives` takes the times of collectives from the same measurement in the
place of those shipped.
"""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recipes.bench.foresight import tensor_ranks
from recipes.bench.foresight.assemble import fabric_of
from recipes.bench.foresight.errors import errors
from recipes.bench.foresight.evaluate import phases_us
from recipes.bench.foresight.over_ranks import NUM_RANKS, spread
from recipes.bench.harness import records
from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight.collectives import load_fabric
from ssdtrain.tools.foresight.device import Device, load_device
from ssdtrain.tools.foresight.graph import Graph, read_graph
from ssdtrain.tools.foresight.price import estimate_step
from ssdtrain.tools.foresight.ranks import estimate_graphs
from ssdtrain.tools.foresight.wires import Wires

FILE = RESULTS / "foresight" / "ranks_held_h200.json"
FROM_META = ("ddp", "fsdp")


def graphs_of(cell: dict[str, Any], graphs: Path | None) -> list[Graph]:
    """Every rank's, as it was captured; none, if they are not here."""
    if graphs is None:
        return []
    name = f"graph_{cell['how']}_{cell['model']}_{cell['batch']}"
    paths = [graphs / f"{name}.rank{rank}.json" for rank in range(NUM_RANKS)]
    if not all(path.is_file() for path in paths):
        return []
    return [read_graph(path) for path in paths]


def predicted(
    cell: dict[str, Any], device: Device, wires: Wires, graphs: Path | None
) -> dict[str, Any]:
    """What the present code says: the step, and the host's phases."""
    own = graphs_of(cell, graphs)
    found: dict[str, Any] = {}
    if own:
        found["captured_us"] = estimate_graphs(own, device, wires).step_us
        found["captured_phases_us"] = [phases_us(g, device, wires) for g in own]
    if cell["how"] in FROM_META:
        graph = spread(cell)
        found["predicted_us"] = estimate_step(graph, device, wires).step_us
        found["phases_us"] = phases_us(graph, device, wires)
    elif own:
        found["predicted_us"] = found["captured_us"]
    if cell["how"] == "tp":
        graph = tensor_ranks.tensor_parallel(cell)
        step = estimate_graphs([graph] * NUM_RANKS, device, wires)
        found["from_meta_us"] = step.step_us
        found["phases_us"] = phases_us(graph, device, wires)
    return found


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors by how steps are spread; those without a prediction are left out."""
    hows = {
        "data parallel": ("predicted_us", FROM_META),
        "tensor parallel": ("predicted_us", ("tp",)),
        "pipeline": ("predicted_us", ("pipeline",)),
        "tensor parallel, from the meta device": ("from_meta_us", ("tp",)),
    }
    found = {}
    for title, (name, some) in hows.items():
        known = [r for r in rows if r["how"] in some and r.get(name) is not None]
        if known:
            found[title] = errors(known, name, "measured_us")
    return found


def main(
    ranks: Path | None = None,
    /,
    *,
    device: str = "h200",
    own_collectives: bool = False,
    out: Path = FILE,
) -> None:
    """Predict them.

    Args:
        ranks: a new measurement
        own_collectives: their curves are those of the measurement
    """
    measured = json.loads((ranks or FILE).read_text())
    gpu, fabric = load_device(device), load_fabric("nvlink")
    if own_collectives:
        fabric, _ = fabric_of(measured, "nvlink")
    wires = Wires(fabric=fabric, num_ranks=NUM_RANKS)
    graphs = None if ranks is None else ranks.parent
    tensor_ranks.alone()
    rows = []
    for cell in measured["steps"]:
        row = {**cell, **predicted(cell, gpu, wires, graphs)}
        row["measured_us"] = row.pop("step_us", cell.get("measured_us"))
        rows.append(row)
        for name in ("predicted_us", "captured_us", "from_meta_us"):
            if row.get(name) is not None:
                ratio = row[name] / row["measured_us"]
                print(f"{row['how']:>9} {row['model']:>6} {name:>13} x{ratio:.3f}")
        for name in ("host_us", "phases_us", "captured_phases_us"):
            print(f"{'':>17} {name}: {row.get(name)}")
    dist.destroy_process_group()
    summary = summary_of(rows)
    print(summary)
    kept = {key: measured[key] for key in ("device", "torch") if key in measured}
    summary = {**measured.get("errors", {}), **summary}
    records.write(
        RESULTS / "foresight" / out, {**kept, "errors": summary, "steps": rows}
    )
