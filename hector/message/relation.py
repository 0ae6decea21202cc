"""Edges of one type with the features of both ends, and messages along them.

DGL's names and semantics (Wang, chapter 4), on the compiler that relational layers use:
a message function, a reduce function and the function applied after them become one
program, whose messages lie in no memory unless a gradient needs them.

[Note: two kinds of rows] Sources and destinations may be of two types, or a block's two
sides. Programs then know two sets of node rows, `s:` and `n:`, under one count, the
larger one: kernels read a row by the end of an edge, so ids of both sides may overlap.
The side with fewer rows is padded, and results are cut to the destinations.
"""

from collections import Counter
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache, partial, reduce
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hector.frontend.values import Sym
from hector.graph import HeteroGraph
from hector.indexing import integers
from hector.ir.node import Op
from hector.ir.types import Domain
from hector.message.batches import EdgeBatch, FeatureView, NodeBatch
from hector.message.eager import (
    Bucket,
    checked,
    combine,
    reduce_builtin,
    reduce_user,
)
from hector.message.edges import Edges
from hector.message.frame import MASK, EdgeFrame, Frame, ids_of
from hector.message.functions import (
    MessageFunction,
    PureCall,
    ReduceFunction,
    Reducer,
    Side,
    copy_e,
)
from hector.message.programs import (
    SHARED,
    CompiledPass,
    Facts,
    Known,
    PassProgram,
    Programs,
)
from hector.message.sums import plain_sum
from hector.message.traced import (
    FUSED,
    TRACE_ERRORS,
    Rows,
    Trace,
    UntraceableError,
    is_float,
    message_rows,
    reduce_rows,
    softmax_rows,
)
from hector.message.views import RowsView, TypeView
from hector.precision import wide
from hector.runtime.ahead import arch, target_now
from hector.tracing import untraced

Message = MessageFunction | Callable[[EdgeBatch], Mapping[str, Any]]
Reduce = ReduceFunction | Callable[[NodeBatch], Mapping[str, Any]]
Apply = Callable[[NodeBatch], Mapping[str, Any]]

T = TypeVar("T")
TraceCall = Callable[[Trace], dict[str, Rows]]


