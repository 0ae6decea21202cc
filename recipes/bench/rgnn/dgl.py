"""What DGL's users come for, on this machine: blocks and second derivatives.

    python -m recipes.bench rgnn.dgl

- `blocks`: two layers on DGL's blocks of 1,024 papers, ten neighbours a relation and
  layer: `hector.message.nn`, and PyG's layers on the same bipartite edges
  (`recipes.bench.rgnn.block_models`), as edge_index and as sorted `EdgeIndex`. A step
  is forward and backward, on blocks and edges that were made before.
- `second`: seconds of a second backward over those of a first one, for the gradient of
  the squared gradient of a layer's input; PyG's layers do the same beside.

`ratio` is the best way of PyG over hector. Medians by the clock. Typed batches are
`rgnn.batches`', graphs of one type `rgnn.messages`'.
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
from hector.nn import HGTConv, RGATConv, RGCNConv
from recipes.bench.harness.cli import Bench
from recipes.bench.rgnn import batches, block_models, messages
from recipes.bench.rgnn.mag import CLASSES, WIDTH, mag_graph
from recipes.bench.rgnn.pyg import relations

FANOUT, LIMIT_S, HEADS = 10, 45.0, 4
RELATIONAL = ("rgcn", "rgat", "hgt")
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


def step_of(model: nn.Module, h: Any, blocks: Any, edges: Any, goal: Tensor) -> Any:
    parameters = list(model.parameters())  # as an optimizer has them

    def run() -> Tensor:
        for p in parameters:
            p.grad = None
        out: dict[str, Tensor] = model(h, blocks, edges)
        functional.cross_entropy(out[PAPER], goal).backward()
        return out[PAPER].detach()

    return run


def blocks_cell(kind: str, graph: message.HeteroGraph, seeds: int) -> dict[str, Any]:
    """Two layers on DGL's blocks."""
    device = graph.device
    torch.manual_seed(0)
    x = {n: torch.randn(graph.num_nodes(n), WIDTH, device=device) for n in graph.ntypes}
    sampler = dataloading.NeighborSampler([FANOUT, FANOUT])
    models = block_models.pair_of(kind, graph.canonical_etypes)
    ours, theirs = (m.to(device) for m in models)
    times: dict[str, list[float]] = {"hector": [], "edge_index": [], "EdgeIndex": []}
    errors, edges = [], []
    for i in range(6):
        chosen = torch.arange(i * seeds, (i + 1) * seeds, device=device)
        inputs, outputs, blocks = sampler.sample(graph, {PAPER: chosen})
        h, goal = {n: x[n][ids] for n, ids in inputs.items()}, outputs[PAPER] % CLASSES
        edges_of = {
            way: [pyg_edges(b, way == "EdgeIndex") for b in blocks]
            for way in ("edge_index", "EdgeIndex")
        }
        held = edges_of["edge_index"]
        ways = {"hector": step_of(ours, h, blocks, held, goal)}
        for way, ends in edges_of.items():
            ways[way] = step_of(theirs, h, blocks, ends, goal)
        outs = {way: run() for way, run in ways.items()}
        other = outs.pop("hector")
        errors += [messages.difference(out, other) for out in outs.values()]
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
        "largest_error": max(errors),
    }


def second_cell(name: str, device: str, shrink: int) -> dict[str, Any]:
    """On a graph of PubMed's size, eight relations; PyG's layers beside."""
    from torch_geometric import nn as pyg

    nodes, num = (max(40, n // shrink) for n in messages.GRAPHS["pubmed"])
    src, dst = messages.ends(nodes, num, device)
    kinds = torch.randint(8, (num,), device=device)
    ends, graph = torch.stack((src, dst)), message.Graph(src, dst, num_nodes=nodes)
    names = [("n", f"r{i}", "n") for i in range(8)]
    typed = {k: ends[:, kinds == i] for i, k in enumerate(names)}
    relational: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
        "rgcn": (RGCNConv, pyg.RGCNConv, (WIDTH, WIDTH, 8)),
        "rgat": (
            partial(RGATConv, heads=HEADS),
            partial(pyg.RGATConv, heads=HEADS),
            (WIDTH, WIDTH // HEADS, 8),
        ),
        "hgt": (HGTConv, pyg.HGTConv, (WIDTH, WIDTH, (["n"], names), HEADS)),
    }

    def call(layer: Any, x: Tensor) -> Tensor:
        if name == "hgt":
            return layer({"n": x}, typed)["n"]  # type: ignore[no-any-return]
        return layer(x, ends, kinds) if name in relational else layer(x, ends)

    ours: Callable[[Any, Tensor], Tensor] = call
    if name in relational:
        own, theirs, sizes = relational[name]
        mine, other = own(*sizes), theirs(*sizes)
        mine.load_state_dict(other.state_dict())
    else:
        mine, other = (make() for make in messages.layers_of(name, WIDTH, HEADS))
        messages.load(mine, other)
        ours = lambda layer, x: layer(graph, x)  # noqa: E731
    x = torch.randn(nodes, WIDTH, device=device, requires_grad=True)
    found: dict[str, Any] = {}
    sides = {"": (mine.to(device), ours), "pyg_": (other.to(device), call)}
    grads = []
    for side, (layer, run) in sides.items():
        part, value = twice(partial(run, layer, x), x)
        found |= {f"{side}{k}": v for k, v in part.items()}
        grads.append(value)
    return {**found, "error": messages.difference(*grads)}


def twice(call: Callable[[], Tensor], x: Tensor) -> tuple[dict[str, float], Tensor]:
    """Milliseconds of a first backward and of a second, and the latter's result."""
    first, second = [], []
    for i in range(9):
        value = call().square().sum()
        one = batches.milliseconds(partial(torch.autograd.grad, value, [x]), 1)
        value = call().square().sum()
        (grad,) = torch.autograd.grad(value, [x], create_graph=True)
        total = grad.square().sum()
        again = partial(torch.autograd.grad, total, [x], retain_graph=True)
        two = batches.milliseconds(again, 1)
        if i > 1:
            first.append(one[0])
            second.append(two[0])
    a, b = median(first), median(second)
    told = {"first_ms": round(a, 3), "second_ms": round(b, 3), "ratio": round(b / a, 2)}
    return told, again()[0]


def main(bench: Bench, *, shrink: int = 1) -> None:
    """Run the cells that are missing.

    Args:
        shrink: divide the sizes: a trial on a CPU
    """
    device, limit = str(bench.device), {"limit_s": LIMIT_S}
    about = {"width": WIDTH, "fanout": FANOUT, "shrink": shrink}
    cells, seeds = bench.cells(about), max(4, 1024 // shrink)
    for name in messages.LAYERS + RELATIONAL:
        cells.run(f"second/{name}", second_cell, name, device, shrink, **limit)
    graph = of_message(mag_graph(bench.device, shrink))
    for kind in block_models.KINDS:
        cells.run(f"blocks/{kind}", blocks_cell, kind, graph, seeds, **limit)
