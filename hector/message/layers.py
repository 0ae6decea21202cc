"""Layers of homogeneous graphs, each a few lines of message passing."""

from collections.abc import Callable
from functools import cache, lru_cache
from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hector.initialization import glorot
from hector.message import functions as fn
from hector.message.batches import EdgeBatch, NodeBatch
from hector.message.direct import NO_ROWS, Passing, neighbours
from hector.message.graph import Graph
from hector.message.sums import RowSums, sum_rows, sums
from hector.precision import entering, is_product, wide, wide_linear
from hector.tracing import untraced


@fn.pure
def _scaled(e: EdgeBatch) -> dict[str, Tensor]:
    return {"m": e.src["h"] * e.src["scale"]}


@fn.pure
def _with_itself(n: NodeBatch, bias: Tensor) -> dict[str, Tensor]:
    own = n.data["h"] * n.data["scale"]
    return {"out": (n.data["sum"] + own) * n.data["scale"] + bias}


@cache
def _scales(dtype: torch.dtype) -> Callable[[Graph], Tensor]:
    """1 / sqrt(neighbours), the node itself among them: of the edges alone."""
    return lambda g: (g.in_degrees() + 1).to(dtype).rsqrt()[:, None]


@cache
def _looped(dtype: torch.dtype) -> Callable[[Graph], RowSums]:
    """Sums of the node's own row and its neighbours', each times both ends' scales."""

    def make(g: Graph) -> RowSums:
        # Of the edges alone: features are another call's.
        src, dst = g.edges()
        own = torch.arange(g.num_dst_nodes(), device=g.device)
        ends = torch.cat((src, own)), torch.cat((dst, own))
        structure = Graph(*ends, num_nodes=len(own)).structure
        scale = _scales(dtype)(g).flatten()
        return RowSums.of(structure).times(scale[structure.src] * scale[structure.dst])

    return make


@cache
def _convolved(dtype: torch.dtype) -> Passing:
    """Neighbours' rows and the node's own, each times both ends' scales."""
    return Passing(
        lambda bias: (_scaled(), fn.sum("m", "sum"), _with_itself(bias)),
        {"scale": _scales(dtype)},
    )


class GraphConv(nn.Module):
    """Kipf and Welling (arXiv 1609.02907); every node counts as its own neighbour."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    @untraced
    def forward(self, g: Graph, x: Tensor) -> Tensor:
        """Return [nodes, out_channels] for x [nodes, in_channels]."""
        bias = self.bias
        x, dtype = entering(x, bias)
        rows = wide_linear(self.lin, x)
        near = sum_rows(g, rows, _looped(rows.dtype)) if x.is_cpu else None
        if near is not None:
            return (near + wide(bias)).to(dtype)
        return _convolved(rows.dtype)(g, {"h": rows}, NO_ROWS, bias).to(dtype)


class SAGEConv(nn.Module):
    """GraphSAGE (arXiv 1706.02216): a node's row and a reduction of its neighbours'.

    `reducer` is a built-in one; "lstm" has an LSTM of the inputs' width.
    """

    def __init__(
        self, in_channels: int, out_channels: int, reducer: str = "mean"
    ) -> None:
        super().__init__()
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)
        self.reducer, self.lstm = reducer, None
        if reducer == "lstm":
            self.lstm = nn.LSTM(in_channels, in_channels, batch_first=True)

    @untraced
    def forward(self, g: Graph, x: Tensor) -> Tensor:
        """Return [nodes, out_channels] for x [nodes, in_channels]."""
        lin, own = self.lin_l, self.lin_r
        x, dtype = entering(x, lin)
        # Another module is called where it stands in the formula.
        weight: Tensor | None = wide(lin.weight) if is_product(lin) else None
        first = self.reducer in ("sum", "mean") and weight is not None
        first = first and lin.in_features > lin.out_features
        rows = F.linear(x, weight) if first and weight is not None else x
        if self.lstm is not None:
            with g.local_scope():
                g.ndata["h"] = rows
                g.update_all(fn.copy_u("h", "m"), fn.lstm("m", "near", self.lstm))
                near = g.ndata["near"]
        else:
            near = neighbours(g, rows, getattr(fn, self.reducer))
        if weight is None:
            near = lin(near)
        else:
            bias = None if lin.bias is None else wide(lin.bias)
            if not first:
                near = F.linear(near, weight, bias)
            elif bias is not None:
                near = near + bias
        if is_product(own) and own.bias is None:
            return torch.addmm(near, x, wide(own.weight).t()).to(dtype)
        out: Tensor = near + own(x)
        return out.to(dtype)


@fn.pure
def _and_itself(n: NodeBatch, eps: Tensor) -> dict[str, Tensor]:
    own = n.data["h"]
    return {"out": n.data["sum"] + (own + own * eps)}


_isomorphic = Passing(
    lambda eps: (fn.copy_u("h", "m"), fn.sum("m", "sum"), _and_itself(eps))
)


class GINConv(nn.Module):
    """Graph isomorphism network (arXiv 1810.00826): `net` of a node's row plus the sum
    of its neighbours'."""

    def __init__(self, net: nn.Module, eps: float = 0.0) -> None:
        super().__init__()
        self.net, self.eps = net, nn.Parameter(torch.tensor(eps))

    @untraced
    def forward(self, g: Graph, x: Tensor) -> Tensor:
        """Return `net`'s result for x [nodes, width]."""
        eps = self.eps
        x, dtype = entering(x, eps)
        near = sum_rows(g, x, sums) if x.is_cpu else None
        if near is not None:
            rows = near + x * (wide(eps) + 1)
        else:
            rows = _isomorphic(g, {"h": x}, NO_ROWS, wide(eps))
        return wide_linear(self.net, rows.to(dtype))


