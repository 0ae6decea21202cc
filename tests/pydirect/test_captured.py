"""Padded batches: the same losses and gradients, recorded once, grown when needed."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from pydirect.captured import CapturedStep, Room
from pydirect.datasets import NodeDataset
from pydirect.loader import LoaderConfig, MiniBatch
from pydirect.ranks import Ranks
from pydirect.train import NodeClassificationTrainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def trainer_of(
    dataset: NodeDataset, model: Callable[..., torch.nn.Module], **changes: Any
) -> NodeClassificationTrainer:
    settings: dict[str, Any] = {
        "loader": LoaderConfig(batch_size=100, fanouts=(4, 3, 2), sampling="device"),
        "epochs": 2,
        "progress": False,
        "device": "cpu",
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    }
    return NodeClassificationTrainer(
        dataset=dataset, model=model, **{**settings, **changes}
    )


class Recorded:
    """Work that can be repeated, and how often it was."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        work()  # as a warm-up does

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


@pytest.mark.parametrize("name", ["GraphSAGE", "GAT", "GCN"])
def test_training_is_that_without_padding(
    name: str, pyg: ModuleType, dataset: NodeDataset
) -> None:
    kind = getattr(pyg.nn, name)

    def model(in_channels: int, out_channels: int) -> torch.nn.Module:
        net: torch.nn.Module = kind(in_channels, 32, 3, out_channels)
        return net

    plain, padded = (trainer_of(dataset, model, capture=c) for c in (False, True))
    assert padded.fit().losses == pytest.approx(plain.fit().losses, rel=1e-4)
    for a, b in zip(
        plain.network.parameters(), padded.network.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def batches_of(dataset: NodeDataset) -> list[MiniBatch]:
    trainer = trainer_of(dataset, lambda **_: torch.nn.Linear(1, 1))
    return [replace(batch, x=batch.x.clone()) for batch in trainer.batches]


def plain_gradients(
    network: torch.nn.Module, batch: MiniBatch
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    network.zero_grad(set_to_none=True)
    scores = network(
        batch.x,
        batch.edge_index,
        num_sampled_nodes_per_hop=list(batch.num_nodes_per_hop),
        num_sampled_edges_per_hop=list(batch.num_edges_per_hop),
    )
    loss = torch.nn.functional.cross_entropy(scores[: batch.num_seeds], batch.y)
    loss.backward()
    return loss.detach(), [p.grad for p in network.parameters()]


def test_recorded_once_and_again_for_more(
    pyg: ModuleType, dataset: NodeDataset
) -> None:
    torch.manual_seed(0)
    network = pyg.nn.GraphSAGE(16, 8, 3, 5)
    network.unused = torch.nn.Parameter(torch.ones(2))
    batches = batches_of(dataset)
    assert batches[-1].num_seeds < 100 == batches[0].num_seeds
    recorder = Recorded()
    step = CapturedStep(network, 100, recorder)
    order = [batches[-1], batches[-1], *batches[:3], batches[-1]]
    counts = []
    for batch in order:
        loss, wanted = plain_gradients(network, batch)
        torch.testing.assert_close(step(batch), loss)
        for parameter, gradient in zip(network.parameters(), wanted, strict=True):
            if gradient is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(
                    parameter.grad, gradient, rtol=1e-4, atol=1e-6
                )
        counts.append(step.num_recorded)
    # The short batch first; then a long one; and no other after it.
    assert counts == [1, 1, 2, 2, 2, 2]
    assert (recorder.recorded, recorder.replayed) == (2, 6)
    assert network.unused.grad is None


def test_room() -> None:
    def batch_of(nodes: tuple[int, ...], edges: tuple[int, ...]) -> MiniBatch:
        return MiniBatch(
            x=torch.empty(0), y=torch.empty(0), edge_index=torch.empty(0),
            num_seeds=nodes[0], num_nodes_per_hop=nodes, num_edges_per_hop=edges,
        )  # fmt: skip

    room = Room.around(batch_of((10, 1000, 3000), (1000, 3000)), 20)
    assert room == Room(nodes=(84, 1280, 3328), edges=(1280, 3328))
    fits = [
        ((10, 1000, 3000), (1000, 3000), True),
        ((20, 1280, 3328), (1280, 3328), True),
        ((21, 10, 10), (10, 10), False),  # a seed more
        ((20, 1281, 3), (1280, 3328), False),
        ((20, 1281, 3000), (1000, 3000), False),  # the first hop reaches too far
        ((20, 1000, 3608), (1000, 3000), True),  # room that the first hop leaves
        ((20, 1000, 3609), (1000, 3000), False),
        ((20, 1000, 3000), (1281, 3000), False),
        ((20, 1000, 3000), (1280, 3329), False),
        ((20, 1000), (1280,), False),
    ]
    for nodes, edges, expected in fits:
        assert room.holds(batch_of(nodes, edges)) is expected, (nodes, edges)
    grown = room.grown(batch_of((20, 100, 5000), (2000, 100)), 20)
    assert grown == Room(nodes=(84, 1280, 5376), edges=(2304, 3328))


def test_several_processes_are_refused(pyg: ModuleType, dataset: NodeDataset) -> None:
    def model(in_channels: int, out_channels: int) -> torch.nn.Module:
        net: torch.nn.Module = pyg.nn.GraphSAGE(in_channels, 8, 3, out_channels)
        return net

    with pytest.raises(ValueError, match="capture: expects one process"):
        trainer_of(dataset, model, capture=True, ranks=Ranks(size=2))


def test_models_whose_rows_meet_are_refused(
    pyg: ModuleType, dataset: NodeDataset
) -> None:
    batch = batches_of(dataset)[0]
    with pytest.raises(ValueError, match=r"BatchNorm1d \(norms.0.module\)"):
        CapturedStep(pyg.nn.GraphSAGE(16, 8, 3, 5, norm="BatchNorm"), 100)
    network = pyg.nn.GraphSAGE(16, 8, 3, 5, norm="PairNorm")
    with pytest.raises(ValueError, match="got scores that differ by"):
        CapturedStep(network, 100)(batch)
    CapturedStep(
        pyg.nn.GraphSAGE(16, 8, 3, 5, norm="LayerNorm", norm_kwargs={"mode": "node"}),
        100,
    )(batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_graph_trains_alike(pyg: ModuleType, dataset: NodeDataset) -> None:
    def model(in_channels: int, out_channels: int) -> torch.nn.Module:
        net: torch.nn.Module = pyg.nn.GraphSAGE(in_channels, 32, 3, out_channels)
        return net

    plain, padded = (
        trainer_of(dataset, model, capture=c, device="cuda") for c in (False, True)
    )
    assert padded.fit().losses == pytest.approx(plain.fit().losses, rel=1e-2)
