"""Modules that read rows out of each graph of a batch."""

from typing import Any

from torch import Tensor, nn

from hector.message.batching import readout_nodes, softmax_nodes
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
