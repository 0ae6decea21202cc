"""What random graph programs use again, and their message passing."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hector.message import Graph
from hector.message import functions as fn
from tests.hector.graphs.loops import REDUCERS, reduced, softmax

Call = Callable[["Objects", dict[str, Tensor]], Any]


def peek(frame: Any, name: str) -> Tensor:
    """A column in the caller's order; the frame keeps whichever it has."""
    made = getattr(frame, "_made", {}).get(name)
    found: Tensor = frame[name] if made is None else copy.copy(made).given()
    return found


@dataclass
class Objects:
    """What a program uses again."""

    convs: dict[str, nn.Module]
    ends: Tensor
    kinds: Tensor
    dicts: dict[Any, Tensor]
    graph: Graph
    indices: tuple[Tensor, Tensor]
    """Of the graph of messages."""

    def fresh(self, read: tuple[str, ...]) -> "Objects":
        """The same values in new objects, which know nothing; the layers `read`."""
        convs = {n: copy.deepcopy(c) for n, c in self.convs.items() if n in read}
        for name, conv in convs.items():
            if hasattr(conv, "compiled_layers"):
                conv.compiled_layers = self.convs[name].compiled_layers
        ends = self.ends.clone()
        indices = self.indices[0].clone(), self.indices[1].clone()
        graph = Graph(
            *indices,
            num_nodes=self.graph.num_nodes(),
            programs=self.graph.programs,
        )
        for mine, other in (
            (graph.ndata, self.graph.ndata),
            (graph.edata, self.graph.edata),
        ):
            for name in other:
                value = peek(other, name)
                mine[name] = value.detach().clone().requires_grad_(value.requires_grad)
        dicts = {k: v.clone() for k, v in self.dicts.items()}
        return Objects(convs, ends, self.kinds.clone(), dicts, graph, indices)


def ties(rows: Tensor) -> bool:
    """Whether a column of rows that have gradients has a number twice."""
    return rows.requires_grad and any(len(c.unique()) < len(c) for c in rows.unbind(1))


@dataclass
class Passing:
    """Messages along all edges (`all`, `edges`, `softmax`), into nodes `ids` (`pull`)
    or along edges `ids` (`some`)."""

    kind: str
    message: str
    how: str
    ids: Tensor

    def ours(self, o: Objects, _: dict[str, Tensor]) -> list[Tensor]:
        g, reduce = o.graph, getattr(fn, self.how)("m", "o")
        if self.kind == "edges":
            g.apply_edges(_OURS[self.message])
            g.update_all(fn.copy_e("m", "m"), reduce)
            return [g.ndata["o"], g.edata["m"]]
        if self.kind == "softmax":
            return [g.edge_softmax(g.edata["w"])]
        g.ndata["o"] = torch.zeros_like(g.ndata["h"], device="cpu")
        call = (_OURS[self.message], reduce)
        if self.kind == "all":
            g.update_all(*call)
        elif self.kind == "pull":
            g.pull(self.ids, *call)
        else:
            g.send_and_recv(self.ids, *call)
        return [g.ndata["o"]]

    def messages(self, o: Objects) -> tuple[Tensor, Tensor]:
        """Messages and their destinations."""
        (src, dst), h, w = o.indices, o.graph.ndata["h"], o.graph.edata["w"]
        e = o.graph.edata["s"] if self.message == "u_add_s" else w
        m = _LOOPS[self.message](h[src], h[dst], e)
        return (m[self.ids], dst[self.ids]) if self.kind == "some" else (m, dst)

    def loop(self, o: Objects, _: dict[str, Tensor]) -> list[Tensor]:
        dst, count = o.indices[1], o.graph.num_nodes()
        if self.kind == "softmax":
            return [softmax(o.graph.edata["w"], dst, count)]
        m, dst = self.messages(o)
        made = reduced(m, dst, count, REDUCERS[self.how])
        if self.kind == "pull":
            chosen = torch.zeros(count, 1, dtype=torch.float64)
            made = made * chosen.index_fill(0, self.ids, 1.0)
        return [made, m] if self.kind == "edges" else [made]

    def tied(self, o: Objects) -> bool:
        """Whether a median may be any of several equal messages, one of which gets the
        gradient: which one is nobody's promise."""
        if self.how != "median" or self.kind == "softmax":
            return False
        m, dst = self.messages(o)
        groups = (m[dst == node] for node in range(o.graph.num_nodes()))
        return any(map(ties, groups))


_OURS: dict[str, Any] = {
    "copy_u": fn.copy_u("h", "m"),
    "u_mul_e": fn.u_mul_e("h", "w", "m"),
    "u_add_v": fn.u_add_v("h", "h", "m"),
    "u_sub_e": fn.u_sub_e("h", "w", "m"),
    "u_add_s": fn.u_add_e("h", "s", "m"),
    "user": lambda e: {"m": torch.tanh(e.src["h"]) * e.data["w"] - e.dst["h"]},
}
_LOOPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "copy_u": lambda u, v, w: u,
    "u_mul_e": lambda u, v, w: u * w,
    "u_add_v": lambda u, v, w: u + v,
    "u_sub_e": lambda u, v, w: u - w,
    "u_add_s": lambda u, v, s: u + s,
    "user": lambda u, v, w: u.tanh() * w - v,
}
