"""Modules with DGL's arguments that pass no messages of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.message.nn.convs import degree_scale, relation_of, summed
from hector.message.points import knn_graph, radius_graph, segmented_knn_graph
from hector.tracing import untraced


class Sequential(nn.Sequential):
    """Layers that take (graph, rows, ...), each the results of the one before; a list
    has a graph for each."""

    def forward(self, graph: Any, *feats: Any) -> Any:
        """Return the last layer's results."""
        graphs = graph if isinstance(graph, list) else [graph] * len(self)
        found: Any = feats
        for each, layer in zip(graphs, self, strict=True):
            found = layer(each, *(found if isinstance(found, tuple) else (found,)))
        return found


class JumpingKnowledge(nn.Module):
    """All layers' rows as one (arXiv 1806.03536): side by side ("cat"), their maximum
    ("max"), or weighed by an LSTM's attention ("lstm")."""

    def __init__(
        self,
        mode: str = "cat",
        in_feats: int | None = None,
        num_layers: int | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("cat", "max", "lstm"):
            raise ValueError(f"expected mode 'cat', 'max' or 'lstm', got {mode!r}")
        self.mode = mode
        if mode == "lstm":
            if in_feats is None or num_layers is None:
                raise ValueError("expected in_feats and num_layers for mode 'lstm'")
            width = num_layers * in_feats // 2
            self.lstm = nn.LSTM(in_feats, width, bidirectional=True, batch_first=True)
            self.att = nn.Linear(2 * width, 1)

    def forward(self, feat_list: Sequence[Tensor]) -> Tensor:
        """Return a row a node."""
        if self.mode == "cat":
            return torch.cat(list(feat_list), -1)
        rows = torch.stack(list(feat_list), 1)
        if self.mode == "max":
            return rows.max(1).values
        share: Tensor = self.att(self.lstm(rows)[0]).softmax(1)
        return (rows * share).sum(1)


class HeteroLinear(nn.Module):
    """A linear layer for each type."""

    def __init__(
        self, in_size: Mapping[Any, int], out_size: int, bias: bool = True
    ) -> None:
        super().__init__()
        made = {str(t): nn.Linear(n, out_size, bias=bias) for t, n in in_size.items()}
        self.linears = nn.ModuleDict(made)

    def forward(self, feat: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return rows by type."""
        return {t: self.linears[str(t)](x) for t, x in feat.items()}


class HeteroEmbedding(nn.Module):
    """An embedding for each type."""

    def __init__(self, num_embeddings: Mapping[Any, int], embedding_dim: int) -> None:
        super().__init__()
        self.types = {str(t): t for t in num_embeddings}
        self.embeds = nn.ModuleDict(
            {str(t): nn.Embedding(n, embedding_dim) for t, n in num_embeddings.items()}
        )

    @property
    def weight(self) -> dict[Any, Tensor]:
        """Return all rows by type."""
        return {t: self.embeds[name].weight for name, t in self.types.items()}  # type: ignore[misc]

    def forward(self, input_ids: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return rows by type."""
        return {t: self.embeds[str(t)](ids) for t, ids in input_ids.items()}


class EdgePredictor(nn.Module):
    """A score of two rows: "dot", "cos", products ("ele") or side by side ("cat"), and
    a matrix of it where both widths are given."""

    def __init__(
        self,
        op: str,
        in_feats: int | None = None,
        out_feats: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if op not in ("dot", "cos", "ele", "cat"):
            raise ValueError(f"expected op dot, cos, ele or cat, got {op!r}")
        self.op, self.linear = op, None
        if in_feats is not None and out_feats is not None:
            width = {"ele": in_feats, "cat": 2 * in_feats}.get(op, 1)
            self.linear = nn.Linear(width, out_feats, bias=bias)

    def forward(self, h_src: Tensor, h_dst: Tensor) -> Tensor:
        """Return a row a pair."""
        if self.op == "cat":
            h = torch.cat((h_src, h_dst), -1)
        elif self.op == "cos":
            h = F.cosine_similarity(h_src, h_dst)[:, None]
        else:
            h = h_src * h_dst
            h = h.sum(-1, keepdim=True) if self.op == "dot" else h
        return h if self.linear is None else self.linear(h)


class LabelPropagation(nn.Module):
    """Labels spread `k` times: (1 - alpha) of the given ones and `alpha` of
    neighbours', over the roots of both degrees ("sym") or the in-degree ("row")."""

    def __init__(
        self,
        k: int,
        alpha: float,
        norm_type: str = "sym",
        clamp: bool = True,
        normalize: bool = False,
        reset: bool = False,
    ) -> None:
        super().__init__()
        if norm_type not in ("sym", "row"):
            raise ValueError(f"expected norm_type 'sym' or 'row', got {norm_type!r}")
        self.k, self.alpha, self.sym = k, alpha, norm_type == "sym"
        self.clamp, self.normalize, self.reset = clamp, normalize, reset

    @untraced
    def forward(self, g: Any, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [nodes, classes] for classes [nodes] or rows; `mask`: of the nodes
        whose labels are known."""
        r = relation_of(g)
        whole = labels.dim() > 1 and labels.shape[1] > 1
        given = labels if whole else F.one_hot(labels.view(-1))
        given = given.to(torch.float32)
        y = given
        if mask is not None:
            y = torch.zeros_like(given)
            y[mask] = given[mask]
        first = (1 - self.alpha) * y
        into = degree_scale(r.in_degrees(), -0.5 if self.sym else -1.0, y.dtype)
        for _ in range(self.k):
            rows = y * degree_scale(r.out_degrees(), -0.5, y.dtype) if self.sym else y
            y = first + self.alpha * summed(r, rows) * into
            y = y.clamp(0.0, 1.0) if self.clamp else y
            y = F.normalize(y, p=1) if self.normalize else y
            if self.reset and mask is not None:
                y = y.clone()
                y[mask] = given[mask]
        return y


class KNNGraph(nn.Module):
    """`knn_graph` of points."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Any:
        """Return the graph."""
        return knn_graph(x, self.k, *args, **named)


class SegmentedKNNGraph(nn.Module):
    """`segmented_knn_graph` of points."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor, segs: Sequence[int], *args: Any, **named: Any) -> Any:
        """Return the graph."""
        return segmented_knn_graph(x, self.k, segs, *args, **named)


class RadiusGraph(nn.Module):
    """`radius_graph` of points."""

    def __init__(self, r: float, p: float = 2, self_loop: bool = False) -> None:
        super().__init__()
        self.r, self.p, self.self_loop = r, p, self_loop

    def forward(self, x: Tensor, get_distances: bool = False) -> Any:
        """Return the graph; with `get_distances` also [edges, 1]."""
        return radius_graph(
            x, self.r, self.p, self.self_loop, get_distances=get_distances
        )
