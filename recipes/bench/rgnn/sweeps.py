"""GCN and GAT as widths, nodes and densities grow (Wang, Figures 4.4 to 4.7).

    python -m recipes.bench rgnn.sweeps --budget-s 100 --out sweeps.json

`hidden`: widths on PubMed's numbers of nodes and edges; `width`: on a graph of 32,000
nodes and density 0.08 %; `nodes`: that density with more nodes; `density`: 32,000 nodes
with more edges. Edges of the last three are Erdos-Renyi's. A cell is one training step
of one layer, as in `messages`, until neither side has memory for it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recipes.bench.harness.cli import Bench
from recipes.bench.rgnn.messages import GRAPHS, WIDTH, compared, ends

NODES, DENSITY = 32_000, 0.0008
LAYERS = ("gcn", "gat")
SIZES: dict[str, tuple[float, ...]] = {
    "hidden": (16, 32, 64, 128, 256, 512, 1024),
    "width": (16, 32, 64, 128, 256, 512, 1024),
    "nodes": (32_000, 64_000, 128_000, 256_000, 512_000),
    "density": (0.0008, 0.0032, 0.0128, 0.0512, 0.2048),
}


def erdos_renyi(nodes: int, edges: int, device: str) -> tuple[Tensor, Tensor]:
    """Ends drawn uniformly, sorted by targets; no edge joins a node to itself."""
    made = torch.Generator(device).manual_seed(0)
    src, dst = torch.randint(nodes, (2, edges), generator=made, device=device)
    src = torch.where(src == dst, (src + 1) % nodes, src)
    dst, order = torch.sort(dst, stable=True)
    return src[order], dst


def subject(
    sweep: str, size: float, shrink: int, device: str
) -> tuple[int, tuple[Tensor, Tensor], int]:
    """Nodes, edges and width of a point."""
    if sweep == "hidden":
        nodes, edges = (max(2, n // shrink) for n in GRAPHS["pubmed"])
        return nodes, ends(nodes, edges, device), int(size)
    width = int(size) if sweep == "width" else WIDTH
    nodes = (int(size) if sweep == "nodes" else NODES) // shrink
    density = size if sweep == "density" else DENSITY
    edges = max(2, int(nodes * nodes * density))
    return nodes, erdos_renyi(nodes, edges, device), width


def points(sweeps: list[str]) -> Iterator[tuple[str, str, float]]:
    """In an order in which each sweep grows."""
    for sweep in sweeps:
        for size in SIZES[sweep]:
            for kind in LAYERS:
                yield sweep, kind, size


def main(
    bench: Bench, *, shrink: int = 1, sweeps: tuple[str, ...] = tuple(SIZES)
) -> None:
    """All points until the time is over.

    Args:
        shrink: divide nodes: a trial on a CPU
    """
    cells = bench.cells({"shrink": shrink})
    for sweep, kind, size in points(sweeps):
        own = sweep, kind, size, shrink, bench.device.type
        cells.run(f"{sweep}/{kind}/{size:g}", point, *own)


def point(
    sweep: str, kind: str, size: float, shrink: int, device: str
) -> dict[str, Any]:
    """One of a sweep."""
    nodes, both, width = subject(sweep, size, shrink, device)
    about = {"nodes": nodes, "edges": both[0].numel(), "width": width}
    return {**compared(kind, nodes, both, width), **about}
