"""A graph of ogbn-mag's sizes, and the layers that train on it."""

import torch

from hector.graph import HeteroGraph
from hector.train import LayerSpec
from recipes.bench.rgnn.pyg import layer_spec

WIDTH, SEEDS, FANOUTS, CLASSES = 64, 1024, (15, 10), 16
MAG_NODES = (736_389, 1_134_649, 8_740, 59_965)
MAG_EDGES = ((1, 2, 1_043_998), (1, 0, 7_145_660), (0, 0, 5_416_271), (0, 3, 7_505_078))
"""ogbn-mag's: source type, target type, edges."""


def mag_graph(device: torch.device, shrink: int = 1) -> HeteroGraph:
    """A graph of ogbn-mag's sizes with its edges both ways, uniform ends; `shrink`
    divides the published sizes: a trial on a CPU."""
    nodes = [max(n // shrink, 64) for n in MAG_NODES]
    gen = torch.Generator(device).manual_seed(0)
    first = [sum(nodes[:t]) for t in range(5)]
    src, dst, kind, names = [], [], [], []
    for i, (a, b, num) in enumerate(MAG_EDGES):
        size = (max(num // shrink, 64),)
        ends = [
            torch.randint(nodes[t], size, generator=gen, device=device) + first[t]
            for t in (a, b)
        ]
        for turn in range(2):
            src.append(ends[turn])
            dst.append(ends[1 - turn])
            kind.append(torch.full(size, 2 * i + turn, device=device))
        names += [(f"n{a}", f"r{2 * i}", f"n{b}"), (f"n{b}", f"r{2 * i + 1}", f"n{a}")]
    types = torch.arange(4).repeat_interleave(torch.tensor(nodes)).to(device)
    graph = HeteroGraph.from_arrays(
        torch.cat(src), torch.cat(dst), torch.cat(kind), node_type=types
    )
    return graph.replace(edge_type_names=tuple(names))


def specs(kind: str) -> list[LayerSpec]:
    return [layer_spec(kind, WIDTH, outs) for outs in (WIDTH, CLASSES)]
