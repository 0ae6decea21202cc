"""Message passing on homogeneous graphs: GCN, SAGE, GIN and GAT against PyG's layers.

    python -m recipes.bench rgnn.messages --budget-s 90 --out messages.json
    python -m recipes.bench rgnn.messages --only '* columns/*'  # the sweeps

Graphs have the published numbers of nodes and edges (both ways where the original is
undirected) and ends drawn from a power law, as citations and friendships have; no edge
joins a node to itself. A cell is one training step of one layer (forward, and backward
to parameters and input), `WIDTH` columns in and out; GAT has 8 heads. PyG's ways:
`scatter` (edge_index), `sparse` (a CSR tensor of PyTorch) and `edge_index` (PyG's
EdgeIndex, sorted, with both orders filled in before); what a layer can cache is cached.
Medians of CUDA events; peak memory above what lay there before the step. `ratio` is the
best way of PyG over hector.

The sweeps are Wang's Figures 4.4 to 4.7: columns on PubMed; Erdos-Renyi graphs (ends
drawn uniformly) with nodes, density or columns varied about 32,768 nodes, a density of
0.08 % and 32 columns. They have no GIN.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hector import message
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import Peak, times_ms, wait
from recipes.bench.rgnn.measure import release

WIDTH, HEADS, EPS = 128, 8, 0.25
GRAPHS = {
    "pubmed": (19_717, 88_648),
    "flickr": (89_250, 899_756),
    "ogbn-arxiv": (169_343, 2_315_598),
    "yelp": (716_847, 13_954_819),
    "reddit-s": (232_965, 22_923_183),
}
"""Nodes and edges; reddit-s is Reddit with a fifth of its edges (Wang, section 4.7)."""
LAYERS = ("gcn", "sage", "gin", "gat")
WAYS = ("scatter", "sparse", "edge_index")
BASE = (32_768, 0.08, 32)
"""Of a random graph: nodes, edges in percent of all pairs, columns."""
NODES, PERCENTS, WIDTHS = (131_072, 262_144), (0.64, 5.12), (16, 128, 512)
SWEPT = ("gcn", "gat", "sage")


class Setting(NamedTuple):
    """One graph and a number of columns."""

    nodes: int
    edges: int
    width: int = WIDTH
    power: int = 2
    """Of the law of ends; 1 is uniform."""


def sweeps() -> dict[str, Setting]:
    """By name; what is told apart most first."""
    nodes, percent, width = BASE
    found = [BASE, *((nodes, percent, w) for w in WIDTHS)]
    found += [(n, percent, width) for n in NODES]
    found += [(nodes, p, width) for p in PERCENTS]
    made = {
        f"random {n} nodes {p} % {w} columns": Setting(n, round(n * n * p / 100), w, 1)
        for n, p, w in found
    }
    columns = {f"pubmed {w} columns": Setting(*GRAPHS["pubmed"], w) for w in WIDTHS}
    return made | {k: v for k, v in columns.items() if v.width != WIDTH}


def ends(nodes: int, edges: int, device: str, power: int = 2) -> tuple[Tensor, Tensor]:
    """Both ends from a power law over shuffled nodes."""
    made = torch.Generator(device).manual_seed(0)
    found = []
    for _ in range(2):
        at = torch.rand(edges, generator=made, device=device, dtype=torch.float64)
        rank = (nodes * at**power).long().clamp_(max=nodes - 1)
        found.append(torch.randperm(nodes, generator=made, device=device)[rank])
    src, dst = found
    dst = torch.where(dst == src, (dst + 1) % nodes, dst)
    order = torch.argsort(dst, stable=True)
    return src[order], dst[order]


def layers_of(
    kind: str, width: int = WIDTH, num_heads: int = HEADS
) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
    """What makes ours and PyG's."""
    from torch_geometric import nn as pyg

    def linear() -> nn.Module:
        return nn.Linear(width, width)

    both, heads = (width, width), (width, width // num_heads, num_heads)
    return {
        # Cached: the normalization is made in the first step.
        "gcn": (
            lambda: message.GraphConv(*both),
            lambda: pyg.GCNConv(*both, cached=True),
        ),
        "sage": (lambda: message.SAGEConv(*both), lambda: pyg.SAGEConv(*both)),
        "gin": (
            lambda: message.GINConv(linear(), EPS),
            lambda: pyg.GINConv(linear(), EPS, train_eps=True),
        ),
        "gat": (
            lambda: message.GATConv(*heads),
            lambda: pyg.GATConv(*heads, add_self_loops=False),
        ),
    }[kind]


def our_name(name: str) -> str:
    """Of a parameter of PyG's layer."""
    return name.replace("nn.", "net.")


def load(mine: nn.Module, theirs: nn.Module) -> None:
    """The same parameters on both sides."""
    state = {our_name(k): v for k, v in theirs.state_dict().items()}
    own = mine.state_dict()
    mine.load_state_dict({k: v.reshape(own[k].shape) for k, v in state.items()})


def edges_for(way: str, src: Tensor, dst: Tensor, nodes: int) -> Any:
    if way == "scatter":
        return torch.stack((src, dst))
    if way == "sparse":
        ones = torch.ones(src.numel(), device=src.device)
        size = (nodes, nodes)
        return torch.sparse_coo_tensor(
            torch.stack((dst, src)), ones, size, is_coalesced=True
        ).to_sparse_csr()
    from torch_geometric import EdgeIndex

    made = EdgeIndex(
        torch.stack((src, dst)), sparse_size=(nodes, nodes), sort_order="col"
    )
    return made.fill_cache_()


def difference(one: Tensor, other: Tensor) -> float:
    """The largest over the largest value."""
    return float((one.reshape(other.shape) - other).abs().max() / other.abs().max())


def timed(
    step: Callable[[], Tensor], device: torch.device, parameters: list[Tensor]
) -> dict[str, Any]:
    """Milliseconds and peak bytes of a step."""
    step()
    for p in parameters:
        p.grad = None
    wait(device)
    memory = Peak(device)
    guess = times_ms(step, device, 2)[1]
    peak = memory.most
    times = sorted(times_ms(step, device, 30 if guess < 5 else 8 if guess < 60 else 3))
    return {"ms": round(times[len(times) // 2], 4), "peak_mb": round(peak / 2**20, 1)}


def cell(
    kind: str, setting: Setting, device: torch.device, shrink: int
) -> dict[str, Any]:
    """One layer on one graph, ours and PyG's ways."""
    nodes, edges = (max(2, n // shrink) for n in setting[:2])
    src, dst = ends(nodes, edges, str(device), setting.power)
    torch.manual_seed(0)
    x = torch.randn(nodes, setting.width, device=device, requires_grad=True)
    seed = torch.randn(nodes, setting.width, device=device)
    make, makes = layers_of(kind, setting.width)
    theirs, mine = makes().to(device), make().to(device)
    load(mine, theirs)
    results: dict[str, Any] = {}
    outs: dict[str, dict[str, Tensor]] = {}

    def run(side: str, layer: nn.Module, call: Callable[[], Tensor]) -> dict[str, Any]:
        parameters = {"x": x, **dict(layer.named_parameters())}

        def step() -> Tensor:
            for p in parameters.values():
                p.grad = None
            out = call()
            out.backward(seed)
            return out

        values = {"": step().detach()}
        for name, p in parameters.items():
            assert p.grad is not None, name
            values[our_name(name)] = p.grad.clone()
        outs[side] = values
        return timed(step, device, list(parameters.values()))

    graph = message.Graph(src, dst, num_nodes=nodes)
    results["hector"] = run("hector", mine, lambda: mine(graph, x))
    results["hector"]["counts"] = dict(graph.counts)
    for way in WAYS:
        fresh = makes().to(device)
        fresh.load_state_dict(theirs.state_dict())
        try:
            held = edges_for(way, src, dst, nodes)
            results[way] = run(way, fresh, lambda f=fresh, e=held: f(x, e))  # type: ignore[misc]
            off = {k: difference(outs["hector"][k], v) for k, v in outs[way].items()}
            results[way]["value_error"] = off.pop("")
            results[way]["gradient_error"] = max(off.values())
        except Exception as wrong:
            results[way] = {"error": f"{type(wrong).__name__}: {wrong}"[:200]}
        outs.pop(way, None)
        held = fresh = None
        release(device)
    best = {w: results[w] for w in WAYS if "ms" in results[w]}
    if not best:
        return results
    fastest = min(best, key=lambda w: best[w]["ms"])
    mine_ms, mine_mb = results["hector"]["ms"], results["hector"]["peak_mb"]
    results["best"] = fastest
    results["ratio"] = round(best[fastest]["ms"] / mine_ms, 2)
    for way in best:
        if mine_mb:
            share = mine_mb / max(best[way]["peak_mb"], 0.1)
            results[f"memory_of_{way}"] = round(share, 3)
    return results


def main(bench: Bench, *, shrink: int = 1) -> None:
    """Measure what is missing.

    Args:
        shrink: divide the sizes: a trial on a CPU
    """
    cells = bench.cells({"width": WIDTH, "heads": HEADS, "shrink": shrink})
    graphs = {name: Setting(*sizes) for name, sizes in GRAPHS.items()}
    for (name, setting), kind in itertools.product(graphs.items(), LAYERS):
        cells.run(f"{name}/{kind}", cell, kind, setting, bench.device, shrink)
    for (name, setting), kind in itertools.product(sweeps().items(), SWEPT):
        cells.run(f"{name}/{kind}", cell, kind, setting, bench.device, shrink)