@fn.pure
def _attend(e: EdgeBatch, slope: float) -> dict[str, Tensor]:
    score = F.leaky_relu(e.src["left"] + e.dst["right"], slope)
    return {"m": e.softmax(score) * e.src["h"]}


@lru_cache(maxsize=64)
def attending(slope: float) -> Passing:
    """Neighbours' rows "h" times their attention, of the scores "left" of sources and
    "right" of destinations.

    Raises:
        ValueError: a slope that is no number; a tensor's would be read once.
    """
    if not isinstance(slope, Real):
        raise ValueError(
            f"expected a number as negative_slope, got {type(slope).__name__}"
        )
    return Passing(lambda: (_attend(slope), fn.sum("m", "out"), None))


class GATConv(nn.Module):
    """Graph attention (arXiv 1710.10903), heads side by side."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        negative_slope: float = 0.2,
    ) -> None:
        super().__init__()
        self.heads, self.slope = heads, negative_slope
        self.lin = nn.Linear(in_channels, heads * out_channels, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        self.bias = nn.Parameter(torch.zeros(heads * out_channels))
        for t in (self.att_src, self.att_dst):
            glorot(t)

    @untraced
    def forward(self, g: Graph, x: Tensor) -> Tensor:
        """Return [nodes, heads * out_channels] for x [nodes, in_channels]."""
        bias, lin = self.bias, self.lin
        x, dtype = entering(x, bias)
        weight: Tensor | None = None
        if is_product(lin) and lin.bias is None:
            # Converted once: its gradient is then rounded once.
            weight = wide(lin.weight)
        h = lin(x) if weight is None else F.linear(x, weight)
        h = h.view(h.shape[0], self.heads, h.shape[1] // self.heads)
        left, right = self._scores(x, h, weight)
        rows = {"h": h, "left": left, "right": right}
        near = attending(self.slope)(g, rows)
        return (near.flatten(1) + wide(bias)).to(dtype)

    def _scores(
        self, x: Tensor, h: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what sources and destinations add to scores: [nodes, heads, 1].
        `weight`: the matrix of `h`, None where it is more than a product."""
        src, dst = wide(self.att_src), wide(self.att_dst)
        count, width = x.shape
        if weight is None or (x.is_cpu and count <= 4 * width):
            return (h * src).sum(-1, keepdim=True), (h * dst).sum(-1, keepdim=True)
        # Linear in x: two columns a head, not two passes over its rows.
        heads, sides = weight.view(self.heads, -1, width), torch.cat((src, dst))
        if x.is_cpu:
            # A batched product takes longer than all else of a small graph.
            columns = (heads * sides[..., None]).sum(2)
        else:
            columns = torch.matmul(sides.transpose(0, 1), heads).transpose(0, 1)
        score = F.linear(x, columns.reshape(-1, width))
        left, right = score.view(count, 2, self.heads, 1).unbind(1)
        return left, right


