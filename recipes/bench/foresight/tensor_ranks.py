"""Tensor parallel steps from the meta device: one rank of two that are not there.

Products of every layer are split in pairs, the first by columns, the second by rows, as
torch's `parallelize_module` does it. A process group that does nothing stands for the
other ranks: the captured graph has one rank's products, its collectives, and what its
host does for operators on DTensors.
"""

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
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.graph import Graph

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
