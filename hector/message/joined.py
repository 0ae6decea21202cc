"""Several types of a block's edges as one `Relation`: a layer's sums are one program.

Of a mini-batch the host decides the time. What layers of the same kind send along their
relations is put one after another, sent at once, and split again.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.indexing import offsets
from hector.message.direct import Passing
from hector.message.frame import MASK, Frame
from hector.message.functions import PureCall, ReduceFunction
from hector.message.relation import Relation
from hector.message.traced import FUSED


class Sent(NamedTuple):
    """What a layer has at both ends of its edges, and how it is sent."""

    along: Callable[..., Any]
    """Make a row a destination of (edges, rows of sources, rows of ends)."""
    facts: Hashable
    """What `along` depends on besides; None: it is of one relation alone."""
    sources: dict[str, Tensor]
    ends: dict[str, Tensor]

    def kind(self) -> Hashable:
        """Equal for what can be sent at once."""
        both = [*self.sources.items(), *self.ends.items()]
        shapes = [(n, t.dtype, t.device, t.shape[1:]) for n, t in both]
        return self.facts, *shapes


def may_join(r: Relation) -> bool:
    """Whether edges may be sent along with others. Those of other than sampled graphs
    are watched one by one: see [Note: changes after PyTorch]."""
    return r.sampled and MASK not in r.edata


ONE_BY_ONE = ("cpu",)
"""Types of devices that run functions of messages relation by relation: caches hold
the rows of one, and the host's time is little of a step."""


def sent_by(r: Relation, message: Any, reduce: Any, apply: Any = None) -> Sent | None:
    """Return what `update_all` of a pure function sends, None where it is to be called
    by itself. Where programs differ in their inputs' names alone, the first one's names
    are those of all."""
    if not (isinstance(message, PureCall) and isinstance(reduce, ReduceFunction)):
        return None
    if apply is not None or reduce.reducer not in FUSED or not may_join(r):
        return None
    if r.device.type in ONE_BY_ONE:
        return None
    found = r.sendable((message, reduce, None))
    if found is None:
        return None
    first, sources, ends = found
    if not first:
        parts = message, replace(reduce, out="out"), None
        first += Passing(lambda: parts), sources, ends
    given = {n: r.srcdata[own] for n, own in zip(first[1], sources, strict=True)}
    rows = {n: r.dstdata[own] for n, own in zip(first[2], ends, strict=True)}
    return Sent(first[0], first[0], given, rows)


def send_all(calls: Iterable[tuple[Any, Relation, Sent]]) -> dict[Any, Any]:
    """Return by name what arrives of (name, edges, what is sent); what is of one kind
    is sent at once."""
    groups: dict[Hashable, list[tuple[Any, Relation, Sent]]] = {}
    for name, r, sent in calls:
        kind = name if sent.facts is None else sent.kind()
        groups.setdefault(kind, []).append((name, r, sent))
    found: dict[Any, Any] = {}
    for group in groups.values():
        names, relations, parts = zip(*group, strict=True)
        found |= zip(names, send_along(relations, parts), strict=True)
    return found


def send_along(relations: Sequence[Relation], sent: Sequence[Sent]) -> Sequence[Any]:
    """Return a row a destination of each relation, for `sent` of one kind."""
    first = sent[0]
    if len(relations) == 1:
        return [first.along(relations[0], first.sources, first.ends)]
    for r, s in zip(relations, sent, strict=True):
        # In a row only their total is known.
        for frame, rows in ((r.srcdata, s.sources), (r.dstdata, s.ends)):
            for name, t in rows.items():
                if t.shape[:1] != (frame.num_rows,) or t.device != frame.device:
                    frame.check(name, t)
    # Relations with one source type and one layer's rows share them.
    numbers: dict[tuple[int, ...], int] = {}
    shared = tuple(
        numbers.setdefault(tuple(map(id, s.sources.values())), len(numbers))
        for s in sent
    )
    each = [shared.index(i) for i in range(len(numbers))]
    sources = {n: torch.cat([sent[i].sources[n] for i in each]) for n in first.sources}
    ends = {n: torch.cat([s.ends[n] for s in sent]) for n in first.ends}
    begin = list(accumulate([relations[i].srcdata.num_rows for i in each], initial=0))
    sizes = [r.dstdata.num_rows for r in relations]
    targets = list(accumulate(sizes, initial=0))
    whole = edges_in_a_row(
        relations,
        (tuple([(begin[i], 1) for i in shared]), begin[-1]),
        (tuple([(i, 1) for i in targets[:-1]]), targets[-1]),
    )
    found: Sequence[Any] = first.along(whole, sources, ends).split(sizes)
    return found


def as_features(
    call: Callable[..., Any],
) -> Callable[[Relation, dict[str, Tensor], dict[str, Tensor]], Any]:
    """Return a `Sent.along` that calls a function of edges which have the rows as
    features."""

    def along(r: Relation, sources: dict[str, Tensor], ends: dict[str, Tensor]) -> Any:
        with r.local_scope():
            r.srcdata.update(sources)
            r.dstdata.update(ends)
            return call(r)

    return along


