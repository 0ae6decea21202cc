"""Training by sampled mini-batches, and by captured steps."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

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
        optimizer=OptimizerConfig(learning_rate=0.05),
        epochs=4,
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


@pytest.mark.parametrize("layer", ["rgcn", "rgat", "hgt"])
def test_padded_batches_train_as_exact_ones(layer: str) -> None:
    """What `capture` replays on a GPU: spare nodes and edges change no loss."""
    exact = make(layer, batch=16, fanouts=(3, 3)).train()
    padded = make(layer, batch=16, fanouts=(3, 3), capture=True).train()
    assert padded.losses == pytest.approx(exact.losses, rel=1e-9)


class Table:
    """Rows that are made as they are asked for, and what was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __getitem__(self, node_ids: Tensor) -> Tensor:
        self.asked.append(node_ids.numel())
        angles = node_ids[:, None].double() * torch.arange(1.0, 7.0)
        return angles.sin()


def test_features_are_gathered_for_the_nodes_of_a_step() -> None:
    table = Table()
    trainer = make(batch=8, fanouts=(2, 2), features=table)
    losses = trainer.train().losses
    assert losses[-1] < losses[0]
    # The first row tells the width, and the whole graph is read to test on it.
    first, *steps, last = table.asked
    assert first == 1 and max(steps) < last


@pytest.mark.parametrize("where", ["gather", "step"])
def test_an_error_ends_the_threads(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Table):
        def __getitem__(self, node_ids: Tensor) -> Tensor:
            if where == "gather" and len(self.asked) == 3:
                raise RuntimeError("no rows")
            return super().__getitem__(node_ids)

    if where == "step":

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("no rows")

        monkeypatch.setattr("hector.train.mini_batches.CapturedBatches.__call__", fail)
    trainer = make(batch=8, fanouts=(2, 2), features=Broken(), capture=True)
    with pytest.raises(RuntimeError, match="no rows") as kept:
        trainer.train()
    names = [t.name for t in threading.enumerate()]
    assert kept.tb and not [n for n in names if n.startswith("hector-")]


def test_gathered_features_are_padded_with_a_batch() -> None:
    exact = make(batch=8, fanouts=(2, 2), features=Table()).train()
    padded = make(batch=8, fanouts=(2, 2), features=Table(), capture=True).train()
    assert padded.losses == pytest.approx(exact.losses, rel=1e-9)


def test_a_table_and_a_tensor_are_one() -> None:
    whole = make(features=Table()).train().losses
    num = make().task().graph.num_nodes
    rows = Table()[torch.arange(num)]
    assert make(features=rows).train().losses == whole


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"batch": 0}, "expected batch of at least 1"),
        ({"batch": 8, "fanouts": (4,)}, "expected fanouts for 2 layers"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_a_capture_needs_a_device() -> None:
    with pytest.raises(ValueError, match="expected a CUDA device"):
        CapturedStep(lambda: None)
