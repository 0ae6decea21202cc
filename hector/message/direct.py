"""Message passing of a layer's own rows, which are no features.

[Note: found by shapes] Of a small graph the host decides the time, and most of it goes
into names: features are set, read, checked and traced anew in every call. A layer knows
what it sends. So a `Passing` looks for the program of its functions once for edges, as
they are, and for rows of one dtype, shape and device; the next such call only runs it.
What tensors hold is no part of what a program is found by.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.message.frame import MASK
from hector.message.functions import PureCall, ReduceFunction, copy_u
from hector.message.relation import Apply, Message, Relation, facts_of
from hector.message.sums import sum_rows, way_of
from hector.message.traced import TRACE_ERRORS
from hector.runtime.ahead import arch, target_now
from hector.runtime.executable import Executable

Parts = tuple[Message, ReduceFunction, Apply | None]
"""Of `update_all`: built-in functions and pure ones."""
NO_ROWS: Mapping[str, Tensor] = {}


class _Ready(NamedTuple):
    """The program of a call, and how its inputs come."""

    executable: Executable
    made: tuple[Tensor, ...]
    """Of the edges alone."""
    pick: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    """The program's inputs, of the call's tensors and of `made`."""
    changes: tuple[tuple[int, Callable[[Tensor], Tensor]], ...]
    """(input, what is made of it first)."""
    short: int | None
    """Rows of the result, where the program makes more."""


class Passing:
    """One call of `update_all` by a layer. Its functions are pure, and its result is
    the feature "out"."""

    def __init__(
        self,
        parts: Callable[..., Parts],
        made: Mapping[str, Callable[[Any], Tensor]] | None = None,
    ) -> None:
        """`parts`: makes the functions of the tensors that they read; `made`: rows of
        destinations that follow from the edges alone, as in `Relation.derived`."""
        self._parts, self._made = parts, dict(made or {})

    def __call__(
        self,
        graph: Any,
        sources: Mapping[str, Tensor],
        ends: Mapping[str, Tensor] = NO_ROWS,
        *tensors: Tensor,
    ) -> Tensor:
        """Return a row a destination for rows of both ends, which have the same names
        in the same order in every call, and for the tensors of `parts`. `graph`: a
        relation, or a graph with one type of edges."""
        r = graph if isinstance(graph, Relation) else graph[None]
        given = (*sources.values(), *ends.values(), *tensors)
        facts = map(facts_of, given)
        known = r.now().ready
        ahead = None if target_now() is None else arch()
        key = (self, torch.is_grad_enabled(), ahead, *facts)
        ready: Any = known.get(key)
        if ready is None or MASK in r.edata:
            first = self._first(r, sources, ends, tensors)
            if isinstance(first, Tensor):
                return first
            ready = r.now().keep_ready(key, first)
        inputs: Any = ready.pick((*given, *ready.made))
        if ready.changes:
            inputs = list(inputs)
            for i, change in ready.changes:
                inputs[i] = change(inputs[i])
        r.counts["compiled"] += 1
        out: Tensor = ready.executable(inputs)[0]
        return out if ready.short is None else out.narrow(0, 0, ready.short)

    def _first(
        self,
        r: Relation,
        sources: Mapping[str, Tensor],
        ends: Mapping[str, Tensor],
        tensors: tuple[Tensor, ...],
    ) -> "_Ready | Tensor":
        """Return the program of a call, or the result of one without: on masked edges,
        or with messages in memory."""
        parts = self._parts(*tensors)
        made = {name: r.derived(make) for name, make in self._made.items()}
        with r.local_scope():
            r.srcdata.update(sources)
            r.dstdata.update({**ends, **made})
            if MASK not in r.edata:
                ready = self._ready(r, parts, (sources, ends, made), tensors)
                if ready is not None:
                    return ready
            r.update_all(*parts)
            return r.dstdata["out"]

    @staticmethod
    def _ready(
        r: Relation,
        parts: Parts,
        rows: tuple[Mapping[str, Tensor], ...],
        tensors: tuple[Tensor, ...],
    ) -> _Ready | None:
        """Return None where messages are to be in memory, or where two of the tensors
        of functions are one: a trace knows them by identity."""
        if len({id(t) for t in tensors}) < len(tensors):
            return None
        try:
            found, inputs = r.program(parts)
        except TRACE_ERRORS:
            return None
        # By name, as rows of two names may be one tensor in this call alone.
        sources, ends, made = rows
        order = [*sources.values(), *ends.values(), *tensors, *made.values()]
        firsts = len(sources), len(order) - len(made)
        by_source = {name: i for i, name in enumerate(sources)}
        by_end = {name: i for i, name in enumerate(ends, firsts[0])}
        by_end |= {name: i for i, name in enumerate(made, firsts[1])}
        captured = {id(t): i for i, t in enumerate(tensors, firsts[0] + len(ends))}
        values = [v for p in parts if isinstance(p, PureCall) for v in p.values]
        read = [v for v in values if isinstance(v, Tensor)]
        places: list[int] = []
        changes: list[tuple[int, Callable[[Tensor], Tensor]]] = []
        for i, (kind, name) in enumerate(found.inputs):
            if kind == "t":
                place, dropped = found.captured[name]
                at = captured[id(read[place])]
                if dropped:
                    changes.append((i, _dropping(dropped)))
            else:
                sides = (by_source, by_end) if kind == "s" else (by_end, by_source)
                at = sides[0][name] if name in sides[0] else sides[1][name]
                more = inputs[i].shape[0] - order[at].shape[0]
                if more:
                    changes.append((i, _padding(more)))
            places.append(at)
        executable = found.compiled.executable(r.structure, inputs)
        count = r.num_dst_nodes()
        whole = executable.results[0][1][0] == count
        return _Ready(
            executable,
            tuple(made.values()),
            itemgetter(*places) if len(places) > 1 else _only(*places),
            tuple(changes),
            None if whole else count,
        )


def _only(place: int) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    return lambda tensors: (tensors[place],)


def _dropping(axes: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.view(t.shape[axes:])


def _padding(more: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.cat((t, t.new_zeros(more, *t.shape[1:])))


@lru_cache(maxsize=256)
def _reduced(reducer: Callable[[str, str], ReduceFunction]) -> Passing:
    return Passing(lambda: (copy_u("h", "m"), reducer("m", "out"), None))


def neighbours(
    graph: Any, rows: Tensor, reducer: Callable[[str, str], ReduceFunction]
) -> Tensor:
    """Return the rows of neighbours, reduced by a function of
    `hector.message.functions`; no feature is set."""
    if rows.is_cpu:
        way = way_of(reducer("m", "out"), rows)
        found = None if way is None else sum_rows(graph, rows, way)
        if found is not None:
            return found
    return _reduced(reducer)(graph, {"h": rows})
