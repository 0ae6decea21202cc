"""Sampling on a device: the batches are subgraphs, the kernels and the CPU agree bit
for bit, and the draws have the distributions that they should."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pydirect.sampling import (
    DeviceSampler,
    Graph,
    HeteroDeviceSampler,
    Residence,
    SampledBatch,
    philox,
    settle,
)
from pydirect.sampling.hop import CpuHopper, Hopper

RELAXED = settings(
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def random_graph(num_nodes: int, num_edges: int, seed: int = 0) -> Graph:
    """Weights of which a third are 0; ids of 8 bytes for odd seeds."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    weights = torch.randint(-4, 9, (num_edges,), generator=generator).clamp(min=0)
    graph = Graph.from_edges(edges, num_nodes, weights=weights)
    ids = graph.neighbors.long() if seed % 2 else graph.neighbors
    return Graph(offsets=graph.offsets, neighbors=ids, weights=graph.weights)


def test_keys_take_every_bit_of_the_seed() -> None:
    """Splitmix64 (Steele et al., OOPSLA 2014) of seed and batch; the first number of
    seed 0 is published."""

    def mixed(state: np.uint64) -> np.uint64:
        with np.errstate(over="ignore"):
            z = state + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)

    assert mixed(np.uint64(0)) == 0xE220A8397B1DCDAF
    seeds = [0, 1, 2, 3, 255, *(1 << bit for bit in range(8, 64)), (1 << 64) - 1]
    keys = set()
    for seed in seeds:
        for batch in (0, 1, 1 << 40):
            with np.errstate(over="ignore"):
                state = mixed(np.uint64(seed) + np.uint64(batch))
                expected = mixed(state + np.uint64(0x5851F42D4C957F2D))
            assert philox.key_of(seed, batch) == int(expected)
            keys.add(philox.key_of(seed, batch))
    assert philox.key_of(-1, 7) == philox.key_of((1 << 64) - 1, 7)
    assert len(keys) > 2 * len(seeds)


