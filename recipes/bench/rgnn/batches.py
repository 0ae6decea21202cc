"""Mini-batches and captured steps, on this GPU.

    python -m recipes.bench rgnn.batches --budget-s 90 --out batches.json

- `batch`: two layers on neighbourhoods of 1,024 seeds, drawn once and given to both
  sides; training steps of hector's layers (`HeteroGraph` of the batch made in the step)
  and of PyG's (edge index and dictionaries made before; the faster one of both its
  RGCN layers). Features lie on the device.
- `captured`: full-batch steps with Adam (PyTorch's fused one, on all sides: else one
  step of it is a hundred kernels for an HGT) on small graphs of published sizes:
  hector's as they are, as one CUDA graph, and PyG's.

Medians; ratios are PyG's time over hector's of the same run.
"""

import functools
import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.capture import CapturedStep
from hector.datasets.generate import TABLE_3_3, GraphSpec, generate
from hector.graph import HeteroGraph, sampled_subgraph
from hector.sampling import NeighborSampler, SampledBatch
from hector.train.model import compiled_layer
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import wait
from recipes.bench.rgnn.mag import CLASSES, FANOUTS, SEEDS, WIDTH, mag_graph, specs
from recipes.bench.rgnn.pyg import pyg_conv, pyg_layer, wrap

KINDS = ("rgcn", "rgat", "hgt")
SMALL = {
    "aifb": TABLE_3_3["aifb"],
    "mutag": TABLE_3_3["mutag"],
    # Authors, papers, terms, conferences; three relations, both ways.
    "dblp": GraphSpec(
        num_nodes=26_128,
        num_node_types=4,
        num_edges=239_566,
        num_edge_types=6,
        compaction_ratio=0.23,
        relation_skew=0.5,
    ),
}


@functools.cache
def mag_rows() -> tuple[HeteroGraph, Tensor]:
    """That graph, and features on the device."""
    graph = mag_graph(torch.device("cuda"))
    return graph, torch.randn(graph.num_nodes, WIDTH, device="cuda")


def two(kind: str, graph: HeteroGraph, make: Callable[..., nn.Module]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(make(spec, graph) for spec in specs(kind)).to(graph.device)


def step_of(
    layers: Any, x: Tensor, graphs: Any, rows: Tensor, goal: Tensor
) -> Callable[[], Tensor]:
    """Forward, loss and backward."""

    def step() -> Tensor:
        for p in parameters(layers):
            p.grad = None
        h = layers[1](layers[0](x, graphs).relu(), graphs)[rows]
        loss = functional.cross_entropy(h, goal)
        loss.backward()
        return loss.detach()

    return step


def parameters(layers: Any) -> list[nn.Parameter]:
    return [p for m in layers for p in m.parameters()]


def milliseconds(step: Callable[[], Any], rounds: int = 8) -> tuple[float, float]:
    """Medians of a step by the clock, and of the host's part of it."""
    whole, host = [], []
    for _ in range(rounds):
        begin = wait()
        step()
        host.append(1e3 * (time.perf_counter() - begin))
        whole.append(1e3 * (wait() - begin))
    return median(whole), median(host)


def batch_cell(
    kind: str, graph: HeteroGraph, features: Tensor, num_seeds: int = SEEDS
) -> dict[str, Any]:
    """The same drawn neighbourhoods through both."""
    sampler, device = NeighborSampler(graph, FANOUTS), graph.device
    drawn: list[SampledBatch] = []
    for i in range(8):
        seeds = torch.arange(i * num_seeds, (i + 1) * num_seeds, device=device)
        drawn.append(sampler.sample(seeds))
    ours = two(kind, graph, compiled_layer)
    times: dict[str, list[float]] = {"hector": [], "host": []}
    errors = []
    for i, found in enumerate(drawn):
        x, goal = features[found.node_ids], found.seeds % CLASSES

        def fresh(
            found: SampledBatch = found, x: Tensor = x, goal: Tensor = goal
        ) -> Tensor:
            made = sampled_subgraph(graph, found.node_ids, found.edge_ids)
            return step_of(ours, x, made, found.seeds, goal)()

        ways = {}
        for way in ("pyg", "pyg_fast")[: 2 if kind == "rgcn" else 1]:
            theirs = [
                wrap(pyg_conv(spec, graph, fast=way == "pyg_fast"), found.graph).to(
                    device
                )
                for spec in specs(kind)
            ]
            for mine, other in zip(ours, theirs, strict=True):
                other.conv.load_state_dict(mine.state_dict())
            ways[way] = step_of(theirs, x, found.graph, found.seeds, goal)
        loss = float(fresh())
        errors += [abs(loss / float(plain()) - 1) for plain in ways.values()]
        if i > 1:  # the first compile
            whole, host = milliseconds(fresh, 3)
            times["hector"].append(whole)
            times["host"].append(host)
            for way, plain in ways.items():
                times.setdefault(way, []).append(milliseconds(plain, 3)[0])
    found_ms = {f"{name}_ms": round(median(t), 3) for name, t in times.items()}
    best = min(v for k, v in found_ms.items() if k.startswith("pyg"))
    first = torch.arange(num_seeds, device=device)
    draw = milliseconds(lambda: sampler.sample(first))[0]
    return {
        "nodes": int(median(b.graph.num_nodes for b in drawn)),
        "edges": int(median(b.graph.num_edges for b in drawn)),
        **found_ms,
        "draw_ms": round(draw, 3),
        "ratio": round(best / found_ms["hector_ms"], 2),
        "largest_loss_error": max(errors),
    }


def small_step(kind: str, name: str, side: str) -> Callable[[], Tensor]:
    """A whole step with Adam: `hector`, `captured` or `pyg`."""
    graph = generate(SMALL[name], seed=0, device="cuda")
    x = torch.randn(graph.num_nodes, WIDTH, device="cuda")
    rows = torch.arange(min(200, graph.num_nodes), device="cuda")
    layers = two(kind, graph, pyg_layer if side == "pyg" else compiled_layer)
    if side == "pyg":
        for mine, other in zip(two(kind, graph, compiled_layer), layers, strict=True):
            other.conv.load_state_dict(mine.state_dict())
    adam = torch.optim.Adam(parameters(layers), capturable=True, fused=True)
    inner = step_of(layers, x, graph, rows, rows % CLASSES)

    def step() -> Tensor:
        loss = inner()
        adam.step()
        return loss

    return CapturedStep(step) if side == "captured" else step


def captured_cell(kind: str, name: str) -> dict[str, Any]:
    """The three sides' times."""
    found: dict[str, Any] = {}
    for side in ("hector", "captured", "pyg"):
        torch.manual_seed(1)
        run = small_step(kind, name, side)
        losses = [float(run()) for _ in range(6)]
        found[f"{side}_ms"], found[f"{side}_host_ms"] = milliseconds(run, 15)
        found[f"{side}_loss"] = losses[-1]
    found["ratio"] = round(found["pyg_ms"] / found["captured_ms"], 2)
    return {k: round(v, 5) for k, v in found.items()}


def main(bench: Bench) -> None:
    """Cells until the time is over."""
    about = {"width": WIDTH, "seeds": SEEDS, "fanouts": FANOUTS, "classes": CLASSES}
    cells = bench.cells(about)
    for kind in KINDS:
        cells.run(f"batch/{kind}", lambda k=kind: batch_cell(k, *mag_rows()))
    for name, kind in itertools.product(SMALL, KINDS):
        cells.run(f"captured/{kind}/{name}", captured_cell, kind, name)