Places = tuple[tuple[tuple[int, int], ...], int]
"""Of the rows of one end of several relations: of each the place of row 0 and from one
row to the next, and how many all are."""


def edges_in_a_row(
    relations: Sequence[Relation], sources: Places, ends: Places
) -> Relation:
    """Return the edges of all relations between rows at these places, made once for
    edges as they are."""
    edges = [r.now() for r in relations]
    key = (edges_in_a_row, sources, ends, *edges[1:])
    found: Relation = edges[0].kept(key, lambda: _joined(relations, sources, ends))
    return found


def _joined(relations: Sequence[Relation], sources: Places, ends: Places) -> Relation:
    edges, device = [r.now() for r in relations], relations[0].device
    counts = [r.num_edges() for r in relations]
    owner = torch.arange(len(counts), device=device).repeat_interleave(
        offsets(counts, device).diff(), output_size=sum(counts)
    )
    begins = [
        (*p, r.num_src_nodes()) for p, r in zip(sources[0], relations, strict=True)
    ]
    tos = [(*p, r.num_dst_nodes()) for p, r in zip(ends[0], relations, strict=True)]
    made = (
        _moved([e.src for e in edges], owner, begins),
        _moved([e.dst for e in edges], owner, tos),
    )
    frames = Frame(sources[1], device, "node"), Frame(ends[1], device, "node")
    return Relation(made, frames, sampled=True, programs=relations[0].programs)


def _moved(
    ids: list[Tensor], owner: Tensor, rows: list[tuple[int, int, int]]
) -> Tensor:
    """Return ids among all rows; those out of their own relation's are -1, which is
    out of range for all."""
    found = torch.cat(ids)
    first, step, size = (
        offsets(part, owner.device).diff()[owner] for part in zip(*rows, strict=True)
    )
    return torch.where((found >= 0) & (found < size), found * step + first, -1)


def edge_softmax(
    graph: Any, logits: Any, eids: Any = None, norm_by: str = "dst"
) -> Any:
    """Return `Relation.edge_softmax` of the edges of a graph with one type.

    Of a dict of scores by edge type a dict: the softmax is over all edges into a node,
    or out of it, of whatever type.

    Raises:
        ValueError: next to a dict: `eids`, a `Relation`, a type that is named twice, or
            scores of several dtypes or row shapes whose edges share a type of nodes.
    """
    if not isinstance(logits, Mapping):
        relation = graph if isinstance(graph, Relation) else graph[None]
        return relation.edge_softmax(logits, eids, norm_by)
    if isinstance(graph, Relation):
        raise ValueError(
            "expected a tensor of scores of a Relation's edges, got a dict; pass the "
            "graph, or one type's scores"
        )
    if eids is not None:
        raise ValueError("expected no eids next to scores by edge type")
    place = {"dst": 2, "src": 0}.get(norm_by)
    if place is None:
        raise ValueError(f"expected norm_by 'dst' or 'src', got {norm_by!r}")
    groups: dict[str, list[Any]] = {}
    scores: dict[Any, Tensor] = {}
    for name, score in logits.items():
        kind = graph.to_canonical_etype(name)
        if kind in scores:
            raise ValueError(f"expected one score tensor for {kind}, it is named twice")
        groups.setdefault(kind[place], []).append(kind)
        scores[kind] = score
    found: dict[Any, Tensor] = {}
    for end, kinds in groups.items():
        relations = [graph[kind] for kind in kinds]
        sizes = [r.num_edges() for r in relations]
        for r, kind in zip(relations, kinds, strict=True):
            r.edata.check(f"scores of {kind}", scores[kind])
        given = {(scores[k].dtype, tuple(scores[k].shape[1:])) for k in kinds}
        if len(given) > 1:
            way = "into" if place else "out of"
            raise ValueError(
                f"expected scores of one dtype and row shape {way} {end!r}, got "
                f"{sorted(map(str, given))}"
            )
        edges = [r.now() for r in relations]
        key = (ends_of_all, place, *edges[1:])
        whole = edges[0].kept(key, lambda rs=relations: ends_of_all(rs, place))
        rows = torch.cat([scores[kind] for kind in kinds])
        parts = whole.edge_softmax(rows).split(sizes)
        found.update(zip(kinds, parts, strict=True))
    return {k: found[graph.to_canonical_etype(k)] for k in logits}


def ends_of_all(relations: Sequence[Relation], place: int) -> Relation:
    """Return the edges of relations that share a type of nodes at one end, 2: as
    destinations of all; their other ends are of no use."""
    first = relations[0]
    count = first.num_dst_nodes() if place else first.num_src_nodes()
    ends = torch.cat([r.now().dst if place else r.now().src for r in relations])
    nodes = Frame(count, first.device, "node")
    return Relation(
        (torch.zeros_like(ends), ends),
        (Frame(1, first.device, "node"), nodes),
        sampled=any(r.sampled for r in relations),
        programs=first.programs,
    )
