"""Tensor parallel steps from the meta device: one rank of two that are not there.

    python -m recipes.bench foresight.tensor_ranks

Products of every layer are split in pairs, the first by columns, the second by rows, as
torch's `parallelize_module` does it. A process group that does nothing stands for the
other ranks: the captured graph has one rank's products, its collectives, and what its
host does for operators on DTensors. Writes what the present code says of the recorded
tensor parallel steps into `results/foresight/ranks_held_h200.json`; which layers their
run had split was not written down, so that the plans here are an assumption.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from recipes.bench.foresight import subjects
from recipes.bench.foresight.errors import errors
from recipes.bench.harness import records
from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.collectives import load_fabric
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.foresight.graph import Graph
from ssdtrain.tools.foresight.ranks import estimate_graphs
from ssdtrain.tools.foresight.wires import Wires

FILE = RESULTS / "foresight" / "ranks_held_h200.json"
NUM_RANKS = 2
PLANS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pair": (("up",), ("down",)),
    "bert": (
        (
            *(f"attention.self.{name}" for name in ("query", "key", "value")),
            "intermediate.dense",
        ),
        ("attention.output.dense", "output.dense"),
    ),
    "llama": (
        (
            *(f"self_attn.{name}_proj" for name in "qkv"),
            *("mlp.gate_proj", "mlp.up_proj"),
        ),
        ("self_attn.o_proj", "mlp.down_proj"),
    ),
}
"""Of a layer: what is split by columns, and what by rows."""


def split(
    layer: nn.Module,
    plan: tuple[tuple[str, ...], tuple[str, ...]],
    device_type: str = "cpu",
) -> None:
    """Split a layer's products over all ranks."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    columns, rows = plan
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    styles |= {name: RowwiseParallel() for name in rows}
    parallelize_module(layer, mesh, styles)


def alone() -> None:
    """Join a process group of two ranks that does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)


def tensor_parallel(cell: dict[str, Any]) -> Graph:
    """One rank's step of a recorded cell's model."""
    name = cell["model"]
    with torch.device("meta"):
        subject = subjects.MAKERS[name](cell["batch"], **cell["shape"])
        for layer in subjects.layers(name, subject.model):
            split(layer, PLANS[name])
        return capture(subject.model, subject.forward, optimizer=subject.optimizer)


def main() -> None:
    found = json.loads(FILE.read_text())
    device = load_device("h200")
    wires = Wires(fabric=load_fabric("nvlink"), num_ranks=NUM_RANKS)
    alone()
    rows = [row for row in found["steps"] if row["how"] == "tp"]
    for row in rows:
        graph = tensor_parallel(row)
        row["from_meta_us"] = estimate_graphs(
            [graph] * NUM_RANKS, device, wires
        ).step_us
        ratio = row["from_meta_us"] / row["measured_us"]
        print(f"{row['model']:>6} x{ratio:.3f}")
    summary = errors(rows, "from_meta_us", "measured_us")
    found["errors"]["tensor parallel, from the meta device"] = summary
    print(summary)
    records.write(FILE, found)
    dist.destroy_process_group()
