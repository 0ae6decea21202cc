"""Steps of two GPUs that were recorded, predicted: what each of two causes is worth.

    python -m recipes.bench foresight.over_ranks

Reads and writes `results/foresight/ranks_h200.json`. `before`: neither the host's work
for sharded weights nor what collectives cost the kernels beside them. `host`: the first
of them, whose numbers were measured on a CPU (sharded_host.py). `held_out`: the second
as well, its one number found on the other recorded steps, never on the step itself.
`shipped`: with the number that the fabric's file has, found on all of them.
"""

import json
from dataclasses import replace
from typing import Any

from recipes.bench.foresight.errors import errors
from recipes.bench.foresight.evaluate import graph_of
from recipes.bench.harness import records
from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight import parallel
from ssdtrain.tools.foresight.collectives import Fabric, load_fabric
from ssdtrain.tools.foresight.device import Device, load_device
from ssdtrain.tools.foresight.graph import Graph
from ssdtrain.tools.foresight.parallel import data_parallel, fully_sharded, unit_of
from ssdtrain.tools.foresight.price import estimate_step
from ssdtrain.tools.foresight.wires import Wires

FILE = RESULTS / "foresight" / "ranks_h200.json"
SLOWDOWNS = [0.1 * step for step in range(21)]
NUM_RANKS = 2


def spread(cell: dict[str, Any]) -> Graph:
    """The step over two ranks."""
    graph = graph_of(cell)
    if cell["how"] == "ddp":
        return data_parallel(graph)
    return fully_sharded(graph, NUM_RANKS, unit_of)


def without_host(graph: Graph) -> Graph:
    """The same graph, its sharded weights without the host's work for them."""
    nodes = tuple(
        replace(node, attr={k: v for k, v in node.attr.items() if k != "host_views"})
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def step_us(graph: Graph, device: Device, fabric: Fabric) -> float:
    """Of every rank."""
    wires = Wires(fabric=fabric, num_ranks=NUM_RANKS)
    return estimate_step(graph, device, wires).step_us


def best(rows: list[dict[str, Any]]) -> float:
    """The slowdown of least mean error over steps."""
    return min(
        SLOWDOWNS,
        key=lambda s: sum(
            abs(row["by_slowdown"][s] / row["measured_us"] - 1.0) for row in rows
        ),
    )


def main() -> None:
    measured = json.loads(FILE.read_text())["steps"]
    device, fabric = load_device("h200"), load_fabric("nvlink")
    rows: list[dict[str, Any]] = []
    for cell in measured:
        graph = spread(cell)
        by_slowdown = {
            s: step_us(graph, device, replace(fabric, compute_slowdown=s))
            for s in SLOWDOWNS
        }
        plain = replace(fabric, compute_slowdown=0.0)
        rows.append(
            {
                **cell,
                "before_us": step_us(without_host(graph), device, plain),
                "host_us": by_slowdown[0.0],
                "shipped_us": step_us(graph, device, fabric),
                "by_slowdown": by_slowdown,
            }
        )
    for row in rows:
        others = [other for other in rows if other is not row]
        row["slowdown_of_others"] = round(best(others), 2)
        row["held_out_us"] = row["by_slowdown"][best(others)]
    found: dict[str, Any] = {"best_of_all": round(best(rows), 2)}
    for row in rows:
        del row["by_slowdown"]
    for name in ("before_us", "host_us", "held_out_us", "shipped_us"):
        found[name] = errors(rows, name, "measured_us")
        print(name, found[name])
        for row in rows:
            ratio = row[name] / row["measured_us"]
            print(f"   {row['model']} {row['how']} x{ratio:.3f}")
    found["views"] = {
        phase.value: views._asdict() for phase, views in parallel.SHARDED_VIEWS.items()
    }
    found["steps"] = rows
    records.write(FILE, found)
