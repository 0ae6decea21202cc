"""Training from PyG's initial weights follows PyG's losses."""

from pathlib import Path

import pytest
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

pytest.importorskip("torch_geometric")

from recipes.bench.rgnn.cells import KINDS
from recipes.bench.rgnn.pyg import pyg_conv, pyg_layer

DATA = Path(__file__).resolve().parents[3] / "../shared/data"


def from_pygs_start(spec: LayerSpec, graph: HeteroGraph) -> nn.Module:
    """Our layer with the weights that PyG's draws from the same generator state."""
    conv = pyg_conv(spec, graph)
    with torch.random.fork_rng(devices=[]):
        layer = compiled_layer(spec, graph)
    layer.load_state_dict(conv.state_dict())
    return layer


def train(
    kind: LayerKind, data: DataConfig, make_layer: LayerFactory, *, num_epochs: int
) -> TrainingResult:
    return NodeClassificationTrainer(
        model=ModelConfig(layer=kind),
        data=data,
        optimizer=OptimizerConfig(weight_decay=5e-4),
        epochs=num_epochs,
        run=RunConfig(dtype="float64", device="cpu", progress=False),
        make_layer=make_layer,
    ).train()


@pytest.mark.parametrize("kind", KINDS)
def test_generated_graph(kind: LayerKind) -> None:
    data = DataConfig(name="am", scale=0.0002, num_labelled=60)
    ours = train(kind, data, from_pygs_start, num_epochs=5)
    theirs = train(kind, data, pyg_layer, num_epochs=5)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-9)
    assert ours.losses[-1] < ours.losses[0]
    assert ours.accuracies == theirs.accuracies


def test_aifb() -> None:
    if not (DATA / "aifb").is_dir():
        pytest.skip("no AIFB data on this machine")
    data = DataConfig(name="aifb", directory=str(DATA / "aifb"))
    ours = train(LayerKind.RGAT, data, from_pygs_start, num_epochs=3)
    theirs = train(LayerKind.RGAT, data, pyg_layer, num_epochs=3)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-6)
