"""Compiled layers train as PyG's do: same start, same losses, same accuracy.

Two-layer classifiers on AIFB and MUTAG in float64 from PyG's initial weights: the
largest difference of the per-epoch losses, and the mean test accuracy over seeds.
Rows that the output file has are kept: a cut run goes on.

    python -m recipes.bench rgnn.parity --data /data --out results/rgnn_parity.json
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hector.graph import HeteroGraph
from hector.train import (
    DataConfig,
    LayerKind,
    LayerSpec,
    ModelConfig,
    NodeClassificationTrainer,
    OptimizerConfig,
    RunConfig,
    TrainingResult,
)
from hector.train.model import LayerFactory, compiled_layer
from recipes.bench.harness.cli import Bench
from recipes.bench.rgnn.cells import KINDS
from recipes.bench.rgnn.pyg import pyg_conv, pyg_layer


def from_pygs_start(spec: LayerSpec, graph: HeteroGraph) -> nn.Module:
    """Our layer with the weights that PyG's draws from the same generator state."""
    conv = pyg_conv(spec, graph)
    with torch.random.fork_rng(devices=[]):
        layer = compiled_layer(spec, graph)
    layer.load_state_dict(conv.state_dict())
    return layer


def train(
    kind: LayerKind,
    data: DataConfig,
    make_layer: LayerFactory,
    *,
    num_epochs: int = 50,
    num_seeds: int = 1,
    device: str = "cpu",
) -> TrainingResult:
    """A float64 run of the node classification trainer."""
    return NodeClassificationTrainer(
        model=ModelConfig(layer=kind),
        data=data,
        optimizer=OptimizerConfig(weight_decay=5e-4),
        epochs=num_epochs,
        run=RunConfig(
            dtype="float64", device=device, num_seeds=num_seeds, progress=False
        ),
        make_layer=make_layer,
    ).train()


def compare(
    kind: LayerKind, data: DataConfig, device: str, epochs: int, seeds: int
) -> dict[str, Any]:
    """One row: loss difference of seed 0, accuracies of all seeds of ours."""
    theirs, ours = (
        train(kind, data, make, num_epochs=epochs, device=device)
        for make in (pyg_layer, from_pygs_start)
    )
    pairs = zip(ours.losses, theirs.losses, strict=True)
    own = {"num_epochs": epochs, "num_seeds": seeds, "device": device}
    every = train(kind, data, compiled_layer, **own)
    return {
        "data": data.name,
        "model": kind.value,
        **own,
        "loss_difference": max(abs(a - b) for a, b in pairs),
        "first_loss": ours.losses[0],
        "last_loss": ours.losses[-1],
        "pyg_last_loss": theirs.losses[-1],
        "accuracy_same_start": ours.mean_accuracy,
        "pyg_accuracy_same_start": theirs.mean_accuracy,
        "mean_accuracy": every.mean_accuracy,
        "accuracies": every.accuracies,
        "epoch_ms": ours.epoch_ms,
        "pyg_epoch_ms": theirs.epoch_ms,
    }


def main(
    bench: Bench,
    *,
    data: Path,
    sets: tuple[str, ...] = ("aifb", "mutag"),
    models: tuple[str, ...] = tuple(kind.value for kind in KINDS),
    epochs: int = 50,
    seeds: int = 10,
) -> None:
    """Train what is missing.

    Args:
        data: holds directories aifb and mutag
    """
    device = bench.on or "cpu"
    cells = bench.cells({"epochs": epochs, "seeds": seeds, "device": device})
    for name in sets:
        config = DataConfig(name=name, directory=str(data / name))
        for kind in map(LayerKind, models):
            own = kind, config, device, epochs, seeds
            cells.run(f"{name} {kind.value}", compare, *own)
