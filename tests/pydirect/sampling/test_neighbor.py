"""Sampled neighbourhoods: what a batch promises, and that it is uniform."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pydirect.sampling import Graph, GraphStatistics, NeighborSampler, generate_graph


def random_graph(num_nodes: int, num_edges: int, seed: int = 0) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return Graph.from_edges(edges, num_nodes)


@settings(deadline=None, max_examples=60)
@given(
    num_nodes=st.integers(1, 30),
    num_edges=st.integers(0, 120),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 5]), min_size=1, max_size=3),
    num_seeds=st.integers(0, 8),
    seed=st.integers(0, 1000),
)
def test_a_batch_is_a_subgraph(
    num_nodes: int, num_edges: int, fanouts: list[int], num_seeds: int, seed: int
) -> None:
    graph = random_graph(num_nodes, num_edges, seed)
    sampler = NeighborSampler(graph, fanouts)
    seeds = torch.randperm(num_nodes)[:num_seeds]
    batch = sampler.sample(seeds, seed)
    ids = batch.node_ids
    assert len(set(ids.tolist())) == len(ids)
    assert torch.equal(ids[: len(seeds)], seeds)
    assert sum(batch.num_nodes_per_hop) == len(ids)
    assert sum(batch.num_edges_per_hop) == batch.edge_index.shape[1]
    first, edge = 0, 0
    for hop, fanout in enumerate(fanouts):
        frontier = range(first, first + batch.num_nodes_per_hop[hop])
        part = batch.edge_index[:, edge : edge + batch.num_edges_per_hop[hop]]
        for local in frontier:
            node = int(ids[local])
            bounds = graph.offsets[node : node + 2].tolist()
            all_of_them = graph.neighbors[bounds[0] : bounds[1]].tolist()
            got = ids[part[0][part[1] == local]].tolist()
            want = len(all_of_them) if fanout < 0 else min(fanout, len(all_of_them))
            assert len(got) == want
            rest = list(all_of_them)
            for neighbor in got:  # without replacement, also among parallel edges
                rest.remove(neighbor)
        first += batch.num_nodes_per_hop[hop]
        edge += batch.num_edges_per_hop[hop]
    again = sampler.sample(seeds, seed)
    assert torch.equal(again.node_ids, ids)
    assert torch.equal(again.edge_index, batch.edge_index)


def test_sampling_is_uniform() -> None:
    star = Graph.from_edges(
        torch.stack([torch.arange(1, 11), torch.zeros(10).long()]), 11
    )
    sampler = NeighborSampler(star, [4])
    counts = torch.zeros(11)
    for seed in range(3000):
        counts[sampler.sample(torch.tensor([0]), seed).node_ids[1:]] += 1
    # 3000 x 4/10 = 1200 each, standard deviation 26.8.
    assert (counts[1:] - 1200).abs().max() < 135


def test_errors() -> None:
    graph = random_graph(5, 10)
    with pytest.raises(ValueError, match="one positive number"):
        NeighborSampler(graph, [3, 0])
    sampler = NeighborSampler(graph, [2])
    with pytest.raises(ValueError, match="seeds: expects nodes 0 to 4, got 1 to 5"):
        sampler.sample(torch.tensor([1, 5]), 0)
    assert sampler.sample(torch.tensor([1]), 0).num_seeds == 1  # scratch is clean
    with pytest.raises(ValueError, match=r"nodes 0 to 4, got 7 to 7"):
        Graph.from_edges(torch.tensor([[0], [7]]), 5)
    with pytest.raises(ValueError, match="num_classes"):
        GraphStatistics(num_nodes=3)


def test_graph_round_trip_and_symmetry() -> None:
    edges = torch.tensor([[0, 2, 0], [1, 1, 1]])
    graph = Graph.from_edges(edges, 3)
    assert graph.neighbors.tolist() == [0, 0, 2]
    assert graph.to_edge_index().tolist() == [[0, 0, 2], [1, 1, 1]]
    both = Graph.from_edges(edges, 3, symmetric=True)
    assert both.to_edge_index().tolist() == [[1, 0, 2, 1], [0, 1, 1, 2]]


def test_generated_graph_has_the_statistics_asked_for() -> None:
    statistics = GraphStatistics(num_nodes=20_000, num_edges=300_000, num_classes=10)
    graph, labels = generate_graph(statistics, seed=3)
    degrees = graph.degrees().double()
    # Hubs make duplicates, which are dropped.
    assert 0.75 * 600_000 < graph.num_edges <= 600_000
    assert degrees.max() > 15 * degrees.mean()
    edges = graph.to_edge_index()
    same = (labels[edges[0]] == labels[edges[1]]).double().mean()
    assert 0.70 < same < 0.86
    again, _ = generate_graph(statistics, seed=3)
    assert torch.equal(again.neighbors, graph.neighbors)
    assert torch.equal(labels.bincount(), torch.full((10,), 2000))
