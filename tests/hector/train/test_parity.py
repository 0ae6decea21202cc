"""Training from PyG's initial weights follows PyG's losses."""

from pathlib import Path

import pytest

from hector.train import DataConfig, LayerKind

pytest.importorskip("torch_geometric")

from recipes.bench.rgnn.cells import KINDS
from recipes.bench.rgnn.parity import from_pygs_start, train
from recipes.bench.rgnn.pyg import pyg_layer

DATA = Path(__file__).resolve().parents[3] / "../shared/data"


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
