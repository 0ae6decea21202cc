"""Scores, renumbering, addresses and the cache of hot rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pydirect.memory import pin
from pydirect.sampling import Graph, NeighborSampler
from pydirect.tiering import (
    Score,
    TieredFetch,
    TieredTable,
    TierPlan,
    degree_score,
    free_budget_bytes,
    hit_ratio,
    plan_tiers,
    reorder_by,
    reverse_pagerank,
    score_nodes,
    share_of,
    weighted_reverse_pagerank,
)

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_graph(num_nodes: int, num_edges: int, seed: int = 0) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return Graph.from_edges(edges, num_nodes)


def dense_pagerank(graph: Graph, start: torch.Tensor) -> torch.Tensor:
    """Algorithm 2, dense: flow[j, k] = 1 / in_degree[k] for each j -> k."""
    n = graph.num_nodes
    flow = torch.zeros(n, n, dtype=torch.float64)
    source, target = graph.to_edge_index()
    flow.index_put_((source, target), torch.ones(len(source)).double(), accumulate=True)
    flow /= graph.degrees().clamp(min=1)
    score = start
    for _ in range(5):
        score = 0.15 / n + 0.85 * flow @ score
    return score


def test_scores_equal_a_dense_reference() -> None:
    graph = random_graph(40, 150)
    train = torch.tensor([3, 7, 9, 30])
    start = torch.full((40,), 1 / 40, dtype=torch.float64)
    torch.testing.assert_close(reverse_pagerank(graph), dense_pagerank(graph, start))
    start[train] *= 10
    got = weighted_reverse_pagerank(graph, train)
    torch.testing.assert_close(got, dense_pagerank(graph, start))
    assert degree_score(graph).sum() == graph.num_edges
    with pytest.raises(ValueError, match="at least one node"):
        weighted_reverse_pagerank(graph, train[:0])


def community_graph(num_nodes: int, local: float) -> Graph:
    """256 communities; ``local`` of the edges stay inside; activity is heavy-tailed."""
    generator = torch.Generator().manual_seed(2)
    size = num_nodes // 256
    activity = torch.rand(num_nodes, generator=generator).pow(-1 / 1.5)
    nodes = torch.arange(num_nodes).repeat_interleave(12)
    inside = torch.rand(len(nodes), generator=generator) < local
    anywhere = torch.multinomial(
        activity, len(nodes), replacement=True, generator=generator
    )
    rows = activity.view(256, size)
    near = torch.multinomial(rows, size * 12, replacement=True, generator=generator)
    near = (near + torch.arange(256)[:, None] * size).flatten()
    return Graph.from_edges(
        torch.stack([torch.where(inside, near, anywhere), nodes]), num_nodes
    )


def accesses_of(graph: Graph, train: torch.Tensor) -> torch.Tensor:
    sampler = NeighborSampler(graph, [5, 5, 5])
    counts = torch.zeros(graph.num_nodes)
    for number, seeds in enumerate(train.split(64)):
        counts[sampler.sample(seeds, number).node_ids] += 1
    return counts


def test_where_labels_are_local_only_the_weighted_score_knows() -> None:
    graph = community_graph(256 * 64, local=0.9)
    train = torch.arange(0, 64 * 25, 10)  # all in a tenth of the communities
    counts = accesses_of(graph, train)
    scores = {
        "degree": degree_score(graph),
        "rpr": reverse_pagerank(graph),
        "wrpr": weighted_reverse_pagerank(graph, train),
    }
    hits = {name: hit_ratio(counts, score, 0.1) for name, score in scores.items()}
    best = hit_ratio(counts, counts, 0.1)
    assert hits["wrpr"] > 1.3 * max(hits["degree"], hits["rpr"])
    assert hits["wrpr"] <= best <= 1


def test_where_labels_are_everywhere_all_scores_tie() -> None:
    graph = community_graph(256 * 64, local=0.9)
    train = torch.randperm(256 * 64, generator=torch.Generator().manual_seed(0))[:600]
    counts = accesses_of(graph, train)
    hits = [
        hit_ratio(counts, score, 0.1)
        for score in (
            degree_score(graph),
            reverse_pagerank(graph),
            weighted_reverse_pagerank(graph, train),
        )
    ]
    assert max(hits) - min(hits) < 0.08


@settings(deadline=None, max_examples=40)
@given(
    num_nodes=st.integers(1, 25), num_edges=st.integers(0, 80), seed=st.integers(0, 99)
)
def test_renumbering_is_an_isomorphism(
    num_nodes: int, num_edges: int, seed: int
) -> None:
    graph = random_graph(num_nodes, num_edges, seed)
    generator = torch.Generator().manual_seed(seed)
    order = reorder_by(torch.rand(num_nodes, generator=generator))
    graph = replace(graph, weights=torch.arange(graph.num_edges), symmetric=True)
    moved = order.graph(graph)
    assert moved.symmetric and moved.weights is not None and graph.weights is not None
    table = torch.arange(num_nodes)
    for node in range(num_nodes):
        new = int(order.nodes(torch.tensor(node)))
        assert order.rows(table)[new] == node
        old_list = graph.neighbors[graph.offsets[node] : graph.offsets[node + 1]]
        new_list = moved.neighbors[moved.offsets[new] : moved.offsets[new + 1]]
        assert order.old_of_new[new_list.long()].tolist() == old_list.tolist()
        old_edges = graph.weights[graph.offsets[node] : graph.offsets[node + 1]]
        new_edges = moved.weights[moved.offsets[new] : moved.offsets[new + 1]]
        assert new_edges.tolist() == old_edges.tolist()


@settings(deadline=None, max_examples=100)
@given(
    num_rows=st.integers(0, 60),
    replicated=st.integers(0, 60),
    spread=st.integers(0, 60),
    num_gpus=st.integers(1, 5),
)
def test_rows_are_dealt_out_once_and_evenly(
    num_rows: int, replicated: int, spread: int, num_gpus: int
) -> None:
    plan = plan_tiers(
        num_rows,
        4,
        replicated_bytes=4 * replicated,
        spread_bytes=4 * spread,
        num_gpus=num_gpus,
    )
    parts = [plan.rows_on(gpu) for gpu in range(num_gpus)]
    end = plan.replicated_rows + plan.spread_rows
    assert plan.replicated_rows == min(num_rows, replicated)
    assert end == min(num_rows, replicated + spread * num_gpus)
    found = torch.cat(parts).sort().values
    assert torch.equal(found, torch.arange(plan.replicated_rows, end))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= spread


def test_plans_are_checked() -> None:
    with pytest.raises(ValueError, match="inside 4 rows"):
        TierPlan(num_rows=4, replicated_rows=3, spread_rows=2, num_gpus=1)
    with pytest.raises(ValueError, match="num_gpus"):
        TierPlan(num_rows=4, replicated_rows=0, spread_rows=0, num_gpus=0)


@pytest.mark.parametrize("near", [0, 3, 20])
@pytest.mark.parametrize("spread", [0, 5])
@pytest.mark.parametrize("scored", [True, False])
def test_a_tiered_table_equals_the_table(near: int, spread: int, scored: bool) -> None:
    table = pin(torch.randn(20, 3, generator=torch.Generator().manual_seed(near)))
    score = torch.rand(20) if scored else None
    plan = plan_tiers(
        20, 12, replicated_bytes=near * 12, spread_bytes=spread * 12, num_gpus=2
    )
    shares = tuple(
        share_of(table, score, plan, gpu, DEVICE)
        for gpu in range(2 if plan.spread_rows else 0)
    )
    tiered = TieredTable(table, score, device=DEVICE, plan=plan, shares=shares)
    assert tiered.num_near == min(20, near + 2 * spread)
    assert tiered.hit_ratio() == 0.0
    index = torch.randint(0, 20, (200,))
    got = tiered.index_select(index.to(DEVICE))
    assert torch.equal(got.cpu(), table[index])
    order = torch.arange(20) if score is None else score.argsort(descending=True)
    hot = torch.isin(index, order[: tiered.num_near])
    assert tiered.hit_ratio() == pytest.approx(float(hot.float().mean()))
    out = torch.empty(200, 3, device=DEVICE)
    assert tiered.index_select(index.to(DEVICE), out=out, max_sms=1) is out
    fetch = TieredFetch(tiered, num_slots=2)
    kept = {}
    for slot, length in ((0, 3), (1, 100), (0, 50), (1, 60)):
        rows = fetch.rows(index[:length], slot)
        assert torch.equal(rows.cpu(), table[index[:length]])
        kept[slot, length] = rows
    # A slot's memory is used again, and is no other slot's.
    assert kept[1, 60].data_ptr() == kept[1, 100].data_ptr()
    assert kept[0, 50].data_ptr() != kept[1, 100].data_ptr()


def test_copies_are_what_is_read_and_follow_when_they_are_told() -> None:
    table = pin(torch.zeros(20, 3))
    score = torch.arange(20.0)
    tiered = TieredTable(table, score, device=DEVICE, budget_bytes=5 * 12)
    table.fill_(1)
    every = torch.arange(20, device=DEVICE)
    near = tiered.index_select(every).cpu()[:, 0] == 0
    assert near.nonzero().flatten().tolist() == [15, 16, 17, 18, 19], "copies are read"
    tiered.refresh(torch.tensor([3, 17, 17, 19]))
    near = tiered.index_select(every).cpu()[:, 0] == 0
    assert near.nonzero().flatten().tolist() == [15, 16, 18]
    tiered.refresh()
    assert tiered.index_select(every).eq(1).all()


def test_bad_tiers_are_refused() -> None:
    table = torch.zeros(20, 3)
    with pytest.raises(ValueError, match=r"each of 20 rows, got shape \[3"):
        TieredTable(table, torch.ones(3), device=DEVICE)
    plan = plan_tiers(20, 12, replicated_bytes=0, spread_bytes=36, num_gpus=2)
    with pytest.raises(ValueError, match=r"expects \[3, 3\] rows on 2 GPUs.*got \[1\]"):
        TieredTable(table, None, device=DEVICE, plan=plan, shares=(table[:1],))
    shares = (table[:3], table[:3])
    tiered = TieredTable(table, None, device=CPU, plan=plan, shares=shares)
    with pytest.raises(ValueError, match="share_of"):
        tiered.refresh()
    small = plan_tiers(4, 12, replicated_bytes=0)
    with pytest.raises(ValueError, match="one of 20 rows, got one of 4"):
        TieredTable(table, None, device=DEVICE, plan=small)
    whole = plan_tiers(20, 12, replicated_bytes=0)
    with pytest.raises(ValueError, match="spreads no rows"):
        TieredTable(table, None, device=DEVICE, plan=whole, shares=shares)


def test_the_budget_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth stays, and what PyTorch holds unused counts as free."""
    gpu = torch.device("cuda", 0)
    assert free_budget_bytes(CPU) == 0
    state = {"mem_get_info": (50, 100), "memory_reserved": 30, "memory_allocated": 20}
    state["get_per_process_memory_fraction"] = 1.0
    for name, value in state.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_budget_bytes(gpu) == 50 + 10 - 20
    assert free_budget_bytes(gpu, reserve_bytes=45) == 15
    assert free_budget_bytes(gpu, reserve_bytes=500) == 0
    limited = lambda device: 0.5  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", limited)
    assert free_budget_bytes(gpu) == 50 - 20 - 10, "a limit of the process holds"


