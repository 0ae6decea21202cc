"""Bad input gets an error that names it; nothing is an input too."""

from collections.abc import Callable

import pytest
import torch

from pydirect import explain
from pydirect.gather import index_select
from pydirect.loader import DirectFetch, LoaderConfig, MiniBatchLoader
from pydirect.ranks import Ranks
from pydirect.sampling import (
    DeviceSampler,
    Graph,
    HeteroDeviceSampler,
    NeighborSampler,
    settle,
)
from pydirect.tiering import (
    TieredEmbedding,
    TieredTable,
    degree_score,
    hit_ratio,
    plan_tiers,
    reorder_by,
    reverse_pagerank,
    spread_table,
    weighted_reverse_pagerank,
)

CPU = torch.device("cpu")
EMPTY = torch.empty(0, dtype=torch.int64)
LOOP = Graph(offsets=torch.tensor([0, 1, 1]), neighbors=torch.tensor([0]))
TABLE = torch.ones(2, 3)
BIPARTITE = Graph.from_edges(torch.tensor([[5, 9], [0, 2]]), 3, num_sources=10)


def tiered(score: torch.Tensor | None, budget_bytes: int = 12) -> TieredTable:
    return TieredTable(TABLE, score, device=CPU, budget_bytes=budget_bytes)


def sampled(seeds: torch.Tensor) -> object:
    return NeighborSampler(LOOP, (2,)).sample(seeds, 0)


def drawn(seeds: torch.Tensor) -> object:
    return DeviceSampler(settle(LOOP, "cpu"), (2,)).sample(seeds, 0, 0)


def loaded(seeds: torch.Tensor, part: tuple[int, int] = (0, 1)) -> list[object]:
    labels, fetch = torch.zeros(2).long(), DirectFetch(TABLE, CPU, 2)
    config = LoaderConfig(fanouts=(2,), num_samplers=1)
    return list(MiniBatchLoader(LOOP, labels, seeds, fetch, config, CPU, part=part))


