"""Sampled subgraphs: which edges, which nodes, which layers' results."""

import pickle

import pytest
import torch
from torch import Tensor

from hector.capture import CapturedBatches, CapturedSampler, padded_size
from hector.graph import HeteroGraph
from hector.nn import RGCNConv
from hector.runtime.watch import RangeWatch
from hector.sampling import FanoutOf, NeighborSampler, SampledBatch

SIZES, RELATIONS, EDGES = (20, 30, 10), 5, 400


def whole() -> HeteroGraph:
    gen = torch.Generator().manual_seed(0)
    nodes = sum(SIZES)
    kinds = torch.tensor([t for t, n in enumerate(SIZES) for _ in range(n)])
    ends = torch.randint(nodes, (2, EDGES), generator=gen)
    ends[1, : EDGES // 2] = 7  # one node of many in-edges
    return HeteroGraph.from_arrays(
        *ends,
        torch.randint(RELATIONS, (EDGES,), generator=gen),
        node_type=kinds,
        num_edge_types=RELATIONS,
    )


G = whole()


def check(found: SampledBatch) -> None:
    graph, ids = found.graph, found.node_ids
    assert bool((ids.diff() > 0).all())
    assert graph.sampled and graph.num_edge_types == RELATIONS
    assert torch.equal(graph.node_type, G.node_type[ids])
    edges = found.edge_ids[graph.edge_order]
    for mine, theirs in ((graph.src, G.src), (graph.dst, G.dst)):
        assert torch.equal(ids[mine], theirs[edges])
    assert torch.equal(graph.edge_type, G.edge_type[edges])
    assert found.edge_ids.unique().numel() == found.edge_ids.numel()


@pytest.mark.parametrize("fanouts", [(1,), (4,), (3, 3), (-1,), (-1, 2), (100, 100)])
def test_what_is_drawn(fanouts: tuple[int, ...]) -> None:
    sampler = NeighborSampler(G, fanouts)
    degree = G.csc().ptr.diff()
    for seed in range(5):
        gen = torch.Generator().manual_seed(seed)
        seeds = torch.randperm(G.num_nodes, generator=gen)[:6]
        found = sampler.sample(seeds, gen)
        check(found)
        assert torch.equal(found.node_ids[found.seeds], seeds)
        drawn = torch.bincount(found.graph.dst, minlength=found.graph.num_nodes)
        most = degree[found.node_ids]
        if fanouts[0] != -1:
            first = most[found.seeds].clamp(max=fanouts[0])
            assert torch.equal(drawn[found.seeds], first)
        else:
            assert torch.equal(drawn[found.seeds], most[found.seeds])
        assert bool((drawn <= most).all())


@pytest.mark.parametrize("fanouts", [(1,), (4,), (3, 3), (-1, 2), (100, 100)])
def test_fanouts_of_relations(fanouts: tuple[int, ...]) -> None:
    sampler = NeighborSampler(G, fanouts, "relation")
    degree = torch.zeros(G.num_nodes, RELATIONS, dtype=torch.int64)
    degree.index_put_((G.dst, G.edge_type), torch.tensor(1), accumulate=True)
    for seed in range(3):
        gen = torch.Generator().manual_seed(seed)
        # The node of many edges, and others.
        seeds = torch.randperm(G.num_nodes, generator=gen)[:6]
        seeds = torch.cat((torch.tensor([7]), seeds[seeds != 7]))
        found = sampler.sample(seeds, gen)
        check(found)
        drawn = torch.zeros(found.graph.num_nodes, RELATIONS, dtype=torch.int64)
        at = (found.graph.dst, found.graph.edge_type)
        drawn.index_put_(at, torch.tensor(1), accumulate=True)
        most = degree[found.node_ids]
        first = most[found.seeds]
        if fanouts[0] != -1:
            first = first.clamp(max=fanouts[0])
        assert torch.equal(drawn[found.seeds], first)
        assert bool((drawn <= most).all())
    # No seeds, no edges.
    assert sampler.draw(seeds[:0]).edge_ids.numel() == 0


@pytest.mark.parametrize("fanouts", [(1,), (3, 3), (100, 100), (2, 3, 2)])
def test_a_draw_of_fixed_sizes_is_the_draw(fanouts: tuple[int, ...]) -> None:
    sampler = NeighborSampler(G, fanouts)
    fixed = CapturedSampler(sampler, 6)
    assert fixed.has_room
    for seed in range(5):
        torch.manual_seed(seed)
        for num in (6, 4):  # of other numbers the sampler draws itself
            seeds = torch.randperm(G.num_nodes)[:num]
            gens = [torch.Generator().manual_seed(seed) for _ in range(2)]
            one, two = sampler.draw(seeds, gens[0]), fixed.draw(seeds, gens[1])
            assert torch.equal(one.node_ids, two.node_ids)
            assert torch.equal(one.seeds, two.seeds)
            assert torch.equal(one.edge_ids.sort()[0], two.edge_ids.sort()[0])
            kept = two.node_ids.clone()
            fixed.draw(torch.arange(6))
            assert torch.equal(two.node_ids, kept)


@pytest.mark.parametrize(
    "fanouts, of, num",
    [((3, -1), "node", 6), ((3, 3), "relation", 6), ((3,), "node", 61)],
)
def test_draws_whose_sizes_only_the_graph_knows(
    fanouts: tuple[int, ...], of: str, num: int
) -> None:
    sampler = NeighborSampler(G, fanouts, of)
    fixed = CapturedSampler(sampler, num)
    assert not fixed.has_room
    gens = [torch.Generator().manual_seed(1) for _ in range(2)]
    seeds = torch.arange(6)
    want, got = sampler.draw(seeds, gens[0]), fixed.draw(seeds, gens[1])
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("of", FanoutOf)
def test_every_edge_is_drawn_about_as_often(of: FanoutOf) -> None:
    fanout = 10 if of is FanoutOf.NODE else 10 // RELATIONS
    sampler, node = NeighborSampler(G, (fanout,), of), torch.tensor([7])
    gen = torch.Generator().manual_seed(0)
    counts = torch.zeros(G.num_edges)
    rounds = 1000
    for _ in range(rounds):
        counts[sampler.draw(node, gen).edge_ids] += 1
    mine = counts[G.dst == 7]
    assert int(mine.sum()) == 10 * rounds
    expected = 10 * rounds / mine.numel()
    assert 0.5 * expected < float(mine.min()) and float(mine.max()) < 1.7 * expected


def test_all_neighbours_give_the_whole_graphs_results() -> None:
    torch.manual_seed(0)
    layers = [RGCNConv(4, 4, RELATIONS).double() for _ in range(2)]
    x = torch.randn(G.num_nodes, 4, dtype=torch.float64)

    def run(rows: Tensor, graph: HeteroGraph) -> Tensor:
        return layers[1](layers[0](rows, graph).tanh(), graph)

    want = run(x, G)
    sampler = NeighborSampler(G, (-1, -1))
    for seeds in torch.randperm(G.num_nodes).split(7):
        found = sampler.sample(seeds)
        got = run(x[found.node_ids], found.graph)[found.seeds]
        torch.testing.assert_close(got, want[seeds])


def test_programs_are_made_once() -> None:
    conv = RGCNConv(4, 4, RELATIONS)
    sampler = NeighborSampler(G, (3, 3))
    plans = set()
    for seed in range(4):
        found = sampler.sample(torch.tensor([seed, seed + 20]))
        conv(torch.randn(found.graph.num_nodes, 4), found.graph).sum().backward()
        (exe,) = found.graph.state.executables.values()
        plans.add((id(exe.report.forward), id(exe.report.backward)))
    assert len(plans) == 1


@pytest.mark.parametrize("fanouts", [(), (0,), (3, -2)])
def test_fanouts_that_mean_nothing(fanouts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected fanouts"):
        NeighborSampler(G, fanouts)


def test_ids_out_of_range_are_said_wherever_the_graph_goes() -> None:
    """As on a GPU, where what is wrong is not waited for."""
    conv, x = RGCNConv(4, 4, RELATIONS), torch.randn(G.num_nodes, 4)
    graph = G.replace(sampled=True)
    graph.state.watch = RangeWatch(torch.tensor(True))
    for same in (graph, graph.replace(), pickle.loads(pickle.dumps(G))):
        if same.state.watch is None:
            assert bool(conv(x, same).isfinite().all())
            continue
        with pytest.raises(ValueError, match="below its numbers"):
            conv(x, same)
    moved = graph.state.watch.moved(torch.device("cpu"))
    out = torch.ones(3)
    moved.check([out])
    assert bool(out.isnan().all())


def test_padded_sizes_are_few_and_near() -> None:
    sizes = {padded_size(n) for n in range(1, 1 << 14)}
    assert all(n <= padded_size(n) <= max(64, 1.125 * n + 8) for n in range(1, 1 << 14))
    assert len(sizes) < 75


def test_batches_of_near_sizes_share_memory() -> None:
    """A padded batch has the real nodes in front, and keeps nothing of the last one."""
    graph, seen = whole(), []

    def step(batch: SampledBatch, goal: Tensor, rows: Tensor) -> Tensor:
        seen.append((batch.graph.num_nodes, batch.graph.num_edges))
        ids = batch.node_ids[batch.graph.src]
        real = batch.edge_ids[batch.graph.edge_order] >= 0
        assert torch.equal(ids[real].sort().values, wanted)
        spare = torch.arange(batch.graph.num_nodes) >= count
        assert spare[batch.graph.dst[~real]].all() and spare.any()
        assert not rows[count:].any() and torch.equal(rows[:count, 0], known)
        assert int(batch.graph.node_type_ptr[-1]) == batch.graph.num_nodes
        return goal * 2

    sampler = NeighborSampler(graph, (3, 3))
    batches = CapturedBatches(step, graph, max_sizes=2)
    for seed in range(6):
        torch.manual_seed(seed)
        drawn = sampler.draw(torch.randperm(60)[:4])
        wanted = graph.src[drawn.edge_ids].sort().values
        count, known = drawn.node_ids.numel(), drawn.node_ids
        goal = torch.arange(4) + seed
        made = batches(drawn, goal, rows=[known[:, None]])
        assert torch.equal(made, 2 * goal)
    assert len(set(seen)) == len(batches) == 1
    with pytest.raises(ValueError, match="max_sizes"):
        CapturedBatches(step, graph, max_sizes=0)


@pytest.mark.parametrize(("degree", "fanout"), [(3, 2), (5, 3), (7, 6)])
@pytest.mark.parametrize("of", list(FanoutOf))
def test_each_edge_is_as_likely(degree: int, fanout: int, of: FanoutOf) -> None:
    """Stretches of one edge and of two are not the same ones in every draw."""
    rounds = 900
    # As many nodes of that degree, each a draw of its own: in one call.
    src = torch.arange(rounds).repeat_interleave(degree)
    dst = rounds + src
    graph = HeteroGraph.from_arrays(src, dst, torch.zeros_like(src))
    found = NeighborSampler(graph, [fanout], of).draw(
        rounds + torch.arange(rounds), torch.Generator().manual_seed(0)
    )
    assert found.edge_ids.unique().numel() == found.edge_ids.numel() == rounds * fanout
    counts = torch.bincount(found.edge_ids % degree, minlength=degree).double()
    share = fanout / degree
    off = (counts - rounds * share) / (rounds * share * (1 - share)) ** 0.5
    assert off.abs().max() < 4.5


def test_seeds_are_distinct_nodes() -> None:
    sampler = NeighborSampler(G, [2])
    for seeds, words in (
        (torch.tensor([1, 1]), "expected distinct seeds, got a node twice"),
        (torch.tensor([0, -1]), r"expected seeds in \[0, 60\), got -1 at position 1"),
        (torch.tensor([60]), r"expected seeds in \[0, 60\), got 60"),
        (torch.ones(60, dtype=torch.bool), "seeds of an integer dtype, got a boolean"),
    ):
        with pytest.raises(ValueError, match=words):
            sampler.sample(seeds)
    assert sampler.sample(torch.tensor([3, 7], dtype=torch.int32)).seeds.numel() == 2