class Relation:
    """Hold directed edges from `num_src` sources to `num_dst` destinations, and
    features: `srcdata`, `dstdata` and `edata` by name.

    Functions with names of DGL do what DGL's do; see `hector.message.functions` for the
    built-in ones. `srcdata` and `dstdata` are one frame where both ends are of a type.
    """

    def __init__(
        self,
        ends: tuple[Tensor, Tensor],
        frames: tuple[Frame, Frame],
        *,
        sampled: bool = False,
        programs: Programs | None = None,
        edata: EdgeFrame | None = None,
        kind: tuple[str, str, str] | None = None,
        is_block: bool = False,
    ) -> None:
        """Make edges from `ends[0][i]` to `ends[1][i]`; edge ids are positions. Tensors
        may be written to later: every call runs on what they hold.

        `frames`: of sources and of destinations. `sampled`: one of many similar graphs,
        see `HeteroGraph.sampled`. `kind`: (source type, relation, destination type) in
        a typed graph; `is_block`: of a block. Raises ValueError on non-integer, ragged
        or out-of-range input.
        """
        first, second = integers("src", ends[0]), integers("dst", ends[1])
        if first.shape != second.shape:
            raise ValueError(
                f"expected src and dst of one length, got {first.numel()} and "
                f"{second.numel()}"
            )
        self.srcdata, self.dstdata = frames
        self.kind, self.block = kind, is_block
        self.sampled = sampled
        self.programs = SHARED if programs is None else programs
        self._given = ends
        self._edges = self._new_edges()
        if edata is None:
            edata = EdgeFrame(ends[0].numel(), ends[0].device)
        self.edata = edata
        self.counts: Counter[str] = Counter()
        """How calls ran: "compiled", or why messages were in memory."""

    @property
    def is_block(self) -> bool:
        """Return whether the edges are of a block."""
        return self.block

    @property
    def canonical_etypes(self) -> list[tuple[str, str, str]]:
        """Return the type of the edges, whole, in a list."""
        return [] if self.kind is None else [self.kind]

    @property
    def etypes(self) -> list[str]:
        """Return the relation, in a list."""
        return [r for _, r, _ in self.canonical_etypes]

    @property
    def srctypes(self) -> list[str]:
        """Return the type of sources, in a list."""
        return [n for n, _, _ in self.canonical_etypes]

    @property
    def dsttypes(self) -> list[str]:
        """Return the type of destinations, in a list."""
        return [n for _, _, n in self.canonical_etypes]

    # The edges.

    def _new_edges(self) -> Edges:
        return Edges(
            self._given, self.num_src_nodes(), self.num_dst_nodes(), self.sampled
        )

    def now(self) -> Edges:
        """Return the edges as the caller's tensors have them."""
        if not self._edges.unchanged():
            self._edges = self._new_edges()
        return self._edges

    @property
    def _src(self) -> Tensor:
        return self.now().src

    @property
    def _dst(self) -> Tensor:
        return self.now().dst

    @property
    def device(self) -> torch.device:
        """Return where the edges lie."""
        return self._given[0].device

    @property
    def ndata(self) -> Frame:
        """Return the features of nodes.

        Raises ValueError where sources and destinations have two kinds of rows.
        """
        if self.two_sided:
            raise ValueError("expected srcdata or dstdata of two types, got ndata")
        return self.dstdata

    def num_src_nodes(self) -> int:
        """Return how many sources there are, those without edges among them."""
        return self.srcdata.num_rows

    def num_dst_nodes(self) -> int:
        """Return how many destinations there are."""
        return self.dstdata.num_rows

    def num_edges(self) -> int:
        """Return how many edges there are."""
        return self._given[0].numel()

    number_of_edges = num_edges

    @property
    def edges(self) -> TypeView:
        """Return `edges()`, sources and destinations, int64 [edges] each; `form` "eid":
        edge ids, "all": all three; `order` "srcdst": by source, then destination. And
        `edges[ids].data`, the rows of some."""
        return TypeView(
            lambda e: RowsView(self.edata, self.edge_numbers(e)), self._listed
        )

    @untraced
    def _listed(self, form: str = "uv", order: str = "eid", etype: Any = None) -> Any:
        src, dst, ids = self._src, self._dst, self._all_ids()
        if order not in ("eid", "srcdst"):
            raise ValueError(f"expected order 'eid' or 'srcdst', got {order!r}")
        if order == "srcdst":
            ids = torch.sort(dst, stable=True).indices
            ids = ids[torch.sort(src[ids], stable=True).indices]
            src, dst = src[ids], dst[ids]
        return formed(form, src, dst, ids)

    @untraced
    def in_edges(self, v: Any, form: str = "uv") -> Any:
        """Return the edges into the nodes `v`; `form` as in `edges`."""
        return self._edges_at(self._dst, "v", v, self.num_dst_nodes(), form)

    @untraced
    def out_edges(self, u: Any, form: str = "uv") -> Any:
        """Return the edges out of the nodes `u`; `form` as in `edges`."""
        return self._edges_at(self._src, "u", u, self.num_src_nodes(), form)

    def _edges_at(
        self, ends: Tensor, name: str, nodes: Any, limit: int, form: str
    ) -> Any:
        ids = self._at(ends, ids_of(name, nodes, limit, self.device), limit)
        return formed(form, self._src[ids], self._dst[ids], ids)

    @staticmethod
    def _at(ends: Tensor, nodes: Tensor, limit: int) -> Tensor:
        """Return the ids of the edges whose end is one of `nodes`."""
        mask = torch.zeros(limit, dtype=torch.bool, device=ends.device)
        return mask.index_fill(0, nodes, True)[ends].nonzero().flatten()

    @untraced
    def incoming(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of the edges into `nodes`, node by node, and the position of
        each one's node: int64 [edges]. Waits for the device to count them."""
        groups = self.now().groups
        size = groups.degrees[nodes]
        begin = size.cumsum(0) - size
        owner = torch.arange(nodes.numel(), device=self.device).repeat_interleave(size)
        inside = torch.arange(owner.numel(), device=self.device) - begin[owner]
        return groups.items[groups.first[nodes][owner] + inside], owner

    @untraced
    def find_edges(self, eid: Any) -> tuple[Tensor, Tensor]:
        """Return the sources and destinations of the edges `eid`."""
        ids = self.edge_numbers(eid)
        return self._src[ids], self._dst[ids]

    @untraced
    def edge_ids(self, u: Any, v: Any, return_uv: bool = False) -> Any:
        """Return the id of an edge from each `u` to each `v`, the first one, an int for
        two ints. `return_uv`: sources, destinations and ids of all edges of each pair.

        Raises ValueError where there is none.
        """
        if return_uv:
            return self._every(u, v)
        keys, wanted = self._pairs(u, v)
        ordered, ids = torch.sort(keys, stable=True)
        at = torch.searchsorted(ordered, wanted).clamp(max=max(ordered.numel() - 1, 0))
        if not ordered.numel() or bool((ordered[at] != wanted).any()):
            self._find(u, v)
        return int(ids[at]) if _single(u, v) else ids[at]

    def _every(self, u: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return all edges of each pair, pair by pair; none for a pair without."""
        keys, wanted = self._pairs(u, v)
        ordered, ids = torch.sort(keys, stable=True)
        low = torch.searchsorted(ordered, wanted)
        size = torch.searchsorted(ordered, wanted, right=True) - low
        owner = torch.arange(wanted.numel(), device=self.device)
        owner = owner.repeat_interleave(size)
        inside = torch.arange(owner.numel(), device=self.device)
        found = ids[low[owner] + inside - (size.cumsum(0) - size)[owner]]
        return self._src[found], self._dst[found], found

    @untraced
    def has_edges_between(self, u: Any, v: Any) -> Any:
        """Return whether there is an edge from each `u` to each `v`: bool [pairs], or a
        bool for two ints."""
        keys, wanted = self._pairs(u, v)
        found = torch.isin(wanted, keys)
        return bool(found) if _single(u, v) else found

    @untraced
    def in_degrees(self, v: Any = None) -> Any:
        """Return how many edges end in each node, or in each of `v`: int64, or an int
        for an int."""
        found = self.now().in_degrees
        if v is None:
            return found.clone()
        at = found[self._dst_numbers("v", v)]
        return int(at) if isinstance(v, int) else at

    @untraced
    def out_degrees(self, u: Any = None) -> Any:
        """Return how many edges begin in each node, or in each of `u`; see
        `in_degrees`."""
        found = self.now().out_degrees
        if u is None:
            return found.clone()
        at = found[self._src_numbers("u", u)]
        return int(at) if isinstance(u, int) else at

    def predecessors(self, v: Any) -> Tensor:
        """Return the sources of the edges into `v`."""
        found: Tensor = self.in_edges(v)[0]
        return found

    def successors(self, v: Any) -> Tensor:
        """Return the destinations of the edges out of `v`."""
        found: Tensor = self.out_edges(v)[1]
        return found

    @property
    def structure(self) -> HeteroGraph:
        """Return the `HeteroGraph` that compiled programs run on: edges sorted by
        destination."""
        return self.now().structure

    @untraced
    def derived(self, make: Callable[[Any], T]) -> T:
        """Return what `make` makes of the edges alone, made once for edges as they
        are."""
        found: T = self.now().kept(make, lambda: make(self))
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return edges and features, without what was compiled or derived: a copy, or
        what another process is sent, makes that anew."""
        state = {**self.__dict__, "counts": Counter()}
        gone = {"_edges"}
        if self.programs is SHARED:
            gone.add("programs")
        return {k: v for k, v in state.items() if k not in gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"programs": SHARED, **state})
        self._edges = self._new_edges()

    def frames(self) -> tuple[Frame, Frame, EdgeFrame]:
        """Return the frames of sources, destinations and edges."""
        return self.srcdata, self.dstdata, self.edata

    def set_frames(self, srcdata: Frame, dstdata: Frame, edata: EdgeFrame) -> None:
        """Read and write other frames from now on."""
        self.srcdata, self.dstdata, self.edata = srcdata, dstdata, edata

    def local_var(self) -> "Relation":
        """Return the same edges and features; what is set in one is not seen in the
        other."""
        source = self.srcdata.copied()
        same = self.srcdata is self.dstdata
        return Relation(
            self._given,
            (source, source if same else self.dstdata.copied()),
            sampled=self.sampled,
            programs=self.programs,
            edata=self.edata.copied(),
            kind=self.kind,
            is_block=self.block,
        )

    def local_scope(self) -> AbstractContextManager[None]:
        """Drop features that are set inside when it ends."""
        return _Scope(self)

    # Message passing on all edges.

    @untraced
    def update_all(
        self, message_func: Message, reduce_func: Reduce, apply_node_func: Any = None
    ) -> None:
        """Send messages along all edges, reduce them to node features, and apply
        `apply_node_func` to those; nodes without messages get zeros.

        With an apply function, its results alone are stored.
        """
        found = self.propagate(message_func, reduce_func, apply_node_func)
        for name, rows in found.items():
            self.dstdata[name] = rows

    @untraced
    def apply_edges(self, func: Message, edges: Any = None) -> None:
        """Set edge features by a message function, on all edges or on some: ids, or
        (sources, destinations)."""
        if edges is None:
            sorted_rows, given_rows = self._edge_rows(func)
            for name, value in sorted_rows.items():
                self.edata.set_sorted(name, value, self._edges)
            self.edata.update(given_rows)
            return
        ids = self.edge_numbers(edges)
        part = self._part(ids)
        sorted_rows, given_rows = part._edge_rows(func)
        for name, value in sorted_rows.items():
            part.edata.set_sorted(name, value, part._edges)
            given_rows[name] = part.edata[name]
        for name, value in given_rows.items():
            self.edata.write(name, ids, value)

    def _edge_rows(self, func: Message) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a message function's results: in the graph's order, or in the
        caller's."""
        try:
            if isinstance(func, MessageFunction):
                return {func.out: self._run(func)}, {}
            if isinstance(func, PureCall):
                return self._pure((func,), lambda t: _call_edges(t, func)), {}
            trace, made = self._traced(lambda t: _call_edges(t, func))
        except TRACE_ERRORS as error:
            self._count(error)
            return {}, self._messages(func)
        return dict(zip(made, self._run_traced(trace, made), strict=True)), {}

    @untraced
    def apply_nodes(self, func: Apply, v: Any = None) -> None:
        """Set node features by a function, of all nodes or of those of ids `v`."""
        apply_nodes(self.dstdata, func, v)

    # Message passing on some edges.

    @untraced
    def send_and_recv(
        self,
        edges: Any,
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Any = None,
    ) -> None:
        """Run `update_all` along some edges, ids or (sources, destinations); nodes that
        receive nothing stay as they are."""
        ids = self.edge_numbers(edges)
        if ids.numel():
            part = self._part(ids)
            self._receive(part, message_func, reduce_func, apply_node_func)

    @untraced
    def pull(
        self,
        v: Any,
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Any = None,
    ) -> None:
        """Run `update_all` along the edges into the nodes `v`, which all are
        updated."""
        nodes = self._dst_numbers("v", v).unique()
        part = self._part(self._at(self._dst, nodes, self.num_dst_nodes()), nodes)
        self._receive(part, message_func, reduce_func, apply_node_func)

    @untraced
    def push(
        self,
        u: Any,
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Any = None,
    ) -> None:
        """Run `send_and_recv` along the edges out of the nodes `u`."""
        nodes = self._src_numbers("u", u)
        ids = self._at(self._src, nodes, self.num_src_nodes())
        self.send_and_recv(ids, message_func, reduce_func, apply_node_func)

    @contextmanager
    def masked(self, mask: Tensor) -> Iterator[None]:
        """Multiply the messages of each edge by `mask` [edges], in every layer and call
        inside: what explainers (GNNExplainer) train.

        Messages are masked before they are reduced: after attention's softmax, and
        without the rows that a layer adds for a node itself. Raises ValueError for
        another shape.
        """
        if mask.shape != (self.num_edges(),):
            raise ValueError(
                f"expected a mask of shape [{self.num_edges()}], got {list(mask.shape)}"
            )
        self.edata[MASK] = mask
        try:
            yield
        finally:
            del self.edata[MASK]

    # Compiled programs.

    def propagate(
        self, message: Message, reduce: Reduce, apply: Apply | None = None
    ) -> dict[str, Tensor]:
        """Return what `update_all` stores.

        Where there are no messages at all, features that a reduce function of the
        user's would set stay as they are, as DGL has it, and `apply` reads those; what
        is no feature yet is zeros.
        """
        if not isinstance(reduce, ReduceFunction) and not self.num_edges():
            unset = self._unset(message, reduce)
            return unset if apply is None else self._apply(apply, unset)
        count = self.num_dst_nodes()
        if MASK in self.edata:
            message = _masked(message)
        found = self._propagate(message, reduce, apply)
        return {
            k: v if v.shape[0] == count else v.narrow(0, 0, count)
            for k, v in found.items()
        }

    def _propagate(
        self, message: Message, reduce: Reduce, apply: Apply | None
    ) -> dict[str, Tensor]:
        try:
            if isinstance(message, MessageFunction) and isinstance(
                reduce, ReduceFunction
            ):
                _check_fields(message, reduce)
                if reduce.reducer in FUSED and apply is None:
                    return {reduce.out: self._builtin(message, reduce)}
            parts = (message, reduce, apply)
            if all(map(_is_pure, parts)):
                return self._pure(parts, lambda t: self._whole(t, *parts))
            trace, made = self._traced(lambda t: self._whole(t, *parts))
        except TRACE_ERRORS as error:
            self._count(error)
        else:
            return dict(zip(made, self._run_traced(trace, made), strict=True))
        if apply is not None:
            reduced = self.propagate(message, reduce, None)
            return self._apply(apply, reduced)
        return self._reduced(message, reduce)

    def _builtin(self, message: MessageFunction, reduce: ReduceFunction) -> Tensor:
        """Run built-in functions: their program is found without a trace."""
        plain = plain_sum(self, message, reduce)
        if plain is not None:
            return plain
        return self._run(message, reduce)

    def _whole(
        self, t: Trace, message: Message, reduce: Reduce, apply: Apply | None
    ) -> dict[str, Rows]:
        """Trace a whole call."""
        if isinstance(message, MessageFunction):
            messages = {message.out: message_rows(t, message)}
        else:
            messages = _call_edges(t, message)
        if isinstance(reduce, ReduceFunction):
            if reduce.reducer not in FUSED:
                raise UntraceableError(f"reducer {reduce.reducer.value}")
            if reduce.message not in messages:
                raise _no_message(reduce.message, messages)
            found = {reduce.out: reduce_rows(messages[reduce.message], reduce)}
        else:
            box = {k: Rows(t, m.sym, boxed=True) for k, m in messages.items()}
            found = _call_nodes(t, reduce, box, {})
        if apply is not None:
            found = _call_nodes(t, apply, {}, found)
        return found

    def _traced(
        self, call: Callable[[Trace], dict[str, Rows]]
    ) -> tuple[Trace, dict[str, Rows]]:
        trace = Trace(self._row_shape, self._frame, self.two_sided)
        made = call(trace)
        if not made:
            raise UntraceableError("no results")
        return trace, made

    def _pure(
        self,
        parts: tuple[Message | Reduce | Apply | None, ...],
        call: TraceCall,
    ) -> dict[str, Tensor]:
        """Return the results of `call`, made of `parts` that were declared pure: they
        are traced once for features of a shape."""
        known, tensors = self._known(parts, call)
        self.counts["compiled"] += 1
        made = self.programs.made(known.key, self._building(call))
        structure = self.structure  # first: rows are sorted as edges are now
        found = made.compiled(structure, self._inputs(made, known, tensors))
        return dict(zip(known.names, found, strict=True))

    def program(
        self, parts: tuple[Message, Reduce, Apply | None]
    ) -> tuple[PassProgram, list[Tensor]]:
        """Return the program of `update_all` of functions that were declared pure, and
        its inputs now.

        Raises one of TRACE_ERRORS where messages are to be in memory.
        """
        call: TraceCall = lambda t: self._whole(t, *parts)  # noqa: E731
        known, tensors = self._known(parts, call)
        made = self.programs.made(known.key, self._building(call))
        names = [(s[0], s if s[0] == "t" else s[2:]) for s in made.sources]
        self.now()  # first: see `_pure`
        inputs = self._inputs(made, known, tensors)
        return PassProgram(made.compiled, names, known.captured), inputs

    def sendable(
        self, parts: tuple[PureCall, ReduceFunction, None]
    ) -> tuple[list[Any], list[str], list[str]] | None:
        """Return `Known.alike` of `update_all`, and the names that it reads of sources
        and of destinations; None where it reads anything else, or has messages in
        memory."""
        try:
            known, tensors = self._known(parts, lambda t: self._whole(t, *parts))
        except TRACE_ERRORS:
            return None
        names: dict[Side, list[str]] = {}
        for side, name, _ in known.reads:
            names.setdefault(side, []).append(name)
        if tensors or Side.EDGE in names or not self.two_sided:
            return None
        return known.alike, names.get(Side.SOURCE, []), names.get(Side.DESTINATION, [])

    def _building(self, call: TraceCall) -> Callable[[], tuple[Trace, Sequence[Sym]]]:
        def build() -> tuple[Trace, list[Sym]]:
            again, made = self._traced(call)
            return again, [r.sym for r in made.values()]

        return build

    def _inputs(
        self, made: CompiledPass, known: Known, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        found = []
        for name in made.sources:
            if name in known.captured:
                place, dropped = known.captured[name]
                found.append(_without(tensors[place], dropped))
            else:
                found.append(self._tensor(name))
        return found

    def _known(
        self,
        parts: tuple[Message | Reduce | Apply | None, ...],
        call: TraceCall,
    ) -> tuple[Known, list[Tensor]]:
        """Return the trace of pure functions, and the tensors that they read."""
        tensors: list[Tensor] = []
        facts: list[Hashable] = [self.two_sided]
        for p in parts:
            if isinstance(p, PureCall):
                tensors += [v for v in p.values if isinstance(v, Tensor)]
                facts.append(p.facts)
            else:
                facts.append(p)
        places = {id(t): i for i, t in enumerate(tensors)}
        if tensors:
            # A trace knows tensors by identity: which of them are one is a fact, too.
            facts.append(tuple([places[id(t)] for t in tensors]))
        traces = self.programs.traces(Facts(tuple(facts)))
        for known in traces:
            if self._reads_alike(known):
                break
        else:
            trace, made = self._traced(call)
            strange = [t for t, _ in trace.captured.values() if id(t) not in places]
            if strange:
                raise ValueError(
                    f"expected a pure function to read its arguments alone, it reads a "
                    f"tensor of shape {list(strange[0].shape)} as well; pass it"
                )
            known = Known(
                key=_key(trace, made),
                reads=tuple(dict.fromkeys(trace.reads)),
                captured={
                    n: (places[id(t)], d) for n, (t, d) in trace.captured.items()
                },
                names=tuple(made),
                alike=self.programs.alike(_key(trace, made, named=False)),
            )
            traces.append(known)
            del traces[:-MAX_TRACES]
        return known, tensors

    def _reads_alike(self, known: Known) -> bool:
        """Whether features have the shapes that a trace was made for."""
        frames = {Side.SOURCE: self.srcdata, Side.DESTINATION: self.dstdata}
        for side, name, shape in known.reads:
            edge = side is Side.EDGE
            value = self.edata.either(name) if edge else frames[side][name]
            if value.shape[1:] != shape or not is_float(value):
                return False
        return True

    def _run_traced(self, trace: Trace, made: Mapping[str, Rows]) -> tuple[Tensor, ...]:
        captured = trace.captured

        def tensor(name: str) -> Tensor:
            if name not in captured:
                return self._tensor(name)
            return _without(*captured[name])

        self.counts["compiled"] += 1
        results = [r.sym for r in made.values()]
        key = _key(trace, made)
        return self.programs.run(self.structure, key, lambda: (trace, results), tensor)

    def _run(
        self, message: MessageFunction, reduce: ReduceFunction | None = None
    ) -> Tensor:
        """Return the rows of built-in functions; see [Note: found by shapes] in
        message/direct.py."""
        edges = self.now()
        sides = message.sides
        given = [self._operand(side, name, edges) for side, name in sides]

        def build() -> _Built:
            facts = (message, reduce and (reduce.reducer, reduce.temperature))
            key = (*facts, self.two_sided, self._builtin_shapes(message))
            names = [f"{self._letter(side)}:{name}" for side, name in sides]
            return _Built(key, names, lambda: self._built(message, reduce))

        return self._found((message, reduce), edges, given, build)

    def _built(
        self, message: MessageFunction, reduce: ReduceFunction | None
    ) -> tuple[Trace, list[Sym]]:
        trace = Trace(self._row_shape, self._frame, self.two_sided)
        rows = message_rows(trace, message)
        return trace, [(rows if reduce is None else reduce_rows(rows, reduce)).sym]

    def _letter(self, side: Side) -> str:
        if side is Side.EDGE:
            return "e"
        return "s" if side is Side.SOURCE and self.two_sided else "n"

    def _operand(self, side: Side, name: str, edges: Edges) -> Tensor:
        """Return a feature as programs read it."""
        if side is Side.EDGE:
            return self.edata.sorted(name, edges)
        rows = (self.srcdata if side is Side.SOURCE else self.dstdata)[name]
        short = edges.num_rows - rows.shape[0]
        if not short:
            return rows
        return torch.cat((rows, rows.new_zeros(short, *rows.shape[1:])))

    def _found(
        self,
        what: tuple[object, ...],
        edges: Edges,
        given: Sequence[Tensor],
        build: Callable[[], "_Built"],
    ) -> Tensor:
        """Return the result of the program for `given`. `what`: objects that it is
        found by; `build` is called where it is not."""
        facts = map(facts_of, given)
        ahead = None if target_now() is None else arch()
        key = (*map(id, what), torch.is_grad_enabled(), ahead, *facts)
        known = edges.ready.get(key)
        if known is None:
            asked = build()
            made = self.programs.made(Facts(asked.facts), asked.make)
            places = [asked.names.index(s) for s in made.sources]
            inputs = [given[i] for i in places]
            found = made.compiled.executable(edges.structure, inputs)
            # With the objects, whose ids others would have after their end.
            known = edges.keep_ready(key, (found, places, what))
        executable, places, _ = known
        self.counts["compiled"] += 1
        result: Tensor = executable([given[i] for i in places])[0]
        return result

    def _tensor(self, name: str) -> Tensor:
        kind, feature = name.split(":", 1)
        side = {"e": Side.EDGE, "s": Side.SOURCE, "n": Side.DESTINATION}[kind]
        return self._operand(side, feature, self._edges)

    def _row_shape(self, side: Side, name: str) -> tuple[int, ...]:
        edge = side is Side.EDGE
        value = self.edata.either(name) if edge else self._frame(side)[name]
        if not is_float(value):
            raise UntraceableError(f"{name} is of {value.dtype}")
        return tuple(value.shape[1:])

    def _builtin_shapes(self, f: MessageFunction) -> tuple[tuple[int, ...], ...]:
        return tuple(self._row_shape(*s) for s in f.sides)

    @property
    def two_sided(self) -> bool:
        """Whether the ends' features are different ones; see [Note: two kinds of
        rows]."""
        return self.srcdata is not self.dstdata

    # Messages in memory.

    def _count(self, error: Exception) -> None:
        self.counts[f"in memory: {error}"] += 1

    def _messages(self, message: Message) -> dict[str, Tensor]:
        """Return the messages of all edges in the caller's order."""
        if isinstance(message, MessageFunction):
            found, dtype = self._builtin_messages(message)
            return {message.out: found.to(dtype)}
        src, dst, data = (
            FeatureView(partial(self._side, side), self._frame(side))
            for side in (Side.SOURCE, Side.DESTINATION, Side.EDGE)
        )
        batch = EdgeBatch((src, dst, data), self._ends, self.edge_softmax)
        return checked(message(batch), self.num_edges(), "message function")

    def _builtin_messages(self, f: MessageFunction) -> tuple[Tensor, torch.dtype]:
        """Return messages as they are computed, and the dtype of what is made of
        them."""
        sides = f.sides
        columns = [self._column(*s) for s in sides]
        # Once, if both ends read one column: its gradient is then rounded once.
        made = {id(column): wide(column) for column in columns}
        rows = [
            self._of_edges(side, made[id(column)])
            for (side, _), column in zip(sides, columns, strict=True)
        ]
        kinds = [column.dtype for column in columns]
        found = combine(f, rows[0], None if f.right is None else rows[1])
        if all(r.dtype is k for r, k in zip(rows, kinds, strict=True)):
            return found, found.dtype
        return found, reduce(torch.promote_types, kinds)

    def _frame(self, side: Side) -> Frame:
        if side is Side.EDGE:
            return self.edata
        return self.srcdata if side is Side.SOURCE else self.dstdata

    def _column(self, side: Side, name: str) -> Tensor:
        return self._frame(side)[name]

    def _of_edges(self, side: Side, rows: Tensor) -> Tensor:
        """Rows of the edges; gradients of a node's rows are summed wide."""
        if side is Side.EDGE:
            return rows
        ids = self._src if side is Side.SOURCE else self._dst
        return rows.index_select(0, ids)

    def _side(self, side: Side, name: str) -> Tensor:
        column = self._column(side, name)
        return self._of_edges(side, wide(column)).to(column.dtype)

    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._src, self._dst, self._all_ids()

    def _message(
        self, message: Message, reduce: ReduceFunction
    ) -> tuple[Tensor, torch.dtype]:
        """Return what a built-in reducer reduces, and the dtype of its results."""
        if isinstance(message, MessageFunction) and reduce.reducer is not Reducer.LSTM:
            return self._builtin_messages(message)
        messages = self._messages(message)
        if reduce.message not in messages:
            raise _no_message(reduce.message, messages)
        value = messages[reduce.message]
        if reduce.reducer is Reducer.LSTM:
            return value, value.dtype
        return wide(value), value.dtype

    def _reduced(self, message: Message, reduce: Reduce) -> dict[str, Tensor]:
        if isinstance(reduce, ReduceFunction):
            value, dtype = self._message(message, reduce)
            if not is_float(value):
                raise ValueError(
                    f"expected floating-point messages {reduce.message!r}, got "
                    f"{value.dtype}"
                )
            if reduce.reducer not in FUSED:
                found = reduce_builtin(reduce, value, self.now().groups)
            else:
                found = self._reduce_rows(value, reduce)
            return {reduce.out: found.to(dtype)}
        messages = self._messages(message)

        def call(bucket: Bucket, mailbox: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            data = self.dstdata.rows_at(bucket.nodes)
            return reduce(
                NodeBatch(data, mailbox, lambda: self._node_ids()[bucket.nodes])
            )

        return reduce_user(call, messages, self.now().groups)

    def _unset(self, message: Message, reduce: Any) -> dict[str, Tensor]:
        """Return zeros for what a reduce function makes and is no feature yet. It is
        asked with one message of zeros; of one that takes no such mailbox nothing is
        known, and nothing set."""
        count = self.num_dst_nodes()
        if not count:
            return {}
        first = self._node_ids()[:1]
        data = self.dstdata.rows_at(torch.zeros_like(first))
        messages = self._messages(message).items()
        mailbox = {k: m.new_zeros(1, 1, *m.shape[1:]) for k, m in messages}
        try:
            made = reduce(NodeBatch(data, mailbox, lambda: first))
        except Exception:
            return {}
        return {
            k: v.new_zeros(count, *v.shape[1:])
            for k, v in checked(made, 1, "reduce function").items()
            if k not in self.dstdata
        }

    def _reduce_rows(self, messages: Tensor, reduce: ReduceFunction) -> Tensor:
        """Reduce real messages by a compiled reducer."""
        again = _renamed(reduce)
        with self.local_scope():
            self.edata["m"] = messages if messages.dim() < 4 else messages.flatten(1)
            found = self._builtin(copy_e("m", "m"), again)
        return found.view(-1, *messages.shape[1:])

    def _apply(self, func: Apply, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        def get(name: str) -> Tensor:
            return data[name] if name in data else self.dstdata[name]

        names = {**dict.fromkeys(data), **dict.fromkeys(self.dstdata)}
        batch = NodeBatch(FeatureView(get, names), {}, self._node_ids)
        return checked(func(batch), self.num_dst_nodes(), "function")

    def _node_ids(self) -> Tensor:
        return torch.arange(self.num_dst_nodes(), device=self.device)

    def _all_ids(self) -> Tensor:
        return torch.arange(self.num_edges(), device=self.device)

    @untraced
    def edge_softmax(
        self, score: Tensor, eids: Any = None, norm_by: str = "dst"
    ) -> Tensor:
        """Return the softmax of edge rows [edges, ...] over the edges with one
        destination.

        `eids`: the scores are of these edges, among which the softmax is. `norm_by`
        "src": over the edges with one source.

        Raises:
            ValueError: the scores are no floating-point numbers, or not one an edge.
        """
        if not is_float(score):
            raise ValueError(f"expected floating-point scores, got {score.dtype}")
        if norm_by not in ("dst", "src"):
            raise ValueError(f"expected norm_by 'dst' or 'src', got {norm_by!r}")
        if eids is not None:
            part = self._part(self.edge_numbers(eids))
            return part.edge_softmax(score, norm_by=norm_by)
        if norm_by == "src":
            back: Relation = self.derived(_reversed)
            return back.edge_softmax(score)
        self.edata.check("scores", score)
        edges = self.now()
        # Rows that the compiler knows have at most two axes.
        rows = score if score.dim() < 4 else score.flatten(1)
        order, inverse = edges.order, edges.inverse
        given = rows if order is None else rows.index_select(0, order)
        shape = tuple(rows.shape[1:])

        def make() -> tuple[Trace, list[Sym]]:
            trace = Trace(lambda *_: shape)
            return trace, [softmax_rows(trace.feature(Side.EDGE, "score")).sym]

        found = self._found(
            (Relation.edge_softmax,),
            edges,
            [given],
            lambda: _Built(("softmax", shape), ["e:score"], make),
        )
        found = found if inverse is None else found.index_select(0, inverse)
        return found.reshape(score.shape)

    # Parts.

    def _src_numbers(self, name: str, nodes: Any) -> Tensor:
        return ids_of(name, nodes, self.num_src_nodes(), self.device)

    def _dst_numbers(self, name: str, nodes: Any) -> Tensor:
        return ids_of(name, nodes, self.num_dst_nodes(), self.device)

    def edge_numbers(self, edges: Any) -> Tensor:
        """Return edge ids, int64 [edges], of ids, a mask or (sources, destinations).

        Raises ValueError where there is no such edge.
        """
        if isinstance(edges, tuple) and len(edges) == 2:
            return self._find(*edges)
        return ids_of("edges", edges, self.num_edges(), self.device, "edges")

    def _pairs(self, u: Any, v: Any) -> tuple[Tensor, Tensor]:
        """Return a number for each edge, and for each pair that is asked for."""
        single = isinstance(u, int) or isinstance(v, int)
        u, v = self._src_numbers("u", u), self._dst_numbers("v", v)
        if u.shape != v.shape and not single:
            raise ValueError(
                f"expected u and v of one length, got {u.numel()} and {v.numel()}"
            )
        count = self.num_dst_nodes()
        return self._src * count + self._dst, u * count + v

    def _find(self, u: Any, v: Any) -> Tensor:
        """Return the ids of the edges from `u` to `v`: all of them where there are
        several."""
        keys, wanted = self._pairs(u, v)
        missing = ~torch.isin(wanted, keys)
        if bool(missing.any()):
            pair = int(wanted[missing][0])
            start, end = divmod(pair, self.num_dst_nodes())
            raise ValueError(f"expected an edge from {start} to {end}, got none")
        return torch.isin(keys, wanted).nonzero().flatten()

    def _part(self, ids: Tensor, nodes: Tensor | None = None) -> "_Part":
        return _Part(self, ids, nodes)

    def _receive(
        self, part: "_Part", message: Message, reduce: Reduce, apply: Apply | None
    ) -> None:
        local = torch.searchsorted(part.nodes, part.reached)
        for name, value in part.propagate(message, reduce, apply).items():
            self.dstdata.write(name, part.reached, value[local])


class _Built(NamedTuple):
    """How a program with one result is made."""

    facts: Hashable
    """What it is found by among all programs."""
    names: Sequence[str]
    """Of the tensors that are given, as `CompiledPass.sources` names them."""
    make: Callable[[], tuple[Trace, Sequence[Sym]]]


class _Scope(AbstractContextManager[None]):
    """Copied frames of a relation, until it ends."""

    def __init__(self, relation: Relation) -> None:
        self.relation = relation
        self.before: list[tuple[Frame, Frame, EdgeFrame]] = []
        """Of each time that it was entered and has not ended."""

    def __enter__(self) -> None:
        source, ends, edges = before = self.relation.frames()
        first = source.copied()
        second = first if source is ends else ends.copied()
        self.before.append(before)
        self.relation.set_frames(first, second, edges.copied())

    def __exit__(self, *_: object) -> None:
        self.relation.set_frames(*self.before.pop())


class _Part(Relation):
    """Number some edges of a `Relation` and the nodes that they touch anew; features
    are gathered when they are read."""

    def __init__(self, whole: Relation, ids: Tensor, nodes: Tensor | None) -> None:
        src, dst = whole._src[ids], whole._dst[ids]
        reached = dst.unique() if nodes is None else nodes
        if whole.two_sided:
            sources, src = src.unique(return_inverse=True)
            self.nodes, local = reached, torch.searchsorted(reached, dst)
            frames = whole.srcdata.part(sources), whole.dstdata.part(reached)
        else:
            # One gather of both ends, so that its gradient is rounded once.
            self.nodes, places = torch.cat((src, dst, reached)).unique(
                return_inverse=True
            )
            src, local = places[: 2 * ids.numel()].view(2, -1)
            frames = (whole.dstdata.part(self.nodes),) * 2
        self.reached = reached
        """The nodes that messages are for."""
        self.whole, self.ids = whole, ids
        super().__init__(
            (src, local),
            frames,
            sampled=True,
            programs=whole.programs,
            edata=whole.edata.part(ids),
        )
        self.counts = whole.counts

    def _node_ids(self) -> Tensor:
        found: Tensor = self.nodes
        return found

    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.whole._src[self.ids],
            self.whole._dst[self.ids],
            self.ids,
        )


def _masked(message: Message) -> Callable[[EdgeBatch], Mapping[str, Any]]:
    def call(edges: EdgeBatch) -> Mapping[str, Any]:
        made = message(edges) if callable(message) else _built(message, edges)
        return {k: v * _like(edges.data[MASK], v) for k, v in made.items()}

    return call


def _like(mask: Any, rows: Any) -> Any:
    """Return a mask with as many axes as rows."""
    if isinstance(mask, Tensor):
        return mask.view(-1, *(1,) * (rows.dim() - 1)).to(rows.dtype)
    for _ in range(rows.sym.rank - 1):
        mask = mask.unsqueeze(-1)
    return mask


def _built(f: MessageFunction, edges: EdgeBatch) -> dict[str, Any]:
    """Return a built-in function's messages, as a function of one's own makes them."""
    columns = {
        Side.SOURCE: edges.src,
        Side.DESTINATION: edges.dst,
        Side.EDGE: edges.data,
    }
    left = columns[f.left[0]][f.left[1]]
    right = None if f.right is None else columns[f.right[0]][f.right[1]]
    if isinstance(left, Rows):
        return {f.out: message_rows(left.trace, f)}
    return {f.out: combine(f, left, right)}


def _reversed(relation: Relation) -> Relation:
    """Return the edges alone, leading back."""
    sizes = (relation.num_dst_nodes(), relation.num_src_nodes())
    frames = [Frame(n, relation.device, "node") for n in sizes]
    return Relation(
        relation.edges()[::-1],
        (frames[0], frames[1]),
        sampled=relation.sampled,
        programs=relation.programs,
    )


def apply_nodes(frame: Frame, func: Apply, v: Any = None) -> None:
    """Set node features by a function, of all nodes of a frame or of those of ids
    `v`."""
    every = torch.arange(frame.num_rows, device=frame.device)
    if v is None:
        batch = NodeBatch(frame.rows_at(None), {}, lambda: every)
        frame.update(checked(func(batch), frame.num_rows, "function"))
        return
    ids = ids_of("v", v, frame.num_rows, frame.device)
    batch = NodeBatch(frame.rows_at(ids), {}, lambda: ids)
    for name, value in checked(func(batch), ids.numel(), "function").items():
        frame.write(name, ids, value)


def formed(form: str, u: Tensor, v: Tensor, ids: Tensor) -> Any:
    """Return edges as DGL's `form` says: "uv", "eid" or "all"."""
    found = {"uv": (u, v), "eid": ids, "all": (u, v, ids)}
    if form not in found:
        raise ValueError(f"expected form 'uv', 'eid' or 'all', got {form!r}")
    return found[form]


def _call_edges(t: Trace, func: Callable[[EdgeBatch], Any]) -> dict[str, Rows]:
    """Call a message function on traced `Rows`."""
    src, dst, data = (
        FeatureView(partial(t.feature, side), t.names(side))
        for side in (Side.SOURCE, Side.DESTINATION, Side.EDGE)
    )
    return _rows(func(EdgeBatch((src, dst, data), _no_ids, softmax_rows)))


def _call_nodes(
    t: Trace,
    func: Callable[[NodeBatch], Any],
    mailbox: Mapping[str, Rows],
    results: Mapping[str, Rows],
) -> dict[str, Rows]:
    """Call a reduce or apply function on traced `Rows`; `results` hide features."""

    def get(name: str) -> Rows:
        return results[name] if name in results else t.node_feature(name)

    names = {**dict.fromkeys(results), **dict.fromkeys(t.names(Side.DESTINATION))}
    made = _rows(func(NodeBatch(FeatureView(get, names), mailbox, _no_ids)))
    if any(r.sym.node.domain is not Domain.NODE for r in made.values()):
        raise UntraceableError("a result with a row a message")
    return made


def _rows(made: Any) -> dict[str, Rows]:
    """Return what a user function gave for traced `Rows`, checked."""
    if not isinstance(made, Mapping):
        raise ValueError(f"expected a dict from a function, got {type(made).__name__}")
    if not all(isinstance(r, Rows) for r in made.values()):
        raise UntraceableError("a result that is no row")
    return dict(made)


facts_of: Callable[[Tensor], Hashable] = attrgetter(
    "dtype", "shape", "requires_grad", "device"
)
"""What programs are found by."""

MAX_TRACES = 8
"""Traces of one pure function that differ in their features' shapes."""


def _key(trace: Trace, made: Mapping[str, Rows], named: bool = True) -> Facts:
    """Return what a program is found by. Not `named`: inputs are known by their places
    and by whose they are."""
    ends = tuple((r.sym.node.serial, r.sym.rank) for r in made.values())
    nodes: Any = trace.builder.signature()
    if not named:
        last = [k[3][0][1][0] if k[0] is Op.INPUT else k[3] for k in nodes]
        nodes = tuple([(*k[:3], n) for k, n in zip(nodes, last, strict=True)])
    return Facts(("traced", nodes, ends))


def _without(tensor: Tensor, axes: int) -> Tensor:
    """Return the shape without leading axes of size 1."""
    return tensor.view(tensor.shape[axes:]) if axes else tensor


@lru_cache(maxsize=64)
def _renamed(reduce: ReduceFunction) -> ReduceFunction:
    return replace(reduce, message="m", out="out")


def _single(*ids: Any) -> bool:
    return all(isinstance(i, int) for i in ids)


def _is_pure(part: object) -> bool:
    if isinstance(part, ReduceFunction):
        return part.reducer in FUSED
    return part is None or isinstance(part, MessageFunction | PureCall)


def _no_ids() -> Any:
    raise UntraceableError("ids in a traced function")


def _check_fields(message: MessageFunction, reduce: ReduceFunction) -> None:
    if reduce.message != message.out:
        raise _no_message(reduce.message, (message.out,))


def _no_message(name: str, there: Iterable[str]) -> ValueError:
    return ValueError(
        f"expected the reduce function to read one of {sorted(there)}, got {name!r}"
    )
