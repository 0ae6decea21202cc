"""Graphs and loops that scripts for DGL are compared with."""

from typing import Any

import torch
from torch import Tensor

import hector.message.dgl as dgl


def same(found: Tensor, wanted: Tensor, *inputs: Tensor) -> None:
    """Values and gradients are equal."""
    torch.testing.assert_close(found, wanted)
    seed = torch.randn_like(wanted)
    for mine, other in zip(
        *(
            torch.autograd.grad(t, inputs, seed, retain_graph=True)
            for t in (found, wanted)
        ),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def near(src: Tensor, dst: Tensor, num: int, rows: Tensor, how: str) -> Tensor:
    """Messages `rows` reduced at each destination, one by one; zeros without any."""
    found = []
    for n in range(num):
        mine = rows[dst == n]
        if not len(mine):
            found.append(rows.sum(0) * 0)
        else:
            found.append(getattr(mine, {"max": "amax", "min": "amin"}.get(how, how))(0))
    return torch.stack(found)


def some_graph(num: int = 9, edges: int = 24) -> dgl.Graph:
    """The last two nodes have no edges."""
    return dgl.graph(tuple(torch.randint(num - 2, (2, edges))), num_nodes=num)


SIZES = {"user": 6, "game": 5, "shop": 3}
KINDS = [
    ("user", "follows", "user"),
    ("user", "plays", "game"),
    ("shop", "sells", "game"),
    ("game", "likes", "game"),
    ("game", "back", "user"),
]


def market(edges: int = 14) -> dgl.HeteroGraph:
    ends = {
        k: tuple(torch.randint(SIZES[k[i]], (edges,)) for i in (0, 2)) for k in KINDS
    }
    ends[KINDS[2]] = (torch.empty(0).long(), torch.empty(0).long())
    return dgl.heterograph(ends, num_nodes_dict=SIZES)


def pairs(g: Any, etype: Any = None) -> list[tuple[int, ...]]:
    """Edges in order."""
    return sorted(zip(*(e.tolist() for e in g.edges(etype=etype)), strict=True))
