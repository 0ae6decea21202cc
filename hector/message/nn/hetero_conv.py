"""Layers by relation, with DGL's arguments."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hector.message.hetero import HeteroGraph
from hector.message.joined import may_join, send_all
from hector.message.nn.added import Call, attended, sum_of_layers
from hector.message.nn.convs import GATConv, GraphConv, SAGEConv
from hector.message.typed import CROSS
from hector.precision import plainly_called
from hector.tracing import untraced


class HeteroGraphConv(nn.Module):
    """A layer for each relation, by its name or (source, relation, destination);
    results for one type of nodes are joined by `aggregate`: sum, mean, max, min, stack,
    or a function of (list, type). Layers take nodes without edges, as along one
    relation they are common."""

    def __init__(
        self,
        mods: Mapping[str, nn.Module],
        aggregate: str | Callable[[list[Tensor], str], Tensor] = "sum",
    ) -> None:
        super().__init__()
        if not callable(aggregate) and aggregate not in CROSS:
            raise ValueError(
                f"expected aggregate of {sorted(CROSS)} or a function, got "
                f"{aggregate!r}"
            )
        self.mods = nn.ModuleDict({str(k): m for k, m in mods.items()})
        for module in self.mods.values():
            allow = getattr(module, "set_allow_zero_in_degree", None)
            if allow is not None:
                allow(True)
        self.aggregate = aggregate

    @untraced
    def forward(
        self,
        g: HeteroGraph,
        inputs: Any,
        mod_args: Mapping[str, tuple[Any, ...]] | None = None,
        mod_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> dict[str, Tensor]:
        """Return rows by destination type for rows by type, or for a pair of them.
        Relations without rows are left out; those without edges are not: their layer
        may have a row of the node's own.

        Raises ValueError for a relation without a layer.
        """
        if isinstance(inputs, tuple):
            sources, ends = inputs
        else:
            sources = ends = inputs
            if g.is_block:
                ends = {n: x[: g.num_dst_nodes(n)] for n, x in inputs.items()}
        made: dict[Any, Tensor] = {}
        ready: dict[str, list[Call]] = {}
        for kind in g.canonical_etypes:
            start, name, end = kind
            if start not in sources or end not in ends:
                continue
            layer: Any = self._layer(kind)
            r, feat = g[kind], (sources[start], ends[end])
            more = (mod_args or {}).get(name, ())
            named = (mod_kwargs or {}).get(name, {})
            alone = more or named or type(layer) not in (GraphConv, SAGEConv, GATConv)
            if alone or not (may_join(r) and plainly_called(layer)):
                made[kind] = layer(r, feat, *more, **named)
                continue
            drop = layer._modules.get("feat_drop")
            if drop is not None and drop.p:
                feat = layer.enters(feat)
            ready.setdefault(end, []).append((kind, layer, r, feat))
        near = _arrived([c for calls in ready.values() for c in calls])
        sums: dict[str, Tensor] = {}
        senders = Counter([end for _, _, end in g.canonical_etypes])
        for end, calls in ready.items():
            whole = self._added(calls, [near[c[0]] for c in calls], senders[end])
            if whole is not None:
                sums[end] = whole
            else:
                made |= {k: layer.makes(r, x, near[k]) for k, layer, r, x in calls}
        return self._joined(g, made, sums)

    def _added(
        self, calls: list[Call], near: list[Tensor], count: int
    ) -> Tensor | None:
        """Return the sum, or mean, for a type of destinations if these layers are all
        `count` that send to it; None where they are to make their results one by
        one."""
        if self.aggregate not in ("sum", "mean") or not 1 < len(calls) == count:
            return None
        own, dtype = calls[0][3][1], near[0].dtype
        for (_, _, _, feat), rows in zip(calls, near, strict=True):
            if feat[1] is not own or rows.dtype is not dtype:
                return None
        out = sum_of_layers([layer for _, layer, _, _ in calls], own, near)
        if out is None or self.aggregate == "sum":
            return out
        return out / len(calls)

    def _layer(self, kind: tuple[str, str, str]) -> nn.Module:
        known = self.mods._modules
        for name in (str(kind), kind[1]):
            found = known.get(name)
            if found is not None:
                return found
        raise ValueError(
            f"expected a layer for {kind}, there are {list(self.mods)}; give one, or "
            "g.edge_type_subgraph of the others"
        )

    def _joined(
        self, g: HeteroGraph, made: dict[Any, Tensor], sums: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return rows by type of destinations, of those by relation and of sums that
        are there already."""
        parts: dict[str, list[Tensor]] = {}
        for kind in g.canonical_etypes:
            if kind in made:
                parts.setdefault(kind[2], []).append(made[kind])
            elif kind[2] in sums:
                parts[kind[2]] = []
        return {n: self._one(p, n) if p else sums[n] for n, p in parts.items()}

    def _one(self, parts: list[Tensor], ntype: str) -> Tensor:
        if callable(self.aggregate):
            return self.aggregate(parts, ntype)
        if len(parts) == 1 and self.aggregate != "stack":
            return parts[0]
        return CROSS[self.aggregate](torch.stack(parts))


def _arrived(calls: list[Call]) -> dict[Any, Tensor]:
    """Return what arrives along each relation."""
    heads = [c for c in calls if type(c[1]) is GATConv]
    found = (attended(heads) if heads else None) or {}
    left = [(k, r, layer.sends(r, x)) for k, layer, r, x in calls if k not in found]
    return found | send_all(left)
