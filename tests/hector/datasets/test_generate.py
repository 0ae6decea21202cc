"""Generated graphs meet their sizes and their compaction ratio."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hector.datasets.generate import TABLE_3_3, GraphSpec, generate, scaled
from hector.datasets.task import NodeClassification
from hector.graph import HeteroGraph
from hector.statistics import statistics

SMALL = GraphSpec(
    num_nodes=300,
    num_node_types=3,
    num_edges=2_000,
    num_edge_types=7,
    compaction_ratio=0.25,
)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(0.06, 0.5),
    st.floats(0, 1.5),
    st.integers(0, 9),
)
def test_sizes_are_exact(
    node_types: int, edge_types: int, ratio: float, skew: float, seed: int
) -> None:
    spec = GraphSpec(
        num_nodes=2_000,
        num_node_types=node_types,
        num_edges=1_000,
        num_edge_types=edge_types,
        compaction_ratio=ratio,
        relation_skew=skew,
    )
    graph = generate(spec, seed=seed)
    found = statistics(graph)
    assert (found.num_nodes, found.num_node_types) == (2_000, node_types)
    assert (found.num_edges, found.num_edge_types) == (1_000, edge_types)
    assert found.num_empty_relations == 0
    assert abs(found.entity_compaction_ratio - ratio) <= 1 / 1_000
    # Stated metadata agree with the edges: HGT layers build their weights from them.
    read_off = graph.replace(edge_type_names=None).edge_type_metadata()
    assert read_off == graph.edge_type_metadata()


def test_a_seed_is_a_graph() -> None:
    one, same, other = (generate(SMALL, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.src, same.src) and torch.equal(one.dst, same.dst)
    assert not torch.equal(one.src, other.src)


def test_skew_makes_relations_and_degrees_uneven() -> None:
    even = statistics(generate(replace(SMALL, relation_skew=0.0, degree_skew=1.0)))
    skewed = statistics(generate(replace(SMALL, relation_skew=1.5, degree_skew=4.0)))
    assert even.relation_gini < 0.01 < 0.4 < skewed.relation_gini
    assert skewed.max_in_degree > 1.5 * even.max_in_degree


@pytest.mark.parametrize("name", ["aifb", "mutag", "fb15k"])
def test_table_3_3(name: str) -> None:
    spec = TABLE_3_3[name]
    found = statistics(generate(spec))
    assert (found.num_nodes, found.num_edges) == (spec.num_nodes, spec.num_edges)
    assert round(found.entity_compaction_ratio, 3) == spec.compaction_ratio


@pytest.mark.parametrize("name", sorted(TABLE_3_3))
def test_scaled_table_3_3(name: str) -> None:
    spec = scaled(TABLE_3_3[name], 0.01)
    found = statistics(generate(spec))
    assert found.num_edges == spec.num_edges
    assert found.entity_compaction_ratio == pytest.approx(
        spec.compaction_ratio, abs=2 / spec.num_edges
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compaction_ratio": 0.0}, r"compaction_ratio in \(0, 1\], got 0.0"),
        ({"num_node_types": 301}, r"num_node_types <= num_nodes = 300, got 301"),
        ({"num_edges": 3}, r"num_edges >= num_edge_types = 7"),
        ({"num_nodes": 0}, r"num_nodes >= 1, got 0"),
        ({"degree_skew": 0.5}, r"degree_skew >= 1"),
    ],
)
def test_wrong_specs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_a_ratio_that_cannot_be_met() -> None:
    with pytest.raises(ValueError, match=r"got 2000; set a larger data.scale"):
        generate(replace(SMALL, num_nodes=30, compaction_ratio=1.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_nodes": [0, 0]}, "distinct train_nodes, at least one, got 2 of 1"),
        ({"train_nodes": [], "train_labels": []}, "distinct train_nodes, at least one"),
        ({"train_nodes": [0, 9]}, r"train_nodes in \[0, 3\), got 9 at position 1"),
        ({"test_nodes": [-1]}, r"test_nodes in \[0, 3\), got -1"),
        ({"train_labels": [0, -100]}, r"train_labels in \[0, 2\), got -100"),
        ({"train_labels": [0]}, "a label for each of 2 train_nodes, got 1"),
        ({"test_labels": [0.5]}, "test_labels of an integer dtype, got torch.float32"),
    ],
)
def test_labels_that_do_not_fit(change: dict[str, list[float]], words: str) -> None:
    whole = {
        "train_nodes": [0, 1],
        "train_labels": [0, 1],
        "test_nodes": [2],
        "test_labels": [0],
    }
    graph = HeteroGraph.from_arrays([0], [1], [0], num_nodes=3)
    parts = {k: torch.tensor(v) for k, v in {**whole, **change}.items()}
    parts = {k: v.long() if not v.numel() else v for k, v in parts.items()}
    with pytest.raises(ValueError, match=words):
        NodeClassification(name="mine", graph=graph, num_classes=2, **parts)
