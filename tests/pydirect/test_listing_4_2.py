"""The two-line change of Listing 4.2 on a plain PyG training script."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from pydirect.sampling import Graph, GraphStatistics, NeighborSampler, generate_graph

Load = Callable[[torch.Tensor], torch.Tensor]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stock_script(
    pyg: ModuleType,
    graph: Graph,
    features_and_labels: tuple[torch.Tensor, torch.Tensor],
    load: Load,
    fetch: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[list[float], float]:
    """Losses and accuracy of a training script; the two lines are ``load`` (line 2 of
    the listing) and ``fetch`` (line 11)."""
    torch.manual_seed(0)
    plain, labels = features_and_labels
    features = load(plain)
    model = pyg.nn.GraphSAGE(plain.shape[1], 16, 2, 5).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = NeighborSampler(graph, [5, 5])
    order = torch.arange(graph.num_nodes)
    losses, right = [], 0
    for epoch in range(3):
        for number, seeds in enumerate(order.split(100)):
            batch = sampler.sample(seeds, epoch * 1000 + number)
            input_features = fetch(features, batch.node_ids)
            out = model(input_features, batch.edge_index.to(DEVICE))[: len(seeds)]
            y = labels[seeds].to(DEVICE)
            loss = torch.nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if epoch == 2:
                right += int((out.argmax(1) == y).sum())
    return losses, right / graph.num_nodes


def data() -> tuple[Graph, torch.Tensor, torch.Tensor]:
    statistics = GraphStatistics(num_nodes=500, num_edges=4000, num_classes=5)
    graph, labels = generate_graph(statistics, seed=0)
    torch.manual_seed(1)
    features = torch.nn.functional.one_hot(labels, 5).float() @ torch.randn(5, 32)
    return graph, features + torch.randn(500, 32), labels


def gather_then_copy(features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return features[ids].to(DEVICE)


def subscript(features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return features[ids]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_lines_change_and_nothing_else(pyg: ModuleType) -> None:
    graph, features, labels = data()
    both = (features, labels)
    want = stock_script(pyg, graph, both, lambda f: f, gather_then_copy)
    got = stock_script(pyg, graph, both, lambda f: f.to("unified"), subscript)
    if DEVICE.type == "cpu":
        assert got == want
    else:  # atomics of PyG's aggregation add in any order
        assert torch.allclose(torch.tensor(got[0]), torch.tensor(want[0]), rtol=1e-3)
    assert want[1] > 0.9 and abs(got[1] - want[1]) < 0.02


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
def test_gpu_peak_stays_below_the_features(pyg: ModuleType) -> None:
    graph, features, labels = data()
    wide = features.repeat(1, 1024).contiguous()  # 64 MiB
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    sampler = NeighborSampler(graph, [2])
    table = wide.to("unified")
    model = torch.nn.Linear(wide.shape[1], 5).to(DEVICE)
    for seeds in torch.arange(60).split(20):
        ids = sampler.sample(seeds, 0).node_ids
        model(table[ids]).sum().backward()
    assert torch.cuda.max_memory_allocated() - base < wide.nbytes // 2
    assert labels.shape == (500,)
