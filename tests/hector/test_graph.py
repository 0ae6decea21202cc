"""The graph: order, adjacency, compact maps, builders, errors."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hector.graph import Grouping, HeteroGraph, type_order
from hector.indexing import edge_sort
from hector.statistics import statistics


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Edges with empty relations, isolated nodes, duplicates and self loops."""
    num_nodes = draw(st.integers(1, 12))
    num_types = draw(st.integers(1, 6))
    node = st.integers(0, num_nodes - 1)
    edge = st.tuples(node, node, st.integers(0, num_types - 1))
    edges = draw(st.lists(edge, max_size=40))
    edges += draw(st.lists(st.sampled_from(edges), max_size=5)) if edges else []
    edges += [(n, n, 0) for n in draw(st.lists(node, max_size=3))]
    src, dst, kind = (list(c) for c in zip(*edges, strict=True)) if edges else ([],) * 3
    cuts = sorted(draw(st.lists(st.integers(0, num_nodes), max_size=3)))
    return {
        "src": src,
        "dst": dst,
        "edge_type": kind,
        "num_nodes": num_nodes,
        "num_edge_types": num_types,
        "node_type": [sum(n >= c for c in cuts) for n in range(num_nodes)],
    }


def lists(group: Grouping) -> list[list[int]]:
    ptr = group.ptr.tolist()
    return [group.items[a:b].tolist() for a, b in pairwise(ptr)]


property_test = settings(max_examples=60, deadline=None)


@property_test
@given(arrays())
def test_edges_are_sorted_and_lead_back(a: dict[str, Any]) -> None:
    g = HeteroGraph.from_arrays(**a)
    rows = list(zip(g.edge_type.tolist(), g.dst.tolist(), g.src.tolist(), strict=True))
    given_rows = list(zip(a["edge_type"], a["dst"], a["src"], strict=True))
    assert rows == sorted(given_rows)
    order = g.edge_order.tolist()
    assert [given_rows[i] for i in order] == rows
    # Stable: equal edges keep the caller's order.
    assert order == sorted(order, key=lambda i: (given_rows[i], i))
    assert g.etype_offsets == tuple(
        sum(r < t for r in a["edge_type"]) for t in range(a["num_edge_types"] + 1)
    )
    assert g.node_type.tolist() == a["node_type"]


@property_test
@given(arrays())
def test_adjacency_is_the_brute_force_one(a: dict[str, Any]) -> None:
    g = HeteroGraph.from_arrays(**a)
    for group, ends in ((g.csc(), g.dst), (g.csr(), g.src)):
        want = [
            [e for e, v in enumerate(ends.tolist()) if v == n]
            for n in range(g.num_nodes)
        ]
        assert lists(group) == want


@property_test
@given(arrays())
def test_compact_maps_are_the_brute_force_ones(a: dict[str, Any]) -> None:
    g = HeteroGraph.from_arrays(**a)
    for pairs, ends in ((g.unique_src(), g.src), (g.unique_dst(), g.dst)):
        edges = list(zip(g.edge_type.tolist(), ends.tolist(), strict=True))
        want = sorted(set(edges))
        assert pairs.unique_node.tolist() == [n for _, n in want]
        assert pairs.edge_to_unique.tolist() == [want.index(e) for e in edges]
        assert pairs.etype_offsets == tuple(
            sum(t < r for t, _ in want) for r in range(g.num_edge_types + 1)
        )
        assert pairs.num_unique == len(want)
        assert lists(pairs.edges()) == [
            [i for i, e in enumerate(edges) if e == pair] for pair in want
        ]
        assert lists(pairs.by_node()) == [
            [i for i, (_, v) in enumerate(want) if v == n] for n in range(g.num_nodes)
        ]
    assert bool((g.unique_dst().edge_to_unique.diff() >= 0).all())


@property_test
@given(arrays())
def test_statistics_count_what_is_there(a: dict[str, Any]) -> None:
    g = HeteroGraph.from_arrays(**a)
    s = statistics(g)
    touched = {*a["src"], *a["dst"]}
    assert s.num_isolated_nodes == a["num_nodes"] - len(touched)
    assert s.num_empty_relations == a["num_edge_types"] - len(set(a["edge_type"]))
    degree = [a["dst"].count(n) for n in range(a["num_nodes"])]
    assert s.max_in_degree == max(degree)
    pairs = len(set(zip(a["src"], a["edge_type"], strict=True)))
    assert s.entity_compaction_ratio == pairs / max(len(a["src"]), 1)
    assert -1e-12 <= s.relation_gini < 1


@property_test
@given(arrays())
def test_long_keys_sort_like_short_ones(a: dict[str, Any]) -> None:
    g = HeteroGraph.from_arrays(**a)
    parts = (torch.tensor(a[k], dtype=torch.int64) for k in ("edge_type", "dst", "src"))
    # Too many nodes for one 63-bit key: the successive sorts are taken.
    assert torch.equal(
        edge_sort(*parts, num_nodes=2**31, num_types=2**10), g.edge_order
    )


