"""Compiled layers train as PyG's do: same start, same losses, same accuracy.

Two-layer classifiers on AIFB and MUTAG in float64 from PyG's initial weights: the
largest difference of the per-epoch losses, and the mean test accuracy over seeds.
Rows that the output file has are kept: a cut run goes on.

    python -m recipes.bench.rgnn.parity --data /data --out results/rgnn_parity.json
"""

import argparse
import sys
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
from recipes.bench.common import results
from recipes.bench.common.cells import environment
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


def compare(kind: LayerKind, data: DataConfig, args: argparse.Namespace) -> Any:
    """One row: loss difference of seed 0, accuracies of all seeds of ours."""
    options = {"num_epochs": args.epochs, "device": args.device}
    theirs = train(kind, data, pyg_layer, **options)
    ours = train(kind, data, from_pygs_start, **options)
    pairs = zip(ours.losses, theirs.losses, strict=True)
    seeds = train(kind, data, compiled_layer, num_seeds=args.seeds, **options)
    return {
        "data": data.name,
        "model": kind.value,
        "num_epochs": len(ours.losses),
        "num_seeds": args.seeds,
        "device": args.device,
        "loss_difference": max(abs(a - b) for a, b in pairs),
        "first_loss": ours.losses[0],
        "last_loss": ours.losses[-1],
        "pyg_last_loss": theirs.losses[-1],
        "accuracy_same_start": ours.mean_accuracy,
        "pyg_accuracy_same_start": theirs.mean_accuracy,
        "mean_accuracy": seeds.mean_accuracy,
        "accuracies": seeds.accuracies,
        "epoch_ms": ours.epoch_ms,
        "pyg_epoch_ms": theirs.epoch_ms,
    }


def earlier_rows(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of an earlier run with the same settings on the same kind of device."""
    data = results.find(path)
    same = {"num_epochs": args.epochs, "num_seeds": args.seeds, "device": args.device}
    rows = data["cells"].values() if data else ()
    return [r for r in rows if all(r.get(k) == v for k, v in same.items())]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="holds directories aifb and mutag")
    add("--out", type=Path, default=Path("recipes/bench/results/rgnn/rgnn_parity.json"))
    add("--sets", nargs="+", default=["aifb", "mutag"])
    add("--models", nargs="+", default=[k.value for k in KINDS])
    add("--epochs", type=int, default=50)
    add("--seeds", type=int, default=10)
    add("--device", default="cpu")
    args = parser.parse_args(argv)
    rows = earlier_rows(args.out, args)
    known = {(r["data"], r["model"]) for r in rows}
    for name in args.sets:
        data = DataConfig(name=name, directory=str(args.data / name))
        for kind in (LayerKind(m) for m in args.models):
            if (name, kind.value) in known:
                continue
            rows.append(compare(kind, data, args))
            row = rows[-1]
            print(
                f"{name} {kind.value}: losses differ by {row['loss_difference']:.2e} "
                f"over {row['num_epochs']} epochs, mean accuracy "
                f"{row['mean_accuracy']:.4f} of {args.seeds} seeds",
                flush=True,
            )
            cells = {f"{r['data']} {r['model']}": r for r in rows}
            about = {"environment": environment(), "settings": {}}
            results.write(args.out, {**about, "cells": cells})
    return 0


if __name__ == "__main__":
    sys.exit(main())
