"""What DGL's users come for, on this machine: typed batches, blocks, derivatives.

    python -m recipes.bench rgnn.dgl

- `typed`: RGCN, RGAT and HGT on neighbourhoods of a graph of ogbn-mag's size, hector's
  layers and PyG's (`recipes.bench.rgnn.batches`).
- `blocks`: two SAGE layers a relation on DGL's blocks of 1,024 papers, ten neighbours a
  relation and layer: `hector.message.nn`, and PyG's `SAGEConv` on the same bipartite
  edges, summed as `HeteroConv` sums, as edge_index and as sorted `EdgeIndex`. A step is
  forward and backward, on blocks and edges that were made before.
- `one type`: GCN, SAGE, GIN and GAT on PubMed and Flickr
  (`recipes.bench.rgnn.messages`).
- `second`: seconds of a second backward over those of a first one, for the gradient of
  the squared gradient of a layer's input.

`ratio` is the best way of PyG over hector. Medians by the clock.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector import message
from hector.graph import HeteroGraph
from hector.message import dataloading
from hector.message import nn as dglnn
from hector.nn import HGTConv, RGATConv, RGCNConv
from recipes.bench.harness.cli import Bench
from recipes.bench.rgnn import batches, messages
from recipes.bench.rgnn.mag import CLASSES, WIDTH, mag_graph
from recipes.bench.rgnn.pyg import relations

FANOUT = 10
SECOND = ("gcn", "gat", "rgcn", "rgat", "hgt")
PAPER = "n0"


def of_message(whole: HeteroGraph) -> message.HeteroGraph:
    """The same nodes and edges, by type."""
    offsets, names = whole.node_type_offsets, whole.node_type_names
    sizes = {n: offsets[i + 1] - offsets[i] for i, n in enumerate(names)}
    edges = {kind: tuple(ends) for kind, ends in relations(whole).items()}
    return message.HeteroGraph(edges, sizes)


def pyg_edges(block: message.HeteroGraph, ordered: bool) -> dict[Any, Tensor]:
    """A block's edges as PyG takes them: sorted; `ordered`: and known to be."""
    from torch_geometric import EdgeIndex

    found = {}
    for k in block.canonical_etypes:
        if not block.num_edges(k):
            continue
        src, dst = block[k].edges()
        ends = torch.stack((src, dst))[:, torch.argsort(dst, stable=True)]
        if ordered:
            size = (block.num_src_nodes(k[0]), block.num_dst_nodes(k[2]))
            made = EdgeIndex(ends, sparse_size=size, sort_order="col")
            ends = made.fill_cache_()
        found[k] = ends
    return found


def by_relation(layer: Any, block: Any, h: Any, edges: Any) -> dict[str, Tensor]:
    """What PyG's `HeteroConv` does, with rows of a block's own for destinations."""
    found: dict[str, Tensor] = {}
    for (start, name, end), ends in edges.items():
        own = h[end][: block.num_dst_nodes(end)]
        made = layer[name]((h[start], own), ends)
        found[end] = found[end] + made if end in found else made
    return found


class BlockModel(nn.Module):
    """Two layers over blocks, given as either side wants them."""

    def __init__(self, layers: list[nn.Module], ours: bool) -> None:
        super().__init__()
        self.layers, self.ours = nn.ModuleList(layers), ours

    def forward(self, h: dict[str, Tensor], blocks: Any, edges: Any) -> dict[str, Any]:
        for i, (layer, block, held) in enumerate(
            zip(self.layers, blocks, edges, strict=True)
        ):
            if self.ours:
                h = layer(block, h)
            else:
                h = by_relation(layer, block, h, held)
            h = h if i else {n: r.relu() for n, r in h.items()}
        return h


def models(kinds: Any) -> tuple[BlockModel, BlockModel]:
    """Both sides with the same parameters."""
    from torch_geometric.nn import SAGEConv

    widths = ((WIDTH, WIDTH), (WIDTH, CLASSES))
    ours: list[Any] = [
        dglnn.HeteroGraphConv({r: dglnn.SAGEConv(*w, "mean") for _, r, _ in kinds})
        for w in widths
    ]
    theirs: list[Any] = [
        nn.ModuleDict({r: SAGEConv(*w) for _, r, _ in kinds}) for w in widths
    ]
    for mine, other in zip(ours, theirs, strict=True):
        for kind in kinds:
            sage, conv = mine.mods[kind[1]], other[kind[1]]
            with torch.no_grad():
                conv.lin_l.weight.copy_(sage.fc_neigh.weight)
                conv.lin_l.bias.copy_(sage.fc_self.bias)
                conv.lin_r.weight.copy_(sage.fc_self.weight)
    return BlockModel(ours, True), BlockModel(theirs, False)


def step_of(model: nn.Module, h: Any, blocks: Any, edges: Any, goal: Tensor) -> Any:
    def run() -> Tensor:
        for p in model.parameters():
            p.grad = None
        out: dict[str, Tensor] = model(h, blocks, edges)
        loss = functional.cross_entropy(out[PAPER], goal)
        loss.backward()
        return loss.detach()

    return run