@property_test
@given(arrays())
def test_pyg_arrays_give_the_same_graph(a: dict[str, Any]) -> None:
    index = torch.tensor([a["src"], a["dst"]], dtype=torch.int64).reshape(2, -1)
    kind = torch.tensor(a["edge_type"], dtype=torch.int32)
    g = HeteroGraph.from_pyg(
        index, kind, num_nodes=a["num_nodes"], num_relations=a["num_edge_types"]
    )
    h = HeteroGraph.from_arrays(**a)
    assert torch.equal(g.edge_order, h.edge_order)
    assert torch.equal(g.etype_ptr, h.etype_ptr)
    assert (g.num_node_types, g.num_nodes) == (1, a["num_nodes"])


def test_sizes_default_to_the_largest_id() -> None:
    g = HeteroGraph.from_arrays(np.array([0, 4]), [1, 2], torch.tensor([0, 2]))
    assert (g.num_nodes, g.num_edge_types, g.num_edges) == (5, 3, 2)
    assert g.index_dtype == torch.int32
    assert g.replace(num_nodes=2**31).index_dtype == torch.int64


def test_graph_without_edges() -> None:
    g = HeteroGraph.from_arrays([], [], [], num_nodes=3, num_edge_types=2)
    assert g.csc().ptr.tolist() == [0, 0, 0, 0]
    assert g.unique_src().etype_offsets == (0, 0, 0)
    assert statistics(g).num_isolated_nodes == 3


def test_maps_are_made_once_and_moving_to_the_same_device_is_free() -> None:
    g = HeteroGraph.from_arrays([0, 1], [1, 0], [0, 0])
    assert g.csc() is g.csc() and g.unique_src() is g.unique_src()
    assert g.to("cpu") is g


def test_metadata_is_read_off_the_edges() -> None:
    g = HeteroGraph.from_arrays([0, 2], [2, 0], [0, 2], node_type=[0, 0, 1])
    assert g.edge_type_metadata() == (
        ("n0", "r0", "n1"),
        ("n0", "r1", "n0"),
        ("n1", "r2", "n0"),
    )
    mixed = HeteroGraph.from_arrays([0, 2], [2, 0], [0, 0], node_type=[0, 0, 1])
    with pytest.raises(ValueError, match=r"one node type in each relation.*relation 0"):
        mixed.edge_type_metadata()


def test_type_order_renumbers_type_by_type() -> None:
    assert type_order([1, 0, 1, 0]).tolist() == [1, 3, 0, 2]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"src": [0, 9]}, r"src in \[0, 3\), got 9 at position 1; set num_nodes to at"),
    ({"dst": [0, -1]}, r"dst in \[0, 3\), got -1 at position 1$"),
    ({"edge_type": [0, -2]}, r"edge_type in \[0, 2\), got -2 at position 1"),
    ({"edge_type": [5, 0]}, r"edge_type in \[0, 2\), got 5 at position 0"),
    ({"src": [0.0, 1.0]}, r"src of an integer dtype, got torch.float32"),
    ({"dst": [True, False]}, r"dst of an integer dtype, got a boolean mask"),
    ({"src": [[0, 1]]}, r"src with one dimension, got shape \[1, 2\]"),
    ({"src": [0]}, r"one length, got 1, 2 and 2"),
    ({"node_type": [0, 1, 0]}, r"ascend .* got type 0 after 1 at node 2; renumber"),
    ({"node_type": [0, -1, 0]}, r"node_type in .* got -1 at position 1"),
    ({"node_type": [0, 0]}, r"node_type of length num_nodes = 3, got 2"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda v: str(v)[:40])
def test_errors_teach(change: dict[str, Any], message: str) -> None:
    good = {"src": [0, 1], "dst": [1, 2], "edge_type": [0, 1]}
    with pytest.raises(ValueError, match=message):
        HeteroGraph.from_arrays(**{**good, **change}, num_nodes=3, num_edge_types=2)


def test_pyg_shape_error() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, num_edges\], got \[3, 4\]"):
        HeteroGraph.from_pyg(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(4))


def test_stored_arrays_are_checked() -> None:
    g = HeteroGraph.from_arrays([0, 1], [1, 0], [0, 0])
    with pytest.raises(ValueError, match="expected src as int64"):
        g.replace(src=g.src.int())
    with pytest.raises(ValueError, match="expected 1 edge type names, got 2"):
        g.replace(edge_type_names=(("a", "b", "c"),) * 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_maps_are_equal_on_the_gpu() -> None:
    gen = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, 500, (2, 4000), generator=gen)
    kind = torch.randint(0, 30, (4000,), generator=gen)
    host = HeteroGraph.from_arrays(src, dst, kind)
    for there in (
        host.to("cuda"),
        HeteroGraph.from_arrays(*(t.cuda() for t in (src, dst, kind))),
    ):
        assert torch.equal(there.edge_order.cpu(), host.edge_order)
        assert torch.equal(there.csr().items.cpu(), host.csr().items)
        ours, theirs = there.unique_src(), host.unique_src()
        assert torch.equal(ours.edge_to_unique.cpu(), theirs.edge_to_unique)