def test_philox_gives_the_published_numbers() -> None:
    """The known answers of Random123."""
    full = 0xFFFFFFFF
    cases = (
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((full,) * 4, (1 << 64) - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    )
    for counter, key, want in cases:
        got = philox.philox(tuple(torch.tensor([word]) for word in counter), key)
        assert " ".join(f"{int(word):08x}" for word in got) == want


@RELAXED
@given(
    num_nodes=st.integers(1, 30),
    num_edges=st.integers(0, 150),
    fanouts=st.lists(st.sampled_from([-1, 0, 1, 2, 5, 9]), min_size=1, max_size=3),
    num_seeds=st.integers(0, 8),
    seed=st.integers(0, 1000),
    replace=st.booleans(),
    weighted=st.booleans(),
)
def test_kernels_and_cpu_agree_on_a_subgraph(
    kernels: Hopper,
    num_nodes: int,
    num_edges: int,
    fanouts: list[int],
    num_seeds: int,
    seed: int,
    replace: bool,
    weighted: bool,
) -> None:
    graph = random_graph(num_nodes, num_edges, seed)
    seeds = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    seeds = seeds[:num_seeds]
    found = []
    ways = ((CpuHopper(), "device"), (kernels, "device"), (kernels, "host"))
    for hopper, residence in ways:
        there = settle(graph, "cpu", residence, weighted=weighted)
        sampler = DeviceSampler(
            there, fanouts, replace=replace, weighted=weighted, hopper=hopper
        )
        sampler.sample(seeds, seed + 1)  # leaves nothing behind
        found.append(sampler.sample(seeds, seed, batch=3))
    same(found[0], found[1])
    same(found[0], found[2])
    check_subgraph(graph, found[0], fanouts, replace=replace, weighted=weighted)


def same(one: SampledBatch, other: SampledBatch) -> None:
    assert torch.equal(one.node_ids, other.node_ids)
    assert torch.equal(one.edge_index, other.edge_index)
    assert torch.equal(one.edge_ids, other.edge_ids)
    assert one.num_nodes_per_hop == other.num_nodes_per_hop
    assert one.num_edges_per_hop == other.num_edges_per_hop


def check_subgraph(
    graph: Graph,
    batch: SampledBatch,
    fanouts: list[int],
    *,
    replace: bool,
    weighted: bool,
) -> None:
    ids = batch.node_ids
    assert len(set(ids.tolist())) == len(ids)
    assert sum(batch.num_nodes_per_hop) == len(ids)
    assert sum(batch.num_edges_per_hop) == batch.edge_index.shape[1]
    sources = ids[batch.edge_index[0]]
    assert torch.equal(graph.neighbors[batch.edge_ids].long(), sources)
    owner = torch.searchsorted(graph.offsets, batch.edge_ids, right=True) - 1
    assert torch.equal(owner, ids[batch.edge_index[1]])
    first, edge = 0, 0
    for hop, fanout in enumerate(fanouts):
        part = slice(edge, edge + batch.num_edges_per_hop[hop])
        for local in range(first, first + batch.num_nodes_per_hop[hop]):
            drawn = batch.edge_ids[part][batch.edge_index[1][part] == local].tolist()
            begin, end = graph.offsets[ids[local] : ids[local] + 2].tolist()
            possible = list(range(begin, end))
            if weighted and fanout >= 0:
                possible = [e for e in possible if graph.weights[e] > 0]
                assert set(drawn) <= set(possible)
            if fanout < 0:
                assert drawn == possible
            elif replace:
                assert len(drawn) == (fanout if possible else 0)
            else:
                assert len(drawn) == len(set(drawn)) == min(fanout, len(possible))
        first += batch.num_nodes_per_hop[hop]
        edge += batch.num_edges_per_hop[hop]


def chi_square(counts: Counter[object], chances: dict[object, float]) -> float:
    """How many standard deviations the statistic lies above its mean."""
    total = sum(counts.values())
    assert set(counts) <= set(chances)
    statistic = sum(
        (counts[k] - total * p) ** 2 / (total * p) for k, p in chances.items()
    )
    freedom = len(chances) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def successive(weights: list[float], num: int) -> dict[object, float]:
    """Chances of the sets that draws without replacement give, by enumeration."""
    found: dict[object, float] = {}

    def go(taken: tuple[int, ...], chance: float) -> None:
        if len(taken) == num:
            key = frozenset(taken)
            found[key] = found.get(key, 0.0) + chance
            return
        left = {i: w for i, w in enumerate(weights) if i not in taken and w > 0}
        for i, w in left.items():
            go((*taken, i), chance * w / sum(left.values()))

    go((), 1.0)
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("impatient", [False, True])
def test_distributions(
    monkeypatch: pytest.MonkeyPatch, weighted: bool, replace: bool, impatient: bool
) -> None:
    """Chi-square on all sets that may be drawn; also where few draws are repeated."""
    if impatient:
        from pydirect.sampling.hop import Draw

        monkeypatch.setattr(Draw, "patience", 2)
    values, num, copies = [1.0, 4.0, 0.0, 2.0, 8.0, 1.0], 3, 1500
    # A star a copy: the draws of different nodes are independent.
    leaves = torch.arange(6).repeat(copies)
    centres = torch.arange(6, 6 + copies).repeat_interleave(6)
    graph = Graph.from_edges(
        torch.stack([leaves, centres]),
        6 + copies,
        weights=torch.tensor(values * copies),
    )
    sampler = DeviceSampler(
        settle(graph, "cpu", weighted=weighted),
        [num],
        replace=replace,
        weighted=weighted,
        hopper=CpuHopper(),
    )
    batch = sampler.sample(torch.arange(6, 6 + copies), seed=11)
    drawn = (batch.edge_ids % 6).reshape(copies, num).tolist()
    weights = values if weighted else [1.0] * 6
    counts: Counter[object] = Counter()
    if replace:
        for draws in drawn:
            counts.update(draws)
        chances = {i: w / sum(weights) for i, w in enumerate(weights) if w > 0}
    else:
        counts.update(frozenset(draws) for draws in drawn)
        chances = successive(weights, num)
    assert abs(chi_square(counts, chances)) < 4


def test_impatient_kernels_agree_too(
    kernels: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pydirect.sampling.hop import Draw

    monkeypatch.setattr(Draw, "patience", 3)
    graph = random_graph(40, 700, seed=5)
    there = settle(graph, "cpu", weighted=True)
    batches = [
        DeviceSampler(there, [6, 5], weighted=True, hopper=hopper).sample(
            torch.arange(12), seed=4
        )
        for hopper in (CpuHopper(), kernels)
    ]
    same(*batches)


def test_draws_depend_on_seed_batch_and_node_alone(kernels: Hopper) -> None:
    graph = random_graph(200, 6000)
    there = settle(graph, "cpu")
    sampler = DeviceSampler(there, [7], hopper=kernels)
    one = sampler.sample(torch.arange(50), seed=1, batch=2)
    alone = sampler.sample(torch.tensor([33]), seed=1, batch=2)
    mine = one.edge_ids[one.edge_index[1] == 33]
    assert torch.equal(alone.edge_ids, mine)
    for seed, batch in ((2, 2), (1, 3)):
        other = sampler.sample(torch.arange(50), seed=seed, batch=batch)
        assert not torch.equal(other.edge_ids, one.edge_ids)


def test_seeds_of_any_integer_and_stride(kernels: Hopper) -> None:
    there = settle(random_graph(100, 900), "cpu")
    sampler = DeviceSampler(there, [4, 2], hopper=kernels)
    want = sampler.sample(torch.arange(0, 60, 2), seed=3)
    same(sampler.sample(torch.arange(60)[::2], seed=3), want)
    same(sampler.sample(torch.arange(0, 60, 2).int(), seed=3), want)


def test_peers_hold_the_edges_in_turns(kernels: Hopper) -> None:
    graph = random_graph(60_000, 100_000, seed=1)
    batches = []
    for residence, peers in (("device", ()), ("peers", ("cpu",) * 3)):
        there = settle(graph, "cpu", residence, peers=peers)
        for hopper in (kernels, CpuHopper()):
            sampler = DeviceSampler(there, [3, 3], hopper=hopper)
            batches.append(sampler.sample(torch.arange(500), seed=9))
    assert len(there.parts) == 3
    for other in batches[1:]:
        same(batches[0], other)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_heterogeneous(kernels: Hopper, hops: int) -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = {
        ("paper", "cites", "paper"): (60, 60),
        ("author", "writes", "paper"): (40, 60),
        ("paper", "rev", "author"): (60, 40),
    }
    sizes = {"paper": 60, "author": 40}
    graphs = {}
    for kind, (sources, targets) in kinds.items():
        edges = torch.stack(
            [
                torch.randint(sources, (400,), generator=generator),
                torch.randint(targets, (400,), generator=generator),
            ]
        )
        graphs[kind] = Graph.from_edges(edges, targets, num_sources=sources)
    found = []
    for hopper in (CpuHopper(), kernels):
        sampler = HeteroDeviceSampler(
            {k: settle(g, "cpu") for k, g in graphs.items()},
            sizes,
            {k: [4, 3, 2][:hops] for k in graphs},
            hopper=hopper,
        )
        found.append(sampler.sample({"paper": torch.arange(5)}, seed=8))
    one, other = found
    for kind, graph in graphs.items():
        assert torch.equal(one.edge_index[kind], other.edge_index[kind])
        assert torch.equal(one.edge_ids[kind], other.edge_ids[kind])
        sources = one.node_ids[kind[0]][one.edge_index[kind][0]]
        assert torch.equal(graph.neighbors[one.edge_ids[kind]].long(), sources)
        owner = torch.searchsorted(graph.offsets, one.edge_ids[kind], right=True) - 1
        assert torch.equal(owner, one.node_ids[kind[2]][one.edge_index[kind][1]])
        assert sum(one.num_edges_per_hop[kind]) == len(one.edge_ids[kind])
    for name, ids in one.node_ids.items():
        assert torch.equal(ids, other.node_ids[name])
        assert len(set(ids.tolist())) == len(ids) == sum(one.num_nodes_per_hop[name])
    assert torch.equal(one.node_ids["paper"][:5], torch.arange(5))
    with pytest.raises(ValueError, match="got 'venue'"):
        sampler.sample({"venue": torch.arange(2)}, seed=0)


def test_errors_name_what_is_wrong() -> None:
    graph = random_graph(9, 30)
    there = settle(graph, "cpu")
    with pytest.raises(ValueError, match="0 or more"):
        DeviceSampler(there, [3, -2])
    with pytest.raises(ValueError, match="weighted: expects"):
        DeviceSampler(there, [3], weighted=True)
    sampler = DeviceSampler(there, [2])
    with pytest.raises(ValueError, match="nodes 0 to 8, got 2 to 9"):
        sampler.sample(torch.tensor([2, 9]), 0)
    assert sampler.sample(torch.tensor([1, 8, 0]), 0).num_seeds == 3  # scratch is clean
    plain = Graph(offsets=graph.offsets, neighbors=graph.neighbors)
    with pytest.raises(ValueError, match="weights: weighted sampling expects"):
        settle(plain, "cpu", weighted=True)
    for bad in (-1.0, math.nan, math.inf):
        weights = torch.ones(30)
        weights[17] = bad
        wrong = Graph(offsets=graph.offsets, neighbors=graph.neighbors, weights=weights)
        with pytest.raises(ValueError, match="at edge 17"):
            settle(wrong, "cpu", weighted=True)
    with pytest.raises(ValueError, match="cpu cannot read the memory of meta"):
        settle(graph, "cpu", Residence.PEERS, peers=["cpu", "meta"])
    with pytest.raises(ValueError, match="peers: expects 1 to 16"):
        settle(graph, "cpu", Residence.PEERS)