@fn.pure
def _next_edges(e: EdgeBatch) -> dict[str, Tensor]:
    return {"next": e.src["src"] + e.dst["dst"] + e.data["e"]}


@fn.pure
def _gated(e: EdgeBatch) -> dict[str, Tensor]:
    gate = torch.sigmoid(e.data["next"])
    return {"gate": gate, "m": gate * e.src["near"]}


@fn.pure
def _normalized(n: NodeBatch, eps: float) -> dict[str, Tensor]:
    return {"near": n.mailbox["m"].sum(1) / (n.mailbox["gate"].sum(1) + eps)}


@fn.pure
def _added(n: NodeBatch) -> dict[str, Tensor]:
    return {"out": n.data["own"] + n.data["near"]}


class GatedGCNConv(nn.Module):
    """Gated graph network with edge features (arXiv 1711.07553)."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.own, self.near = (
            nn.Linear(channels, channels),
            nn.Linear(channels, channels),
        )
        self.src, self.dst = (
            nn.Linear(channels, channels),
            nn.Linear(channels, channels),
        )
        self.edge, self.eps = nn.Linear(channels, channels), eps

    @untraced
    def forward(self, g: Graph, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return node rows and edge rows of the next layer for x [nodes, channels] and
        e [edges, channels]."""
        x, dtype = entering(x, self.own)
        e, edge_dtype = entering(e, self.own)
        with g.local_scope():
            for name in ("own", "near", "src", "dst"):
                g.ndata[name] = wide_linear(getattr(self, name), x)
            g.edata["e"] = wide_linear(self.edge, e)
            g.apply_edges(_next_edges())
            if not g.num_edges():  # then nothing is reduced
                g.ndata["near"] = torch.zeros_like(g.ndata["near"])
            g.update_all(_gated(), _normalized(self.eps), _added())
            return g.ndata["out"].to(dtype), g.edata["next"].to(edge_dtype)


@fn.pure
def _weighted(e: EdgeBatch, mu: Tensor, inv_sigma: Tensor) -> dict[str, Tensor]:
    off = (e.data["p"].unsqueeze(1) - mu) * inv_sigma
    return {"m": torch.exp((off * off).sum(-1, keepdim=True) * -0.5) * e.src["h"]}


class GMMConv(nn.Module):
    """MoNet (arXiv 1611.08402): neighbours weighted by `kernels` Gaussians of the
    pseudo-coordinates of edges, summed."""

    def __init__(
        self, in_channels: int, out_channels: int, dim: int, kernels: int
    ) -> None:
        super().__init__()
        self.lin = nn.Linear(in_channels, kernels * out_channels, bias=False)
        self.mu = nn.Parameter(torch.randn(kernels, dim))
        self.inv_sigma = nn.Parameter(torch.ones(kernels, dim))
        self.bias = nn.Parameter(torch.zeros(out_channels))

    @untraced
    def forward(self, g: Graph, x: Tensor, pseudo: Tensor) -> Tensor:
        """Return [nodes, out_channels] for x [nodes, in_channels] and pseudo [edges,
        dim]."""
        x, dtype = entering(x, self.bias)
        with g.local_scope():
            g.ndata["h"] = wide_linear(self.lin, x).unflatten(1, (len(self.mu), -1))
            g.edata["p"] = entering(pseudo, self.bias)[0]

            g.update_all(_weighted(self.mu, self.inv_sigma), fn.sum("m", "out"))
            return (g.ndata["out"].sum(1) + wide(self.bias)).to(dtype)
