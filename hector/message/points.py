"""Graphs of near points, with DGL's names."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hector.message.graph import Graph
from hector.tracing import untraced


@untraced
def knn_graph(
    x: Tensor,
    k: int,
    algorithm: str = "bruteforce-blas",
    dist: str = "euclidean",
    exclude_self: bool = False,
) -> Graph:
    """Return the graph of an edge from each of the `k` points nearest to a point, with
    itself among them unless `exclude_self`. `x` [points, width], or [graphs, points,
    width] for a batch. `dist`: euclidean or cosine. All distances are in memory,
    whatever `algorithm` says."""
    sizes = [x.shape[-2]] * (x.shape[0] if x.dim() == 3 else 1)
    made = segmented_knn_graph(
        x.flatten(0, -2), k, sizes, algorithm, dist, exclude_self
    )
    if x.dim() == 2:
        made.set_sizes(None)
    return made


@untraced
def segmented_knn_graph(
    x: Tensor,
    k: int,
    segs: Sequence[int],
    algorithm: str = "bruteforce-blas",
    dist: str = "euclidean",
    exclude_self: bool = False,
) -> Graph:
    """Return the batch of `knn_graph` of each set of `segs` points in a row; where a
    set has fewer than `k`, all have as many neighbours as the smallest."""
    sizes = [int(s) for s in segs]
    if sum(sizes) != x.shape[0] or min(sizes, default=0) < 1 or k < 1:
        raise ValueError(
            f"expected k of at least 1, and points {x.shape[0]} in sets of at least "
            f"one, got k={k} and {sizes}"
        )
    if dist not in ("euclidean", "cosine"):
        raise ValueError(f"expected dist 'euclidean' or 'cosine', got {dist!r}")
    k = min(k, min(sizes) - exclude_self)
    src, first = [], 0
    for part in x.detach().split(sizes):
        if dist == "cosine":
            part = part / (part.norm(dim=1, keepdim=True) + 1e-5)
        far = torch.cdist(part, part)
        if exclude_self:
            far.fill_diagonal_(torch.inf)
        near = far.topk(k, 1, largest=False).indices
        src.append((near + first).flatten())
        first += part.shape[0]
    dst = torch.arange(first, device=x.device).repeat_interleave(k)
    made = Graph(torch.cat(src), dst, num_nodes=first)
    made.set_batch_num_nodes(sizes)
    made.set_batch_num_edges([k * s for s in sizes])
    return made


@untraced
def radius_graph(
    x: Tensor,
    r: float,
    p: float = 2,
    self_loop: bool = False,
    compute_mode: str = "donot_use_mm_for_euclid_dist",
    get_distances: bool = False,
) -> Any:
    """Return the graph of edges between points [points, width] at most `r` apart; with
    `get_distances` also the distances [edges, 1], with gradients."""
    if r <= 0:
        raise ValueError(f"expected r above 0, got {r}")
    far = torch.cdist(x, x, p=p, compute_mode=compute_mode)
    near = far <= r
    if not self_loop:
        near.fill_diagonal_(False)
    src, dst = near.nonzero(as_tuple=True)
    made = Graph(src, dst, num_nodes=x.shape[0])
    return (made, far[src, dst][:, None]) if get_distances else made
