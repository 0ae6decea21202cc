"""What follows from the edges of a `Graph`, as long as they stay as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hector.graph import HeteroGraph
from hector.graph_cache import state_of
from hector.indexing import check_range, integers
from hector.kept import kept, lasting
from hector.message.eager import Groups, levels_of
from hector.runtime.watch import Watch, watch

MAX_READY = 64
"""Calls that are kept next to the edges of a graph."""


class Edges:
    """Hold sources and destinations, and what was made of them.

    The tensors are the caller's. Once they are written to, another object is to be made
    of them: see [Note: unchanged tensors], and [Note: what is kept].
    """

    def __init__(
        self, given: tuple[Tensor, Tensor], num_src: int, num_dst: int, sampled: bool
    ) -> None:
        """Raise ValueError on non-integer or out-of-range ids; those of a `sampled`
        graph are checked where programs first run on it."""
        self._given, self.sampled = given, sampled
        self.num_src, self.num_dst = num_src, num_dst
        self._watch: Watch | None = None
        quiet = not sampled and all(t.dtype is torch.int64 for t in given)
        is_cpu = given[0].device.type == "cpu"
        if is_cpu or quiet:  # others wait for the device
            self._watch = watch(given)
        # Where values are compared, versions tell nothing more.
        self._states = None if is_cpu else tuple(map(state_of, given))
        self.src, self.dst = (
            lasting(integers(name, t))
            for name, t in zip(("src", "dst"), given, strict=True)
        )
        if not sampled:
            check_range("src", self.src, num_src, "num_nodes")
            check_range("dst", self.dst, num_dst, "num_nodes")
        self._kept: dict[Any, Any] = {}
        self.ready: dict[object, Any] = {}
        """See [Note: found by shapes] in message/direct.py."""

    def keep_ready(self, key: object, call: Any) -> Any:
        """Return a call, kept in `ready` with at most `MAX_READY`."""
        if len(self.ready) >= MAX_READY:
            self.ready.clear()
        self.ready[key] = call
        return call

    def unchanged(self) -> bool:
        """Whether the caller's tensors are as they were."""
        states = self._states
        if states is not None:
            src, dst = self._given
            if src.is_inference() or dst.is_inference():
                now: Any = tuple(map(state_of, self._given))
            else:  # the same, without two calls
                now = (
                    (src._version, src.data_ptr(), src.dtype, src.shape, src.stride()),
                    (dst._version, dst.data_ptr(), dst.dtype, dst.shape, dst.stride()),
                )
            if now != states:
                return False
        return self._watch is None or self._watch.unchanged(self._given)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` makes of the edges, made once."""
        return kept(self._kept, key, make)

    @property
    def num_rows(self) -> int:
        """Node rows of `structure`; see [Note: two kinds of rows] in
        message/relation.py."""
        return max(self.num_src, self.num_dst)

    @property
    def in_degrees(self) -> Tensor:
        """Int64 [nodes]."""
        return self._counted("in_degrees", self.dst, self.num_dst)

    @property
    def out_degrees(self) -> Tensor:
        """Int64 [nodes]."""
        return self._counted("out_degrees", self.src, self.num_src)

    def _counted(self, name: str, ends: Tensor, count: int) -> Tensor:
        found: Tensor = self.kept(name, lambda: torch.bincount(ends, minlength=count))
        return found

    @property
    def groups(self) -> Groups:
        """The edges of each destination in the caller's order."""
        found: Groups = self.kept("groups", lambda: Groups(self.dst, self.num_dst))
        return found

    @property
    def levels(self) -> tuple[Tensor, ...]:
        """Nodes by the longest path that leads to them."""
        found: tuple[Tensor, ...] = self.kept(
            "levels", lambda: tuple(levels_of(self.src, self.dst, self.num_dst))
        )
        return found

    @property
    def structure(self) -> HeteroGraph:
        """The `HeteroGraph` that compiled programs run on: edges sorted by
        destination."""
        found: HeteroGraph = self.kept("structure", self._structure)
        return found

    def _structure(self) -> HeteroGraph:
        made = HeteroGraph.from_pyg(
            torch.stack((self.src, self.dst)),
            torch.zeros_like(self.src),
            num_nodes=self.num_rows,
            num_relations=1,
            sampled=self.sampled,
        )
        if made.state.watch is None:
            made.state.watch = self._watch
        return made

    @property
    def order(self) -> Tensor | None:
        """Row i of the graph's order is the caller's row `order[i]`; None: the same."""
        return self._orders[0]

    @property
    def inverse(self) -> Tensor | None:
        """Row i of the caller's order is the graph's row `inverse[i]`."""
        return self._orders[1]

    @property
    def _orders(self) -> tuple[Tensor | None, Tensor | None]:
        found: tuple[Tensor | None, Tensor | None] = self.kept("orders", self._make)
        return found

    def _make(self) -> tuple[Tensor | None, Tensor | None]:
        order = self.structure.edge_order
        same = torch.arange(order.numel(), device=order.device)
        if not self.sampled and torch.equal(order, same):
            return None, None
        return order, torch.empty_like(order).index_copy_(0, order, same)