def blocks_cell(whole: HeteroGraph, seeds: int) -> dict[str, Any]:
    """SAGE on DGL's blocks."""
    graph, device = of_message(whole), whole.device
    torch.manual_seed(0)
    x = {n: torch.randn(graph.num_nodes(n), WIDTH, device=device) for n in graph.ntypes}
    sampler = dataloading.NeighborSampler([FANOUT, FANOUT])
    ours, theirs = (m.to(device) for m in models(graph.canonical_etypes))
    times: dict[str, list[float]] = {"hector": [], "edge_index": [], "EdgeIndex": []}
    errors, edges = [], []
    for i in range(6):
        chosen = torch.arange(i * seeds, (i + 1) * seeds, device=device)
        inputs, outputs, blocks = sampler.sample(graph, {PAPER: chosen})
        h, goal = {n: x[n][ids] for n, ids in inputs.items()}, outputs[PAPER] % CLASSES
        ways = {"hector": step_of(ours, h, blocks, blocks, goal)}
        for way in ("edge_index", "EdgeIndex"):
            held = [pyg_edges(b, way == "EdgeIndex") for b in blocks]
            ways[way] = step_of(theirs, h, blocks, held, goal)
        losses = {way: float(run()) for way, run in ways.items()}
        errors += [abs(v / losses["hector"] - 1) for v in losses.values()]
        edges.append(sum(b.num_edges() for b in blocks))
        if i > 1:  # the first compile
            for way, run in ways.items():
                times[way].append(batches.milliseconds(run, 3)[0])
    found = {f"{way}_ms": round(median(t), 3) for way, t in times.items()}
    best = min(found["edge_index_ms"], found["EdgeIndex_ms"])
    return {
        "edges": int(median(edges)),
        **found,
        "ratio": round(best / found["hector_ms"], 2),
        "largest_loss_error": max(errors),
    }


def second_cell(name: str, device: str, shrink: int) -> dict[str, Any]:
    """On a graph of PubMed's size, eight relations."""
    nodes, num = (max(40, n // shrink) for n in messages.GRAPHS["pubmed"])
    src, dst = messages.ends(nodes, num, device)
    kinds = torch.randint(8, (num,), device=device)
    ends, graph = torch.stack((src, dst)), message.Graph(src, dst, num_nodes=nodes)
    names = [("n", f"r{i}", "n") for i in range(8)]
    typed = {k: ends[:, kinds == i] for i, k in enumerate(names)}
    x = torch.randn(nodes, WIDTH, device=device, requires_grad=True)
    rgcn, rgat = RGCNConv(WIDTH, WIDTH, 8), RGATConv(WIDTH, WIDTH // 4, 8, heads=4)
    hgt = HGTConv(WIDTH, WIDTH, (["n"], names), 4)
    gcn, gat = message.GraphConv(WIDTH, WIDTH), message.GATConv(WIDTH, WIDTH // 4, 4)
    for layer in (rgcn, rgat, hgt, gcn, gat):
        layer.to(device)
    calls: dict[str, Callable[[], Tensor]] = {
        "gcn": lambda: gcn(graph, x),
        "gat": lambda: gat(graph, x),
        "rgcn": lambda: rgcn(x, ends, kinds),
        "rgat": lambda: rgat(x, ends, kinds),
        "hgt": lambda: hgt({"n": x}, typed)["n"],
    }
    call, first, second = calls[name], [], []
    for i in range(9):
        value = call().square().sum()
        one = batches.milliseconds(partial(torch.autograd.grad, value, [x]), 1)
        value = call().square().sum()
        (grad,) = torch.autograd.grad(value, [x], create_graph=True)
        total = grad.square().sum()
        two = batches.milliseconds(partial(torch.autograd.grad, total, [x]), 1)
        if i > 1:
            first.append(one[0])
            second.append(two[0])
    a, b = median(first), median(second)
    ratio = round(b / a, 2)
    return {"first_ms": round(a, 3), "second_ms": round(b, 3), "ratio": ratio}


def main(bench: Bench, *, shrink: int = 1) -> None:
    """Run the cells that are missing.

    Args:
        shrink: divide the sizes: a trial on a CPU
    """
    device = str(bench.device)
    about = {"width": WIDTH, "fanout": FANOUT, "shrink": shrink}
    cells, seeds = bench.cells(about), max(4, 1024 // shrink)
    for name in SECOND:
        cells.run(f"second/{name}", second_cell, name, device, shrink)
    for graph in ("pubmed", "flickr"):
        for kind in messages.LAYERS:
            name = f"one type/{graph}/{kind}"
            cells.run(name, messages.cell, kind, graph, bench.device, shrink)
    whole = mag_graph(bench.device, shrink)
    cells.run("blocks/sage", blocks_cell, whole, seeds)
    rows = torch.randn(whole.num_nodes, WIDTH, device=bench.device)
    for kind in batches.KINDS:
        cells.run(f"typed/{kind}", batches.batch_cell, kind, whole, rows, seeds)
    cells.save()
