"""Disjoint neighbourhoods and neighbourhoods by time, against loops."""

import pytest
import torch

from pydirect.sampling import HeteroDeviceSampler, settle
from pydirect.sampling.graph import lists_of
from pydirect.sampling.trees import TreeSampler

A, B = "a", "b"
KINDS = ((A, "to", B), (B, "to", A), (A, "near", A))
SIZES = {A: 30, B: 20}


def drawn_graphs(timed: bool, seed: int = 0) -> tuple[dict, dict, dict]:
    """Graphs, their ends in the order of their edges, and times."""
    generator = torch.Generator().manual_seed(seed)
    graphs, ends, times = {}, {}, {}
    for kind in KINDS:
        src = torch.randint(SIZES[kind[0]], (200,), generator=generator)
        dst = torch.randint(SIZES[kind[2]], (200,), generator=generator)
        time = torch.randint(50, (200,), generator=generator)
        made, order = lists_of(
            dst, src, SIZES[kind[2]], SIZES[kind[0]], by=time if timed else None
        )
        graphs[kind] = settle(made, "cpu")
        ends[kind], times[kind] = (src[order], dst[order]), time[order]
    return graphs, ends, times


def fanouts(*hops: int) -> dict:
    return {kind: list(hops) for kind in KINDS}


def test_each_tree_is_the_neighbourhood_of_its_seed() -> None:
    graphs, ends, _ = drawn_graphs(timed=False)
    sampler = TreeSampler(graphs, SIZES, fanouts(3, 2))
    seeds = {B: torch.tensor([4, 4, 7]), A: torch.tensor([9])}
    batch = sampler.sample(seeds, seed=1, batch=2)
    assert batch.trees[B][:3].tolist() == [0, 1, 2] and int(batch.trees[A][0]) == 3
    for kind in KINDS:
        source, target = batch.edge_index[kind]
        src, dst = (end[batch.edge_ids[kind]] for end in ends[kind])
        assert torch.equal(batch.node_ids[kind[0]][source], src)
        assert torch.equal(batch.node_ids[kind[2]][target], dst)
        trees = batch.trees[kind[0]][source]
        assert torch.equal(trees, batch.trees[kind[2]][target])
    for name, nodes in batch.node_ids.items():
        pairs = set(zip(batch.trees[name].tolist(), nodes.tolist(), strict=True))
        assert len(pairs) == len(nodes)
    # The first tree is what a batch of one seed draws; the second one differs.
    alone = HeteroDeviceSampler(graphs, SIZES, fanouts(3, 2)).sample(
        {B: torch.tensor([4])}, seed=1, batch=2
    )
    parts = [
        {
            k: batch.edge_ids[k][batch.trees[k[2]][batch.edge_index[k][1]] == t]
            for k in KINDS
        }
        for t in (0, 1)
    ]
    assert all(torch.equal(parts[0][k], alone.edge_ids[k]) for k in KINDS)
    assert any(not torch.equal(parts[0][k], parts[1][k]) for k in KINDS)


@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize("fanout", [-1, 2])
def test_trees_see_edges_up_to_their_time(latest: bool, fanout: int) -> None:
    graphs, ends, times = drawn_graphs(timed=True)
    sampler = TreeSampler(
        graphs, SIZES, fanouts(fanout, fanout), times=times, latest=latest
    )
    seeds = torch.randint(SIZES[B], (12,))
    limit = torch.randint(50, (12,))
    batch = sampler.sample({B: seeds}, 3, times={B: limit})
    for kind in KINDS:
        target = batch.edge_index[kind][1]
        tree, node = batch.trees[kind[2]][target], batch.node_ids[kind[2]][target]
        for t, n in set(zip(tree.tolist(), node.tolist(), strict=True)):
            got = batch.edge_ids[kind][(tree == t) & (node == n)]
            seen = ((ends[kind][1] == n) & (times[kind] <= limit[t])).nonzero()[:, 0]
            count = len(seen) if fanout < 0 else min(fanout, len(seen))
            assert len(got) == len(got.unique()) == count
            assert bool(torch.isin(got, seen).all())
            if latest:
                last = times[kind][seen].sort().values[len(seen) - count :]
                assert torch.equal(times[kind][got].sort().values, last)


def test_draws_by_time_are_uniform() -> None:
    src, dst, time = torch.arange(8), torch.zeros(8, dtype=torch.int64), torch.arange(8)
    made, order = lists_of(dst, src, 1, 8, by=time)
    kind = (A, "to", B)
    sampler = TreeSampler(
        {kind: settle(made, "cpu")},
        {A: 8, B: 1},
        {kind: [2]},
        times={kind: time[order]},
    )
    seeds = {B: torch.zeros(6000, dtype=torch.int64)}
    batch = sampler.sample(seeds, 0, times={B: torch.full((6000,), 5)})
    counts = torch.bincount(batch.node_ids[A], minlength=8)
    assert bool((counts[6:] == 0).all())
    assert bool(((counts[:6] - 2000).abs() < 200).all())


def test_weighted_trees() -> None:
    src, dst = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0, 0.0])
    made, _ = lists_of(dst, src, 1, 6, weights=weights)
    kind = (A, "to", B)
    graph = settle(made, "cpu", weighted=True)
    sampler = TreeSampler(
        {kind: graph}, {A: 6, B: 1}, {kind: [1]}, weighted=True, replace=True
    )
    seeds = {B: torch.zeros(4000, dtype=torch.int64)}
    counts = torch.bincount(sampler.sample(seeds, 0).node_ids[A], minlength=6)
    assert counts[[0, 2, 4, 5]].sum() == 0
    assert abs(int(counts[3]) - 3000) < 200


def test_what_is_refused() -> None:
    graphs, _, times = drawn_graphs(timed=True)
    sampler = TreeSampler(graphs, SIZES, fanouts(2), times=times)
    with pytest.raises(ValueError, match="times: expects one a seed"):
        sampler.sample({A: torch.tensor([0])}, 0)
    with pytest.raises(ValueError, match="seeds: expects nodes"):
        sampler.sample({A: torch.tensor([30])}, 0, times={A: torch.tensor([1])})
    with pytest.raises(ValueError, match="latest: expects times"):
        TreeSampler(graphs, SIZES, fanouts(2), latest=True)
    unsorted = {k: t.flip(0) for k, t in times.items()}
    with pytest.raises(ValueError, match="ascend"):
        TreeSampler(graphs, SIZES, fanouts(2), times=unsorted)
