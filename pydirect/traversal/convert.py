"""Graphs of other libraries in, results out. Each is imported only when used."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pydirect.sampling import Graph
from pydirect.sampling.graph import one_each, plain

if TYPE_CHECKING:
    import networkx
    import scipy.sparse
    from torch_geometric.data import Data


def from_networkx(
    graph: "networkx.Graph[Any]", *, weight: str | None = None
) -> tuple[Graph, list[Any]]:
    """List targets of a networkx graph, directed or not, multi-edges kept.

    Args:
        graph: any networkx graph. An undirected edge leads both ways, and once from a
            node to itself.
        weight: edge attribute to take as weights; every edge must have it.

    Returns:
        The graph, and networkx's nodes in the order of their numbers.

    Raises:
        ValueError: an edge without the attribute, or one that is no number.
    """
    nodes = list(graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    edges = list(graph.edges(data=True))
    pairs = [(number[u], number[v]) for u, v, _ in edges]
    index = torch.tensor(pairs, dtype=torch.int64, device="cpu")
    index = index.reshape(-1, 2).t().contiguous()
    weights = None
    if weight is not None:
        values = [data.get(weight) for _, _, data in edges]
        for (u, v, _), value in zip(edges, values, strict=True):
            if not _is_weight(value):
                raise ValueError(
                    f"weight: expects a number {weight!r} on every edge, got {value!r} "
                    f"on {u!r} to {v!r}"
                )
        exact = all(isinstance(value, int | np.integer | np.bool_) for value in values)
        weights = torch.tensor(
            values, dtype=torch.int64 if exact else torch.float64, device="cpu"
        )
    return _of_edges(index, len(nodes), weights, undirected=not graph.is_directed()), (
        nodes
    )


def from_pyg(data: "Data", *, weight: str | None = None) -> Graph:
    """List targets of a PyG ``Data``.

    Args:
        data: with ``edge_index``; its edges are taken as they are stored.
        weight: attribute to take as weights, one an edge, such as "edge_weight".

    Raises:
        ValueError: no edges, no such attribute, or more than one value an edge.
    """
    if not hasattr(data, "is_undirected") or hasattr(data, "edge_types"):
        raise ValueError(
            f"from_pyg expects a Data of one node type, got {type(data).__name__}: "
            "HeteroData has to_homogeneous()"
        )
    if data.edge_index is None:
        raise ValueError(f"from_pyg expects data with edge_index, got {data}")
    weights = None
    if weight is not None:
        if weight not in data:
            raise ValueError(f"weight: expects an attribute of {data}, got {weight!r}")
        weights = one_each(data[weight].cpu())
    edges, num_nodes = plain(data.edge_index.cpu()), int(data.num_nodes or 0)
    graph = Graph.from_edges(edges, num_nodes, weights=weights, outgoing=True)
    source, target = edges.long()
    there, back = source * num_nodes + target, target * num_nodes + source
    return replace(
        graph, symmetric=torch.equal(there.sort().values, back.sort().values)
    )


def from_scipy(matrix: "scipy.sparse.sparray", *, weighted: bool = False) -> Graph:
    """List targets of a square sparse matrix: entry (i, j) is an edge i to j.

    Args:
        matrix: any scipy sparse format; explicit zeros are edges. An entry that is
            stored in parts is their sum, as in scipy: one edge.
        weighted: take the entries as weights.

    Raises:
        ValueError: not square, or entries of a type that `Graph.weights` does not hold.
    """
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"from_scipy expects a square matrix, got {matrix.shape}")
    rows = matrix.tocsr(copy=True)
    rows.sum_duplicates()
    entries = rows.tocoo()
    index = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
    weights = _weights_of(entries.data) if weighted else None
    return Graph.from_edges(index, matrix.shape[0], weights=weights, outgoing=True)


def to_networkx(
    graph: Graph, **values: torch.Tensor
) -> "networkx.DiGraph[int] | networkx.MultiDiGraph[int]":
    """Make a networkx graph with results of traversals as node attributes.

    Args:
        graph: lists of targets; weights become the edge attribute ``weight``.
        values: one tensor a name, shape (num_nodes,), such as ``level=bfs(graph, 0)``.

    Raises:
        ValueError: a tensor of another length.
    """
    import networkx

    made = networkx.MultiDiGraph()
    made.add_nodes_from(range(graph.num_nodes))
    targets, sources = graph.to_edge_index().tolist()
    if graph.weights is None:
        made.add_edges_from(zip(sources, targets, strict=True))
    else:
        weights = graph.weights.tolist()
        made.add_weighted_edges_from(zip(sources, targets, weights, strict=True))
    if made.number_of_edges() == len(set(made.edges())):
        made = networkx.DiGraph(made)
    for name, tensor in values.items():
        _check_length(name, tensor, graph)
        networkx.set_node_attributes(made, dict(enumerate(tensor.tolist())), name)
    return made


def to_pyg(graph: Graph, **values: torch.Tensor) -> "Data":
    """Make a PyG ``Data`` with results of traversals as node attributes.

    Args:
        graph: lists of targets; weights become ``edge_weight``.
        values: one tensor a name, shape (num_nodes,).

    Raises:
        ValueError: a tensor of another length.
    """
    from torch_geometric.data import Data

    data = Data(
        edge_index=graph.to_edge_index().flip(0),
        edge_weight=graph.weights,
        num_nodes=graph.num_nodes,
    )
    for name, tensor in values.items():
        _check_length(name, tensor, graph)
        data[name] = tensor
    return data


def _is_weight(value: object) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return isinstance(value, float | np.bool_ | np.integer | np.floating)


def _weights_of(values: "np.ndarray[Any, Any]") -> torch.Tensor:
    """
    Raises:
        ValueError: a type that torch does not have.
    """
    try:
        return torch.from_numpy(values.copy())
    except TypeError as error:
        raise ValueError(
            f"weights: expects numbers of at most 64 bits, got {values.dtype}: use "
            "matrix.astype(float)"
        ) from error


def _of_edges(
    index: torch.Tensor,
    num_nodes: int,
    weights: torch.Tensor | None,
    *,
    undirected: bool,
) -> Graph:
    if undirected:
        loop = index[0] == index[1]
        index = torch.cat([index, index[:, ~loop].flip(0)], dim=1)
        if weights is not None:
            weights = torch.cat([weights, weights[~loop]])
    made = Graph.from_edges(index, num_nodes, weights=weights, outgoing=True)
    return replace(made, symmetric=undirected)


def _check_length(name: str, tensor: torch.Tensor, graph: Graph) -> None:
    if tensor.shape[:1] != (graph.num_nodes,):
        raise ValueError(
            f"{name}: expects one value for each of {graph.num_nodes} nodes, got shape "
            f"{list(tensor.shape)}"
        )
