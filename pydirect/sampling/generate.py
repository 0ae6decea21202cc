"""Generated graphs with the statistics of a real one."""

from dataclasses import dataclass

import torch

from pydirect.sampling.graph import Graph


@dataclass(frozen=True, kw_only=True)
class GraphStatistics:
    """What a generated graph copies. Defaults: ogbn-products (Table 4.3)."""

    num_nodes: int = 2_449_029
    num_edges: int = 61_859_140
    """Undirected: each is stored in both directions."""

    num_classes: int = 47
    num_features: int = 100
    train_share: float = 0.08
    """196,615 of the nodes of ogbn-products."""

    exponent: float = 2.2
    """Of the degree distribution's power law."""

    max_degree_ratio: float = 350.0
    """Largest over mean degree: 17,481 over 50.5 in ogbn-products."""

    intra_class_share: float = 0.8
    """Edges inside a class (the homophily of ogbn-products is 0.81)."""

    def __post_init__(self) -> None:
        for name in ("num_edges", "num_classes", "num_features"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: expects 1 or more, got {getattr(self, name)}"
                )
        if not 0 < self.train_share < 1:
            raise ValueError(
                f"train_share: expects more than 0 and less than 1, got "
                f"{self.train_share}"
            )
        if self.num_nodes < self.num_classes:
            raise ValueError(
                f"num_nodes: expects at least num_classes ({self.num_classes}), got "
                f"{self.num_nodes}"
            )


def generate_graph(
    statistics: GraphStatistics, *, seed: int, device: torch.device | str = "cpu"
) -> tuple[Graph, torch.Tensor]:
    """A graph of power-law degrees whose edges prefer their own class (Chung-Lu).

    Args:
        statistics: what to copy; the number of edges is met up to duplicates.
        seed: the graph depends on it and on the device's generator.
        device: where to draw and sort; a GPU is some fifty times faster.

    Returns:
        The graph, and the classes of its nodes: int64, shape (num_nodes,), CPU.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    n = statistics.num_nodes
    classes = torch.arange(n, device=device) * statistics.num_classes // n
    cumulative = torch.zeros(n + 1, dtype=torch.float64, device=device)
    torch.cumsum(_weights(statistics, generator), 0, out=cumulative[1:])
    first = _draw(cumulative, statistics.num_edges, generator)
    inside = (
        torch.rand(len(first), generator=generator, device=device, dtype=torch.float32)
        < statistics.intra_class_share
    )
    bounds = torch.searchsorted(
        classes, torch.arange(statistics.num_classes + 1, device=device)
    )
    low = torch.where(inside, bounds[classes[first]], 0)
    high = torch.where(inside, bounds[classes[first] + 1], n)
    second = _draw(cumulative, len(first), generator, low, high)
    # Node numbers without meaning: neighbours must not be neighbours in memory.
    shuffle = torch.randperm(n, generator=generator, device=device)
    edges = torch.stack([shuffle[first], shuffle[second]])
    labels = torch.empty_like(classes)
    labels[shuffle] = classes
    return Graph.from_edges(edges, n, symmetric=True), labels.cpu()


def _weights(statistics: GraphStatistics, generator: torch.Generator) -> torch.Tensor:
    """Expected degrees up to a factor: a bounded Pareto distribution, float64."""
    uniform = torch.rand(
        statistics.num_nodes,
        generator=generator,
        device=generator.device,
        dtype=torch.float64,
    )
    tail = statistics.exponent - 1
    floor = statistics.max_degree_ratio**-tail
    weights: torch.Tensor = (uniform * (1 - floor) + floor).pow(-1 / tail)
    return weights


def _draw(
    cumulative: torch.Tensor,
    num: int,
    generator: torch.Generator,
    low: torch.Tensor | None = None,
    high: torch.Tensor | None = None,
) -> torch.Tensor:
    """Nodes in proportion to their weights, between ``low`` and ``high`` each."""
    uniform = torch.rand(
        num, generator=generator, device=generator.device, dtype=torch.float64
    )
    begin = cumulative[0] if low is None else cumulative[low]
    end = cumulative[-1] if high is None else cumulative[high]
    found = torch.searchsorted(cumulative, begin + uniform * (end - begin), right=True)
    return (found - 1).clamp(0, len(cumulative) - 2)
