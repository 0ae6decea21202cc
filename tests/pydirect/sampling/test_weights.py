"""Weighted draws look at the weights of their own node, however small or large; and a
node that is twice among the seeds has two rows."""

import itertools
from collections import Counter

import pytest
import torch

from pydirect.sampling import DeviceSampler, Graph, NeighborSampler, settle
from pydirect.sampling.hop import CpuHopper, Hopper
from tests.pydirect.sampling.test_device import chi_square, random_graph, same

COPIES = 1000


def star(lists: list[list[float]], dtype: torch.dtype = torch.float64) -> Graph:
    """Node i has a source of its own for each of ``lists[i]``."""
    num = len(lists)
    targets = torch.tensor([i for i, some in enumerate(lists) for _ in some])
    sources = num + torch.arange(len(targets))
    weights = torch.tensor([w for some in lists for w in some], dtype=dtype)
    return Graph.from_edges(
        torch.stack([sources, targets]), num + len(targets), weights=weights
    )


def draws(graph: Graph, num: int, fanout: int, hopper: Hopper, **options: bool) -> list:
    """The rank in its list of each edge that nodes 0 to ``num`` - 1 draw."""
    there = settle(graph, "cpu", weighted=True)
    sampler = DeviceSampler(there, [fanout], weighted=True, hopper=hopper, **options)
    batch = sampler.sample(torch.arange(num), seed=3)
    rank = batch.edge_ids - graph.offsets[batch.edge_index[1]]
    return [rank[batch.edge_index[1] == i].tolist() for i in range(num)]


@pytest.mark.parametrize("other", [1e20, 1e300, 1e-300])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 5e-324])
def test_other_nodes_weights_do_not_matter(
    kernels: Hopper, other: float, scale: float
) -> None:
    """All sums in one would lose 1 next to 1e20."""
    lists = [[other], *([[scale, 0.0, 2 * scale, 4 * scale]] * COPIES), [other]]
    graph, num = star(lists), len(lists)
    for hopper in (CpuHopper(), kernels):
        for fanout in (3, 4):
            found = draws(graph, num, fanout, hopper)
            assert found[0] == found[-1] == [0]
            assert all(one == [0, 2, 3] for one in found[1:-1])
        counts = Counter(
            itertools.chain(*draws(graph, num, 3, hopper, replace=True)[1:-1])
        )
        assert abs(chi_square(counts, {0: 1 / 7, 2: 2 / 7, 3: 4 / 7})) < 4


def test_small_weights_of_one_list(kernels: Hopper) -> None:
    """1 and 3 are lost in the sums of a list with 1e20, but not to draws after it."""
    graph = star([[1e20, 1.0, 3.0, 0.0]] * COPIES)
    for hopper in (CpuHopper(), kernels):
        found = draws(graph, COPIES, 2, hopper)
        assert all(one[0] == 0 for one in found)
        counts = Counter(one[1] for one in found)
        assert abs(chi_square(counts, {1: 0.25, 2: 0.75})) < 4
        assert draws(graph, COPIES, 5, hopper) == [[0, 1, 2]] * COPIES


def test_sums_that_no_float_holds(kernels: Hopper) -> None:
    graph = star([[1e308, 1e308, 5e-324]] * COPIES)
    for hopper in (CpuHopper(), kernels):
        found = draws(graph, COPIES, 1, hopper)
        counts = Counter(one[0] for one in found)
        assert abs(chi_square(counts, {0: 0.5, 1: 0.5})) < 4
        assert draws(graph, COPIES, 3, hopper) == [[0, 1, 2]] * COPIES


@pytest.mark.parametrize("at_once", [1, 64, 1 << 22])
def test_running_sums(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """One after the other in each list, from its first edge."""
    monkeypatch.setattr("pydirect.sampling.resident._AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    edges = (torch.rand(2, 3000, generator=generator) ** 4 * 90).long()
    weights = torch.rand(3000, generator=generator, dtype=torch.float64)
    graph = Graph.from_edges(edges, 100, weights=weights)
    there = settle(graph, "cpu", weighted=True)
    sums = there.running.tolist()
    for begin, end in itertools.pairwise(graph.offsets.tolist()):
        wanted = itertools.accumulate(there.weights[begin:end].tolist())
        assert sums[begin:end] == list(wanted)
        if end > begin:
            assert 0.5 <= float(there.weights[begin:end].max()) < 1
    ratio = there.weights / graph.weights
    assert torch.equal(ratio, torch.exp2(ratio.log2().round()))


def test_kernels_agree_on_uneven_weights(kernels: Hopper) -> None:
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(60, (2, 1500), generator=generator)
    weights = 10.0 ** torch.randint(-300, 300, (1500,), generator=generator).double()
    graph = Graph.from_edges(edges, 60, weights=weights)
    there = settle(graph, "cpu", weighted=True)
    for replace in (False, True):
        one, other = (
            DeviceSampler(there, [6, 4], replace=replace, weighted=True, hopper=hopper)
            for hopper in (CpuHopper(), kernels)
        )
        seeds = torch.arange(30)
        same(one.sample(seeds, 1), other.sample(seeds, 1))


def test_a_seed_twice_has_two_rows(kernels: Hopper) -> None:
    """As in PyG: rows in the order of the seeds, edges lead from the first one."""
    graph = random_graph(30, 300)
    seeds = torch.tensor([4, 7, 4, 9, 7, 4])
    there = settle(graph, "cpu")
    one, other = (
        DeviceSampler(there, [-1, 3], hopper=hopper).sample(seeds, 1)
        for hopper in (CpuHopper(), kernels)
    )
    same(one, other)
    plain = NeighborSampler(graph, [-1, 3]).sample(seeds, 1)
    for batch in (one, plain):
        assert torch.equal(batch.node_ids[:6], seeds)
        assert batch.num_nodes_per_hop[0] == batch.num_seeds == 6
        rest = batch.node_ids[6:].tolist()
        assert len(set(rest)) == len(rest) and not set(rest) & {4, 7, 9}
        source, target = batch.edge_index[:, : batch.num_edges_per_hop[0]]
        for row, seed in enumerate(seeds.tolist()):
            begin, end = graph.offsets[seed : seed + 2].tolist()
            drawn = batch.node_ids[source[target == row]].tolist()
            assert sorted(drawn) == graph.neighbors[begin:end].tolist()
        assert not set(batch.edge_index[0].tolist()) & {2, 4, 5}
    again = DeviceSampler(there, [-1]).sample(torch.tensor([4, 7]), 1)
    assert again.node_ids[:2].tolist() == [4, 7]  # scratch is clean
