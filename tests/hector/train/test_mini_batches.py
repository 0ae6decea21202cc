"""Training by sampled mini-batches, and by captured steps."""

from typing import Any

import pytest
import torch

from hector.capture import CapturedStep
from hector.train import (
    DataConfig,
    ModelConfig,
    NodeClassificationTrainer,
    OptimizerConfig,
    RunConfig,
)


def make(layer: str = "rgcn", **changes: Any) -> NodeClassificationTrainer:
    return NodeClassificationTrainer(
        model=ModelConfig(layer=layer, hidden_channels=8),
        data=DataConfig(name="aifb", scale=0.02, num_labelled=60),
        optimizer=OptimizerConfig(num_epochs=4, learning_rate=0.05),
        run=RunConfig(device="cpu", progress=False, dtype="float64"),
        **changes,
    )


@pytest.mark.parametrize("layer", ["rgcn", "rgat", "hgt"])
def test_all_neighbours_of_all_nodes_are_a_full_batch(layer: str) -> None:
    """One batch of everything: the same losses but for the order of sums."""
    full = make(layer).train()
    batches = make(layer, batch=1000, fanouts=(-1, -1)).train()
    assert batches.losses == pytest.approx(full.losses, rel=1e-9)


def test_small_batches_learn() -> None:
    losses = make(batch=8, fanouts=(4, 4)).train().losses
    assert losses[-1] < 0.7 * losses[0]


def test_a_run_repeats() -> None:
    first = make(batch=16, fanouts=(3, 3)).train()
    assert make(batch=16, fanouts=(3, 3)).train().losses == first.losses


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"batch": 0}, "expected batch of at least 1"),
        ({"batch": 8, "fanouts": (4,)}, "expected fanouts for 2 layers"),
        ({"batch": 8, "capture": True}, "expected capture of full-batch steps"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_a_capture_needs_a_device() -> None:
    with pytest.raises(ValueError, match="expected a CUDA device"):
        CapturedStep(lambda: None)
