"""Graphs in a file, as tensors: `torch.load` reads it with `weights_only=True`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hector.message.graph import Graph
from hector.message.hetero import HeteroGraph
from hector.tracing import untraced

AnyGraph = Graph | HeteroGraph


@untraced
def save_graphs(
    filename: str | Path,
    g_list: AnyGraph | Sequence[AnyGraph],
    labels: Mapping[str, Tensor] | None = None,
) -> None:
    """Write graphs with features, and tensors next to them, to a file of PyTorch's."""
    graphs = list(g_list) if isinstance(g_list, Sequence) else [g_list]
    kept = {"graphs": [_parts(g) for g in graphs], "labels": dict(labels or {})}
    torch.save(kept, filename)


@untraced
def load_graphs(
    filename: str | Path, idx_list: Sequence[int] | None = None
) -> tuple[list[AnyGraph], dict[str, Tensor]]:
    """Return what `save_graphs` wrote: graphs, those of `idx_list` or all, and labels.
    Files of DGL's own format are another matter: write them anew."""
    kept = torch.load(filename, weights_only=True)
    numbers = range(len(kept["graphs"])) if idx_list is None else idx_list
    return [_made(kept["graphs"][i]) for i in numbers], kept["labels"]


def _parts(g: AnyGraph) -> dict[str, Any]:
    if g.is_block:
        raise ValueError("expected a graph to save, got a block")
    return {
        "one": isinstance(g, Graph),
        "nodes": {n: g.num_nodes(n) for n in g.ntypes},
        "edges": {k: g[k].edges() for k in g.canonical_etypes},
        "ndata": {n: dict(g.frame_of(n)) for n in g.ntypes},
        "edata": {k: dict(g[k].edata) for k in g.canonical_etypes},
        "batch": (
            {n: g.node_sizes(n) for n in g.ntypes},
            {k: g.edge_sizes(k) for k in g.canonical_etypes},
        ),
    }


def _made(kept: Mapping[str, Any]) -> AnyGraph:
    made: AnyGraph
    if kept["one"]:
        ((src, dst),) = kept["edges"].values()
        made = Graph(src, dst, num_nodes=next(iter(kept["nodes"].values())))
    else:
        made = HeteroGraph(kept["edges"], kept["nodes"])
    for n, columns in kept["ndata"].items():
        made.frame_of(n).update(columns)
    for k, columns in kept["edata"].items():
        made[k].edata.update(columns)
    made.set_batch_num_nodes(kept["batch"][0])
    made.set_batch_num_edges(kept["batch"][1])
    return made
