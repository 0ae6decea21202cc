"""Two layers over DGL's blocks: hector's DGL layers, and PyG's on the same edges.

Both sides of a pair hold the same parameters. `sage` and `rgcn` reduce each relation by
its mean (with and without the node's own row), `rgat` has GAT's attention in each, all
three are summed over relations; `hgt` computes what DGL's example does (typed linears,
one softmax a relation, the relations' mean), with one message function of hector's for
the example's three calls a relation.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hector.message import functions as fn
from hector.message import nn as dglnn
from recipes.bench.rgnn.mag import CLASSES, WIDTH

KINDS = ("sage", "rgcn", "rgat", "hgt")
HEADS = 4
Kind = tuple[str, str, str]


class BlockModel(nn.Module):
    """Layers over blocks, given as either side wants them."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, h: dict[str, Tensor], blocks: Any, edges: Any) -> dict[str, Any]:
        for i, layer in enumerate(self.layers):
            h = layer(blocks[i], h, edges[i])
            h = h if i else {n: r.relu() for n, r in h.items()}
        return h


class Ours(nn.Module):
    """`HeteroGraphConv` on a block."""

    def __init__(self, made: dict[str, nn.Module]) -> None:
        super().__init__()
        self.conv = dglnn.HeteroGraphConv(made)

    def forward(self, block: Any, h: Any, edges: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.conv(block, h)
        return {n: r.flatten(1) for n, r in found.items()}


class Theirs(nn.Module):
    """What PyG's `HeteroConv` does, with rows of a block's own for destinations."""

    def __init__(self, made: dict[str, nn.Module]) -> None:
        super().__init__()
        self.mods = nn.ModuleDict(made)

    def forward(self, block: Any, h: Any, edges: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for (start, name, end), ends in edges.items():
            own = h[end][: block.num_dst_nodes(end)]
            made = self.mods[name]((h[start], own), ends)
            found[end] = found[end] + made if end in found else made
        return found


@fn.pure
def _attend(e: Any, key: str, value: str, scale: float) -> dict[str, Any]:
    score = (e.src[key] * e.dst["q"]).sum(-1, keepdim=True)
    return {"m": e.softmax(score * scale) * e.src[value]}


class HGTLayer(nn.Module):
    """DGL's example, its three calls a relation as one message function; `pyg`: with
    PyG's softmax and scatter."""

    def __init__(self, kinds: list[Kind], outs: int, pyg: bool) -> None:
        super().__init__()
        self.pyg, self.heads, self.width = pyg, HEADS, outs // HEADS
        names = sorted({n for a, _, b in kinds for n in (a, b)})
        three = {n: nn.Linear(WIDTH, 3 * outs) for n in names}
        self.qkv = nn.ModuleDict(three)
        self.messages = {
            r: _attend(f"k_{r}", f"v_{r}", self.width**-0.5) for _, r, _ in kinds
        }
        size = (2, HEADS, self.width, self.width)
        self.mix = nn.ParameterDict(
            {r: nn.Parameter(torch.randn(size) / self.width**0.5) for _, r, _ in kinds}
        )

    def forward(self, block: Any, h: Any, edges: Any) -> dict[str, Tensor]:
        rows = {
            n: self.qkv[n](x).view(-1, 3, self.heads, self.width).unbind(1)
            for n, x in h.items()
        }
        way = self._pyg if self.pyg else self._dgl
        return {n: r.flatten(1) for n, r in way(block, rows, edges).items()}

    def _mixed(self, name: str, row: Any) -> list[Tensor]:
        """Keys and values of a relation: of all heads in one product, as a batch of
        small ones takes most of a step."""
        pairs = zip(row[1:], self.mix[name], strict=True)
        return [(x.flatten(1) @ torch.block_diag(*w)).view_as(x) for x, w in pairs]

    def _dgl(self, block: Any, rows: Any, edges: Any) -> dict[str, Tensor]:
        with block.local_scope():
            for kind in edges:
                start, name, end = kind
                g = block[kind]
                key, value = self._mixed(name, rows[start])
                g.srcdata[f"k_{name}"], g.srcdata[f"v_{name}"] = key, value
                g.dstdata["q"] = rows[end][0][: g.num_dst_nodes()]
            calls = {kind: (self.messages[kind[1]], fn.sum("m", "o")) for kind in edges}
            block.multi_update_all(calls, "mean")
            return {end: block.dstnodes[end].data["o"] for _, _, end in edges}

    def _pyg(self, block: Any, rows: Any, edges: Any) -> dict[str, Tensor]:
        from torch_geometric.utils import scatter, softmax

        found: dict[str, list[Tensor]] = {}
        for (start, name, end), ends in edges.items():
            src, dst = ends[0], ends[1]
            key, value = self._mixed(name, rows[start])
            num = block.num_dst_nodes(end)
            score = (rows[end][0][dst] * key[src]).sum(-1) / self.width**0.5
            share = softmax(score, dst, num_nodes=num)
            out = scatter(value[src] * share[..., None], dst, 0, num, reduce="sum")
            found.setdefault(end, []).append(out)
        return {n: torch.stack(parts).mean(0) for n, parts in found.items()}


def _pair(kind: str, outs: int) -> tuple[nn.Module, nn.Module]:
    """A relation's layer, ours and PyG's, with the same parameters."""
    from torch_geometric import nn as pyg

    ours: Any
    if kind == "rgat":
        heads = (WIDTH, outs // HEADS, HEADS)
        ours, theirs = dglnn.GATConv(*heads), pyg.GATConv(*heads, add_self_loops=False)
        same = {
            theirs.lin.weight: ours.fc.weight,
            theirs.att_src: ours.attn_l,
            theirs.att_dst: ours.attn_r,
            theirs.bias: ours.bias,
        }
    elif kind == "rgcn":
        ours = dglnn.GraphConv(WIDTH, outs, norm="right", bias=False)
        theirs = pyg.SAGEConv(WIDTH, outs, root_weight=False, bias=False)
        same = {theirs.lin_l.weight: ours.weight.t()}
    else:
        ours, theirs = dglnn.SAGEConv(WIDTH, outs, "mean"), pyg.SAGEConv(WIDTH, outs)
        same = {
            theirs.lin_l.weight: ours.fc_neigh.weight,
            theirs.lin_l.bias: ours.fc_self.bias,
            theirs.lin_r.weight: ours.fc_self.weight,
        }
    with torch.no_grad():
        for to, source in same.items():
            to.copy_(source)
    return ours, theirs


def pair_of(kind: str, kinds: list[Kind]) -> tuple[BlockModel, BlockModel]:
    """Models of both sides."""
    ours: list[nn.Module] = []
    theirs: list[nn.Module] = []
    for outs in (WIDTH, CLASSES):
        if kind == "hgt":
            ours.append(HGTLayer(kinds, outs, pyg=False))
            theirs.append(HGTLayer(kinds, outs, pyg=True))
            theirs[-1].load_state_dict(ours[-1].state_dict())
            continue
        made = {name: _pair(kind, outs) for _, name, _ in kinds}
        ours.append(Ours({n: a for n, (a, _) in made.items()}))
        theirs.append(Theirs({n: b for n, (_, b) in made.items()}))
    return BlockModel(ours), BlockModel(theirs)