def hetero(num_nodes: dict[str, int], name: str = "to") -> object:
    graphs = {("a", "to", "b"): settle(BIPARTITE, "cpu")}
    return HeteroDeviceSampler(graphs, num_nodes, {("a", name, "b"): (2,)})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sampled(torch.tensor([2])), r"seeds: .* nodes 0 to 1, got 2 to 2"),
        (lambda: sampled(torch.tensor([1, -1])), r"nodes 0 to 1, got -1 to 1"),
        (lambda: sampled(torch.tensor([0.0])), r"seeds: expects 1-D int64, got 1-D"),
        (lambda: sampled(torch.tensor(1)), r"seeds: expects 1-D int64, got 0-D"),
        (lambda: drawn(torch.tensor([2])), r"seeds: .* nodes 0 to 1, got 2 to 2"),
        (lambda: drawn(torch.tensor([0.5])), r"seeds: expects 1-D integers, got 1-D"),
        (lambda: drawn(torch.tensor([[0]])), r"seeds: expects 1-D integers, got 2-D"),
        (lambda: drawn(torch.tensor([True])), r"1-D integers, got 1-D torch.bool"),
        (lambda: loaded(torch.tensor([True, True])), r"1-D torch.bool: pass mask"),
        (lambda: loaded(torch.tensor([0]), (2, 2)), r"part: .* 0 to 1 of 2, got 2"),
        (lambda: NeighborSampler(BIPARTITE, (2,)), r"own nodes, got a graph of"),
        (
            lambda: DeviceSampler(settle(BIPARTITE, "cpu"), (2,)),
            r"two types \(num_sources\), which HeteroDeviceSampler draws from",
        ),
        (lambda: hetero({"a": 6, "b": 3}), r"num_nodes: expects 10 of 'a', .* got 6"),
        (lambda: hetero({"a": 10, "b": 3}, "r"), r"fanouts: expects one for each of"),
        (lambda: LoaderConfig(seed=None), r"seed: expects an integer, got None"),
        (lambda: LoaderConfig(fanouts=(2.5,)), r"fanouts: .* got \(2.5,\)"),
        (lambda: Graph.from_edges(EMPTY.view(2, 0), 1 << 32), r"at most 2\*\*63 pairs"),
        (lambda: tiered(None).refresh(torch.tensor([-1])), r"rows: .* 0 to 1, got -1"),
        (lambda: plan_tiers(2, 0, replicated_bytes=1), r"row_bytes: .* at least 1"),
        (
            lambda: weighted_reverse_pagerank(LOOP, torch.tensor([-1])),
            r"train_nodes: expects nodes 0 to 1, got -1",
        ),
        (
            lambda: reorder_by(torch.ones(3)).graph(BIPARTITE),
            r"graph: expects one of 3 nodes of one type, got 3 nodes, num_sources 10",
        ),
        (
            lambda: Graph.from_edges(torch.tensor([[0j], [0j]]), 1),
            r"edge_index: expects integers, got torch.complex64",
        ),
        (lambda: loaded(torch.tensor([0, 2])), r"seeds: expects nodes 0 to 1, got"),
        (lambda: LoaderConfig(fanouts=()), r"fanouts: expects one positive number"),
        (lambda: LoaderConfig(fanouts=(3, -2)), r"fanouts: .* got \(3, -2\)"),
        (lambda: LoaderConfig(fanouts=(0,)), r"fanouts: .* got \(0,\)"),
        (lambda: LoaderConfig(batch_size=2.5), r"batch_size: expects an integer"),
        (lambda: LoaderConfig(num_samplers=0), r"num_samplers: .* 1 or more, got 0"),
        (lambda: LoaderConfig(max_sms=0), r"max_sms: expects at least 1"),
        (
            lambda: Graph.from_edges(torch.tensor([[0.5], [0.0]]), 1),
            r"edge_index: expects integers, got torch.float32",
        ),
        (lambda: Graph.from_edges(EMPTY.view(2, 0), -1), r"num_nodes: .* got -1"),
        (lambda: tiered(torch.tensor([1.0, torch.nan])), r"score: .* NaN for row 1"),
        (lambda: tiered(torch.ones(2, 1)), r"one for each of 2 rows, got shape \[2, 1"),
        (lambda: tiered(torch.ones(3)), r"one for each of 2 rows, got shape \[3\]"),
        (lambda: tiered(None, -1), r"budget_bytes: expects 0 or more, got -1"),
        (
            lambda: spread_table(Ranks(), TABLE, None, budget_bytes=-1),
            r"budget_bytes: expects 0 or more, got -1",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_tables_without_rows() -> None:
    none, row = torch.empty(0, 4), torch.tensor([0])
    for table in (none, TieredTable(none, torch.empty(0), device=CPU, budget_bytes=9)):
        select = getattr(table, "index_select", None)
        take = select if table is not none else lambda index: index_select(none, index)
        assert take(EMPTY).shape == (0, 4)
        with pytest.raises(IndexError, match=r"index 0 .* 0 <= index < 0"):
            take(row)
    assert TieredTable(none, None, device=CPU, budget_bytes=9).hit_ratio() == 0
    assert TieredEmbedding(none, None, device=CPU, budget_bytes=9)(EMPTY).shape == (
        0,
        4,
    )
    assert "0 rows of 16 bytes of a table of 0 bytes" in str(explain(none, EMPTY))
    narrow = torch.empty(3, 0)
    assert index_select(narrow, row).shape == (1, 0)
    with pytest.raises(IndexError, match="0 <= index < 3"):
        index_select(narrow, torch.tensor([3]))


def test_graphs_without_nodes_and_batches_without_seeds() -> None:
    none = Graph(offsets=torch.tensor([0]), neighbors=EMPTY)
    assert reverse_pagerank(none).tolist() == degree_score(none).tolist() == []
    assert hit_ratio(torch.zeros(3), torch.ones(3), 0.5) == 0
    assert sampled(EMPTY).edge_index.shape == drawn(EMPTY).edge_index.shape == (2, 0)
    assert loaded(EMPTY) == []
