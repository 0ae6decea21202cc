"""HGT as a drop-in replacement of PyG's `HGTConv`."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hector.graph import HeteroGraph
from hector.indexing import endpoints, is_adjacency
from hector.initialization import kaiming_uniform
from hector.nn.common import CompiledConv, empty
from hector.nn.layers import hgt, hgt_attention
from hector.precision import entering, is_altered, wide
from hector.tracing import untraced

EdgeType = tuple[str, str, str]


class _TypedLinears(nn.Module):
    """One `nn.Linear` a node type, named as PyG's `HeteroDictLinear` names them."""

    def __init__(self, in_channels: Mapping[str, int], out_channels: int) -> None:
        super().__init__()
        self._outs = out_channels
        self.lins = nn.ModuleDict(
            {
                name: nn.LazyLinear(out_channels)
                if size == -1
                else nn.Linear(size, out_channels)
                for name, size in in_channels.items()
            }
        )

    def learn_widths(self, x: Mapping[str, Tensor]) -> None:
        """Make the parameters of types whose width was left open."""
        for name, rows in x.items():
            lin = self.lins[name]
            if isinstance(lin, nn.LazyLinear):
                with torch.no_grad():
                    # Called, it becomes an nn.Linear.
                    lin(rows[:0])

    def stacked(
        self, names: list[str], width: int, parts: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Weights [types, width, out] (rows of narrower types are 0) and biases
        [types, out] of each of `parts` equal parts of the outputs.

        Rows are joined, not stacked: what each parameter's gradient gets back then is
        a run of rows that needs no copy. Transposing is one copy for all parts.
        """
        for name in names:
            lin = self.lins[name]
            # Hooks of one that no call had rows of are what makes its parameters.
            lazy = isinstance(lin, nn.LazyLinear)
            own = getattr(type(lin), "forward", None) is not nn.Linear.forward
            if not lazy and (own or is_altered(lin)):
                raise ValueError(
                    f"expected an nn.Linear without hooks or a forward of its own for "
                    f"{name!r}, as its weight is read and it is not called, got "
                    f"{type(lin).__name__}"
                )
        weights = [self._of(name, "weight", width) for name in names]
        biases = [self._of(name, "bias") for name in names]
        # Padding copies: on small graphs that is a visible part of a call.
        padded = [
            w if w.shape[1] == width else functional.pad(w, (0, width - w.shape[1]))
            for w in weights
        ]
        joined = torch.cat(padded).view(len(names), parts, -1, width)
        shifts = torch.cat(biases).view(len(names), parts, -1)
        by_part = joined.permute(1, 0, 3, 2).contiguous()
        return by_part.unbind(), shifts.transpose(0, 1).contiguous().unbind()

    def _of(self, name: str, what: str, *width: int) -> Tensor:
        """A parameter; zeros for a type of open width that no call had rows of."""
        lin = self.lins[name]
        found: Tensor = getattr(lin, what)
        if isinstance(found, nn.UninitializedParameter):
            return torch.zeros(
                self._outs, *width, dtype=found.dtype, device=found.device
            )
        return found


class _RelationWeights(nn.Module):
    """PyG's `HeteroLinear` without bias: [heads * relations, width, width]."""

    def __init__(self, heads: int, relations: int, width: int) -> None:
        super().__init__()
        self.heads, self.relations = heads, relations
        self.weight = empty(heads * relations, width, width)

    def by_relation(self) -> Tensor:
        """[relations, heads, width, width]."""
        w = self.weight
        parts = w.view(self.heads, self.relations, *w.shape[1:])
        return parts.transpose(0, 1)


class HGTConv(CompiledConv):
    """Heterogeneous graph transformer (arXiv 2003.01332).

    Parameters, options and outputs are PyG's: its `state_dict` loads. Called as
    `conv(x_dict, edge_index_dict)` for a dict of rows by node type, or as
    `conv(x, graph)` with the rows of all types joined, for a graph whose types are
    those of `metadata` in order. Not taken of PyG: `flow`, hooks, `decomposed_layers`,
    `explain_message`.
    """

    def __init__(
        self,
        in_channels: int | dict[str, int],
        out_channels: int,
        metadata: tuple[list[str], list[EdgeType]],
        heads: int = 1,
    ) -> None:
        super().__init__()
        if out_channels % heads:
            raise ValueError(
                f"expected out_channels {out_channels} divisible by heads {heads}"
            )
        self.node_types, self.edge_types = list(metadata[0]), list(metadata[1])
        if isinstance(in_channels, int):
            in_channels = dict.fromkeys(self.node_types, in_channels)
        if any(size < 1 and size != -1 for size in in_channels.values()):
            raise ValueError(
                f"expected in_channels of at least 1, or -1, got {in_channels}"
            )
        self.in_channels, self.out_channels, self.heads = (
            in_channels,
            out_channels,
            heads,
        )
        self.dst_node_types = {key[-1] for key in self.edge_types}
        self.kqv_lin = _TypedLinears(in_channels, 3 * out_channels)
        self.out_lin = _TypedLinears(
            dict.fromkeys(self.node_types, out_channels), out_channels
        )
        width, relations = out_channels // heads, len(self.edge_types)
        self.k_rel = _RelationWeights(heads, relations, width)
        self.v_rel = _RelationWeights(heads, relations, width)
        self.skip = nn.ParameterDict({n: empty(1) for n in self.node_types})
        self._relation_keys = ["__".join(t) for t in self.edge_types]
        self.p_rel = nn.ParameterDict(
            {key: empty(1, heads) for key in self._relation_keys}
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for lins in (self.kqv_lin, self.out_lin):
            for lin in lins.lins.values():
                if isinstance(lin, nn.Linear):
                    lin.reset_parameters()
        for rel in (self.k_rel, self.v_rel):
            kaiming_uniform(rel.weight, rel.weight.shape[1])
        for group in (self.skip, self.p_rel):
            for p in group.values():
                nn.init.ones_(p)

    @untraced
    def forward(
        self,
        x: Tensor | dict[str, Tensor],
        edges: HeteroGraph | dict[EdgeType, Tensor],
        return_attention_weights: bool = False,
    ) -> Any:
        """Rows of all nodes, or a dict of rows by node type for dict arguments.

        With `return_attention_weights`, also attention [edges, heads], or a dict of it
        by edge type.

        Raises:
            ValueError: arguments of two kinds, or rows of another width than
                `in_channels` has.
        """
        if isinstance(x, Tensor):
            if not isinstance(edges, HeteroGraph):
                raise ValueError("expected a HeteroGraph beside joined rows")
            self._learn_widths(dict.fromkeys(self.node_types, x))
            self._check_width("x", x, max(self.in_channels.values()))
            x, dtype = entering(x, self.k_rel)
            mask = self.mask_of_edges()
            out, att = self._run(x, edges, mask, return_attention_weights)
            out = out.to(dtype)
            return (out, att.to(dtype)) if return_attention_weights else out
        if isinstance(edges, HeteroGraph):
            raise ValueError("expected edge_index_dict beside x_dict")
        self._learn_widths(x)
        for name in self.node_types:
            if name in x:
                self._check_width(f"x[{name!r}]", x[name], self.in_channels[name])
        graph = self._graph(x, edges)
        joined, dtype = entering(self._join(x), self.k_rel)
        present = [t for t in self.edge_types if t in edges]
        mask = self.mask_of_edges()
        if mask is not None:
            mask = torch.cat([mask[t] for t in present])
        out, att = self._run(joined, graph, mask, return_attention_weights)
        sizes = [x[n].shape[0] if n in x else 0 for n in self.node_types]
        rows = dict(zip(self.node_types, out.to(dtype).split(sizes), strict=True))
        found = {
            n: rows[n] for n in self.node_types if n in self.dst_node_types and n in x
        }
        if not return_attention_weights:
            return found
        counts = [endpoints(str(t), edges[t])[0].numel() for t in present]
        return found, dict(zip(present, att.to(dtype).split(counts), strict=True))

    def _learn_widths(self, x: Mapping[str, Tensor]) -> None:
        """Of types for which `in_channels` is -1, from the first rows."""
        if -1 in self.in_channels.values():
            self.kqv_lin.learn_widths(x)
            known = {n: t.shape[1] for n, t in x.items() if self.in_channels[n] == -1}
            self.in_channels = {**self.in_channels, **known}

    @staticmethod
    def _check_width(name: str, rows: Tensor, width: int) -> None:
        if rows.dim() != 2 or rows.shape[1] != width:
            raise ValueError(
                f"expected {name} of shape [nodes, {width}], got {list(rows.shape)}"
            )

    @property
    def _uniform(self) -> bool:
        """Whether each type's input is as wide as the output (its residual then is
        part of the compiled layer)."""
        return set(self.in_channels.values()) == {self.out_channels}

    def _run(
        self, x: Tensor, graph: HeteroGraph, mask: Tensor | None, attention: bool
    ) -> tuple[Tensor, Tensor]:
        """Rows of all nodes, and attention if it is asked for."""
        width = x.shape[1]
        scale = 1.0 / math.sqrt(self.out_channels // self.heads)
        layer = self.compiled(hgt)
        p = self._stacked(width)
        values = {"feature": x, **{f"p.{k}": v for k, v in vars(p).items()}}
        numbers = (self.heads, scale, self._uniform)
        att = x
        if mask is None and not attention:
            out: Tensor = self.run(
                layer,
                graph,
                values,
                numbers,
                lambda: layer.prepare(graph, x, p, *numbers),
            )
        else:
            out, att = self.compiled(hgt_attention)(graph, x, mask, p, *numbers)
            att = att.flatten(1)
        return (out if self._uniform else self._skipped(graph, out, x)), att

    def _stacked(self, width: int) -> SimpleNamespace:
        """Parameters joined by type, in every call: not all writes to a parameter leave
        a trace by which a kept copy could be known to be old (fused optimizers do
        not)."""
        names = self.node_types
        (k, q, v), (bk, bq, bv) = self.kqv_lin.stacked(names, width, parts=3)
        (out,), (b_out,) = self.out_lin.stacked(names, self.out_channels, parts=1)
        p = SimpleNamespace(k=k, q=q, v=v, bk=bk, bq=bq, bv=bv, out=out, b_out=b_out)
        p.k_rel, p.v_rel = self.k_rel.by_relation(), self.v_rel.by_relation()
        # Where the module keeps them: finding each by name, or all through the module's
        # own iterator, takes longer than to join them.
        priors = cast("dict[str, Tensor]", self.p_rel._parameters)
        p.p_rel = torch.cat([priors[key] for key in self._relation_keys])
        if self._uniform:
            p.skip = torch.cat([self.skip[n] for n in names])
        return p

    def _skipped(self, graph: HeteroGraph, out: Tensor, x: Tensor) -> Tensor:
        """`out` with the gated skip of the types whose input is as wide."""
        as_wide = [self.in_channels[n] == self.out_channels for n in self.node_types]
        if not any(as_wide):
            return out
        gate = wide(torch.cat([self.skip[n] for n in self.node_types])).sigmoid()
        gate = gate[graph.node_type, None].to(out.dtype)
        # Filled in on the device: nothing is copied from the host.
        there = torch.zeros(graph.num_node_types, dtype=torch.bool, device=out.device)
        for i, same in enumerate(as_wide):
            there[i : i + 1].fill_(same)
        mixed = gate * out + (1 - gate) * x[:, : self.out_channels]
        return torch.where(there[graph.node_type, None], mixed, out)

    def _join(self, x: dict[str, Tensor]) -> Tensor:
        width = max(self.in_channels.values())
        return torch.cat(
            [
                functional.pad(x[n], (0, width - x[n].shape[1]))
                for n in self.node_types
                if n in x
            ]
        )

    def _graph(
        self, x: dict[str, Tensor], edges: dict[EdgeType, Tensor]
    ) -> HeteroGraph:
        sizes = {n: x[n].shape[0] for n in self.node_types if n in x}
        present = tuple(t for t in self.edge_types if t in edges)
        metadata = (tuple(self.node_types), tuple(self.edge_types))
        given = {t: edges[t] for t in present}
        facts = (tuple(sizes.items()), present)

        def make(sampled: bool) -> HeteroGraph:
            return HeteroGraph.from_dicts(
                sizes, given, metadata, sampled=sampled, device=device
            )

        device = next(iter(x.values())).device
        if not given or any(is_adjacency(e) for e in given.values()):
            # Of a sparse tensor, PyTorch tells no version.
            return make(False)
        return self._graphs.get(list(given.values()), facts, make)

    def extra_repr(self) -> str:
        return f"-1, {self.out_channels}, heads={self.heads}"
