"""Training on batches that the training device draws."""

from types import ModuleType

import pytest
import torch

from pydirect.loader import (
    DirectFetch,
    LoaderConfig,
    MiniBatchLoader,
    Sampling,
    StagedFetch,
)
from pydirect.sampling import GraphStatistics, generate_graph, settle
from pydirect.train import NodeClassificationTrainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CPU = torch.device("cpu")
SMALL = GraphStatistics(
    num_nodes=1500, num_edges=12_000, num_classes=5, num_features=16, train_share=0.3
)


def test_batches_are_right_and_repeat() -> None:
    graph, labels = generate_graph(SMALL, seed=1)
    table = torch.arange(1500.0)[:, None].repeat(1, 3)
    seeds = torch.arange(0, 1500, 3)
    epochs = []
    for sampling, settled, fetch in (
        ("device", False, DirectFetch(table, CPU, num_slots=2)),
        (Sampling.HOST, False, StagedFetch(table, CPU)),
        ("device", True, StagedFetch(table, CPU)),
    ):
        config = LoaderConfig(batch_size=64, fanouts=(5, 4), sampling=sampling, seed=7)
        source = settle(graph, "cpu") if settled else graph
        loader = MiniBatchLoader(source, labels, seeds, fetch, config, CPU)
        epochs.append([(b.x.clone(), b.y, b.edge_index) for b in loader])
        assert loader.epoch == 1
    for one, *others in zip(*epochs, strict=True):
        for other in others:
            assert all(map(torch.equal, one, other))
    seen = torch.cat([x[: len(y), 0] for x, y, _ in epochs[0]]).long()
    assert torch.equal(seen.sort().values, seeds)
    assert torch.equal(labels[seen], torch.cat([y for _, y, _ in epochs[0]]))


def test_the_trainer_learns_from_them(pyg: ModuleType) -> None:
    from pydirect.datasets import load

    def model(in_channels: int, out_channels: int) -> torch.nn.Module:
        sage: torch.nn.Module = pyg.nn.GraphSAGE(in_channels, 32, 2, out_channels)
        return sage

    losses = []
    for sampling in ("device", "host"):
        trainer = NodeClassificationTrainer(
            dataset=load("generated", statistics=SMALL, device="cpu"),
            model=model,
            loader=LoaderConfig(batch_size=128, fanouts=(5, 5), sampling=sampling),
            epochs=4,
            progress=False,
            device="cpu",
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        )
        result = trainer.fit()
        losses.append(result.losses)
        assert result.test_accuracy > 0.8
    assert losses[0] == losses[1]


def test_errors() -> None:
    graph, labels = generate_graph(SMALL, seed=1)
    with pytest.raises(ValueError, match="Sampling"):
        LoaderConfig(sampling="gpu")
    fetch = StagedFetch(torch.zeros(1500, 1), CPU)
    with pytest.raises(ValueError, match="expects device, host or peers"):
        MiniBatchLoader(
            settle(graph, "cpu"), labels, torch.arange(3), fetch, LoaderConfig(), CPU
        )
