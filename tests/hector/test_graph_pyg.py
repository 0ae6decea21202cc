"""Graphs from PyG's HeteroData."""

import pytest
import torch

from hector.graph import HeteroGraph

pyg_data = pytest.importorskip("torch_geometric.data")


def hetero() -> "pyg_data.HeteroData":
    data = pyg_data.HeteroData()
    data["paper"].num_nodes = 3
    data["author"].num_nodes = 2
    data["venue"].num_nodes = 4
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1], [2, 0, 1]])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0], [0]])
    data["paper", "rev", "author"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    return data


def test_types_keep_their_order_and_ids_are_offset() -> None:
    g = HeteroGraph.from_hetero_data(hetero())
    assert g.node_type_names == ("paper", "author", "venue")
    assert g.node_type_offsets == (0, 3, 5, 9)
    assert g.edge_type_metadata()[0] == ("author", "writes", "paper")
    assert g.etype_offsets == (0, 3, 4, 4)
    assert g.dst.tolist() == [0, 1, 2, 0]
    assert g.src.tolist() == [4, 4, 3, 0]
    assert g.edge_order.tolist() == [1, 2, 0, 3]


def test_out_of_range_names_the_relation() -> None:
    data = hetero()
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 2], [2, 0]])
    with pytest.raises(ValueError, match=r"'writes'.*\[0\] in \[0, 2\), got 2"):
        HeteroGraph.from_hetero_data(data)


def test_no_relation() -> None:
    data = pyg_data.HeteroData()
    data["paper"].num_nodes = 3
    with pytest.raises(ValueError, match="at least one edge type"):
        HeteroGraph.from_hetero_data(data)
