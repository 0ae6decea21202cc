"""Graphs of the six kinds of EMOGI's Table 2.2, generated with their published numbers
of nodes, mean degrees and kinds of degree distribution, divided by a scale."""

import math
from dataclasses import dataclass, replace

import torch

from pydirect.memory import empty_pinned, empty_table
from pydirect.sampling import Graph


@dataclass(frozen=True)
class Kind:
    """A row of Table 2.2."""

    name: str
    num_nodes: int
    num_edges: int
    """As stored: both directions of an undirected graph."""

    symmetric: bool
    recipe: str
    """kron, uniform, power (Chung-Lu) or web (power with local links)."""

    exponent: float = 0.0
    """Of the power law of the degrees."""

    max_degree: int = 0


KINDS = (
    Kind("GK", 134_217_728, 4_223_264_644, True, "kron"),
    Kind("GU", 134_217_728, 4_294_966_740, True, "uniform"),
    Kind("FS", 65_608_366, 3_612_134_270, True, "power", 2.5, 5214),
    Kind("ML", 30_239_687, 6_669_254_694, True, "power", 2.0, 2_106_904),
    Kind("SK", 50_636_154, 1_949_412_601, False, "web", 2.2, 12_870),
    Kind("UK5", 105_896_555, 3_738_733_648, False, "web", 2.2, 15_402),
)


def make(
    kind: Kind,
    divisor: int,
    *,
    id_bytes: int,
    memory: str,
    seed: int = 0,
    device: str,
    reverse: bool = False,
) -> Graph:
    """The graph with nodes and edges divided by ``divisor``: the mean degree stays.

    Args:
        id_bytes: 4 or 8.
        memory: "pinned" (small pages) or "table" (large pages).
        device: where to draw and sort.
        reverse: the same edges, listed at their targets.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    num_nodes = kind.num_nodes // divisor
    num_edges = kind.num_edges // divisor // (2 if kind.symmetric else 1)
    if kind.recipe == "kron":
        num_nodes = 1 << (num_nodes.bit_length() - (num_nodes & (num_nodes - 1) == 0))
    key = _keys(kind, num_nodes, num_edges, generator)
    if reverse:
        key = key % num_nodes * num_nodes + key // num_nodes
    if kind.symmetric:
        back = key % num_nodes * num_nodes + key // num_nodes
        key = torch.cat([key, back])
        del back
    key = key.sort().values
    offsets = torch.zeros(num_nodes + 1, dtype=torch.int64, device=device)
    counts = torch.zeros(num_nodes, dtype=torch.int64, device=device)
    for part in key.split(1 << 27):
        counts += torch.bincount(part // num_nodes, minlength=num_nodes)
    torch.cumsum(counts, 0, out=offsets[1:])
    dtype = torch.int32 if id_bytes == 4 else torch.int64
    allocate = empty_table if memory == "table" else empty_pinned
    for part in key.split(1 << 27):
        part %= num_nodes
    ids = key.to(dtype)
    del key, counts
    if device == "cuda":
        torch.cuda.empty_cache()
    neighbors = allocate((len(ids),), dtype)
    neighbors.copy_(ids)
    return Graph(offsets=offsets.cpu(), neighbors=neighbors, symmetric=kind.symmetric)


def weights_of(graph: Graph, seed: int = 0) -> Graph:
    """The graph with EMOGI's random weights, integers 8 to 72 (its section 2.5)."""
    generator = torch.Generator().manual_seed(seed)
    weights = empty_pinned((graph.num_edges,), torch.int32)
    weights.random_(8, 73, generator=generator)
    return replace(graph, weights=weights)


def _keys(
    kind: Kind, n: int, num_edges: int, generator: torch.Generator
) -> torch.Tensor:
    """source * n + target."""
    keys = []
    for first in range(0, num_edges, 1 << 27):
        num = min(1 << 27, num_edges - first)
        if kind.recipe == "uniform":
            source = _uniform(n, num, generator)
            target = _uniform(n, num, generator)
        elif kind.recipe == "kron":
            source, target = _kron(n, num, generator)
        else:
            source, target = _power(kind, n, num, generator)
        keys.append(source * n + target)
    return torch.cat(keys)


def _uniform(n: int, num: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(n, (num,), generator=generator, device=generator.device)


def _kron(
    n: int, num: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Graph500's R-MAT, 0.57 0.19 0.19, with scrambled node numbers."""
    source = torch.zeros(num, dtype=torch.int64, device=generator.device)
    target = torch.zeros_like(source)
    for _ in range(n.bit_length() - 1):
        draw = torch.rand(num, generator=generator, device=generator.device)
        source.mul_(2).add_(draw > 0.76)
        target.mul_(2).add_(((draw > 0.57) & (draw <= 0.76)) | (draw > 0.95))
    return _scramble(source, n), _scramble(target, n)


def _power(
    kind: Kind, n: int, num: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chung-Lu with a bounded power law; web pages link to their like, mostly near."""
    draw = _ranks(kind, n, num, generator)
    other = _ranks(kind, n, num, generator)
    source = _scramble(draw, n)
    target = _scramble(other, n)
    if kind.recipe == "web":
        # Crawl order: four of five links stay on the site, at distances 1 / x.
        near = torch.rand(num, generator=generator, device=generator.device)
        span = torch.rand(num, generator=generator, device=generator.device)
        side = torch.rand(num, generator=generator, device=generator.device) < 0.5
        step = (10_000.0**span).long()
        local = (source + torch.where(side, step, -step)) % n
        target = torch.where(near < 0.8, local, target)
    return source, target


def _ranks(kind: Kind, n: int, num: int, generator: torch.Generator) -> torch.Tensor:
    """Node ranks drawn in proportion to (rank + c) ** (-1 / (exponent - 1))."""
    power = 1.0 / (kind.exponent - 1.0)
    mean = kind.num_edges / kind.num_nodes
    # The largest degree over the mean fixes how flat the head is.
    head = max(
        1.0, n * (mean * (1 - min(power, 0.99)) / kind.max_degree) ** (1 / power)
    )
    uniform = torch.rand(
        num, generator=generator, device=generator.device, dtype=torch.float64
    )
    if abs(power - 1.0) < 1e-6:
        rank = head * ((n + head) / head) ** uniform - head
    else:
        low, high = head ** (1 - power), (n + head) ** (1 - power)
        rank = (low + uniform * (high - low)) ** (1 / (1 - power)) - head
    return rank.long().clamp(0, n - 1)


def _scramble(node: torch.Tensor, n: int) -> torch.Tensor:
    """A fixed permutation of 0 to n - 1: numbers without meaning."""
    step = int(n * 0.6180339887) | 1
    while math.gcd(step, n) != 1:
        step += 2
    return node * step % n