def test_scores_by_name() -> None:
    graph = random_graph(50, 300)
    train = torch.tensor([3, 4])
    expected = {
        Score.DEGREE: degree_score(graph),
        Score.REVERSE_PAGERANK: reverse_pagerank(graph, num_iterations=2),
        Score.WEIGHTED_REVERSE_PAGERANK: weighted_reverse_pagerank(
            graph, train, num_iterations=2
        ),
    }
    for kind, score in expected.items():
        assert torch.equal(score_nodes(kind, graph, train, 2), score)


def test_peers_are_touched_before_kernels_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch lets a GPU read a peer from the first copy on."""
    table = torch.arange(24.0).view(12, 2)
    plan = plan_tiers(12, 8, replicated_bytes=0, spread_bytes=16, num_gpus=2)
    shares = tuple(share_of(table, None, plan, gpu, CPU) for gpu in range(2))
    copied, stock = set(), torch.Tensor.to

    def to(tensor: torch.Tensor, *where: object) -> torch.Tensor:
        copied.add(tensor.data_ptr())
        return stock(tensor, *where)

    monkeypatch.setattr(torch.Tensor, "to", to)
    TieredTable(table, None, device=CPU, plan=plan, shares=shares)
    assert {share.data_ptr() for share in shares} <= copied
