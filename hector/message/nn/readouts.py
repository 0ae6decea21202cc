"""Modules that read rows out of each graph of a batch."""

from typing import Any

import torch
from torch import Tensor, nn

from hector.message.batching import (
    broadcast_nodes,
    readout_nodes,
    softmax_nodes,
    topk_nodes,
)
from hector.tracing import untraced


class SumPooling(nn.Module):
    """The sum of the nodes' rows in each graph: [graphs, width]."""

    op = "sum"

    @untraced
    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        """Return a row a graph."""
        with graph.local_scope():
            graph.ndata["h"] = feat
            return readout_nodes(graph, "h", op=self.op)


class AvgPooling(SumPooling):
    """The mean of the nodes' rows in each graph."""

    op = "mean"


class MaxPooling(SumPooling):
    """The maximum of the nodes' rows in each graph."""

    op = "max"


class GlobalAttentionPooling(nn.Module):
    """The sum of `feat_nn` of the nodes' rows, weighed by the softmax of `gate_nn` over
    each graph (arXiv 1511.05493)."""

    def __init__(self, gate_nn: nn.Module, feat_nn: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_nn, self.feat_nn = gate_nn, feat_nn

    @untraced
    def forward(self, graph: Any, feat: Tensor, get_attention: bool = False) -> Any:
        """Return a row a graph; with `get_attention` also [nodes, 1]."""
        with graph.local_scope():
            graph.ndata["g"] = self.gate_nn(feat)
            gate = softmax_nodes(graph, "g")
            rows = feat if self.feat_nn is None else self.feat_nn(feat)
            graph.ndata["r"] = rows * gate
            found = readout_nodes(graph, "r")
        return (found, gate) if get_attention else found


class WeightAndSum(nn.Module):
    """The sum of the nodes' rows, each times a number that is made of it."""

    def __init__(self, in_feats: int) -> None:
        super().__init__()
        self.atom_weighting = nn.Sequential(nn.Linear(in_feats, 1), nn.Sigmoid())

    @untraced
    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        """Return a row a graph."""
        with graph.local_scope():
            graph.ndata["h"] = feat * self.atom_weighting(feat)
            return readout_nodes(graph, "h")


class SortPooling(nn.Module):
    """The `k` nodes of the largest last entry of each graph, each row sorted
    (DGCNN): [graphs, k * width]."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    @untraced
    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        """Return a row a graph."""
        with graph.local_scope():
            graph.ndata["h"] = feat.sort(dim=-1).values
            return topk_nodes(graph, "h", self.k, sortby=-1)[0].flatten(1)


class Set2Set(nn.Module):
    """An LSTM's `n_iters` looks at the nodes of each graph (arXiv 1511.06391): [graphs,
    2 * input_dim]."""

    def __init__(self, input_dim: int, n_iters: int, n_layers: int) -> None:
        super().__init__()
        self.n_iters = n_iters
        self.lstm = nn.LSTM(2 * input_dim, input_dim, n_layers)

    @untraced
    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        """Return a row a graph."""
        size = (self.lstm.num_layers, graph.batch_size, self.lstm.hidden_size)
        state = feat.new_zeros(size), feat.new_zeros(size)
        found = feat.new_zeros(size[1], 2 * size[2])
        for _ in range(self.n_iters):
            query, state = self.lstm(found[None], state)
            query = query[0]
            with graph.local_scope():
                at = broadcast_nodes(graph, query)
                graph.ndata["e"] = (feat * at).sum(-1, keepdim=True)
                graph.ndata["r"] = feat * softmax_nodes(graph, "e")
                found = torch.cat((query, readout_nodes(graph, "r")), -1)
        return found
