"""`hector.message.Graph`: features on a graph, and messages along its edges.

DGL's names and semantics (Wang, chapter 4), on the compiler that relational layers use:
a message function, a reduce function and the function applied behind them become one
program, whose messages lie in no memory unless a gradient needs them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from hector.frontend.values import Sym
from hector.graph import HeteroGraph
from hector.indexing import check_range, count, integers, tensor_of
from hector.ir.types import Domain
from hector.message.batches import EdgeBatch, Features, NodeBatch
from hector.message.eager import (
    Bucket,
    checked,
    combine,
    reduce_builtin,
    reduce_user,
)
from hector.message.edges import Edges
from hector.message.frame import EdgeFrame, Frame
from hector.message.functions import (
    MessageFunction,
    PureCall,
    ReduceFunction,
    Reducer,
    Side,
    copy_e,
)
from hector.message.programs import SHARED, Facts, Known, Programs
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
from hector.precision import wide
from hector.tracing import untraced

Message = MessageFunction | Callable[[EdgeBatch], Mapping[str, Any]]
Reduce = ReduceFunction | Callable[[NodeBatch], Mapping[str, Any]]
Apply = Callable[[NodeBatch], Mapping[str, Any]]

T = TypeVar("T")


class Graph:
    """Hold directed edges between the nodes 0 to `num_nodes` - 1, with features.

    `ndata` and `edata` hold them by name. Functions with names of DGL do what DGL's do;
    see `hector.message.functions` for the built-in ones.
    """

    def __init__(
        self,
        src: Any,
        dst: Any,
        *,
        num_nodes: int | None = None,
        sampled: bool = False,
        programs: Programs | None = None,
    ) -> None:
        """Make edges from `src[i]` to `dst[i]`; edge ids are positions. Tensors may be
        written to later: every call runs on what they hold.

        `sampled`: one of many graphs alike, see `HeteroGraph.sampled`. Raises
        ValueError on non-integer, ragged or out-of-range input.
        """
        given = tensor_of(src), tensor_of(dst)
        ends = integers("src", given[0]), integers("dst", given[1])
        if ends[0].shape != ends[1].shape:
            raise ValueError(
                f"expected src and dst of one length, got {ends[0].numel()} and "
                f"{ends[1].numel()}"
            )
        if num_nodes is None:
            num_nodes = count(*ends)
        self._num_nodes = int(num_nodes)
        self.sampled = sampled
        self.programs = SHARED if programs is None else programs
        self._given = given
        self._edges = Edges(given, self._num_nodes, sampled)
        device = given[0].device
        self.ndata = Frame(self._num_nodes, device, "node")
        self.edata = EdgeFrame(given[0].numel(), device)
        self.batch_num_nodes: tuple[int, ...] = (self._num_nodes,)
        """Nodes of each graph of a batch; see `hector.message.batch`."""
        self.batch_num_edges: tuple[int, ...] = (given[0].numel(),)
        self.counts: Counter[str] = Counter()
        """How calls ran: "compiled", or why messages were in memory."""

    # The graph.

    def _now(self) -> Edges:
        """Return the edges as the caller's tensors have them."""
        if not self._edges.unchanged():
            self._edges = Edges(self._given, self._num_nodes, self.sampled)
        return self._edges

    @property
    def _src(self) -> Tensor:
        return self._now().src

    @property
    def _dst(self) -> Tensor:
        return self._now().dst

    @property
    def device(self) -> torch.device:
        """Return where the edges lie."""
        return self._given[0].device

    def num_nodes(self) -> int:
        """Return how many nodes there are, those without edges among them."""
        return self._num_nodes

    def num_edges(self) -> int:
        """Return how many edges there are."""
        return self._given[0].numel()

    @untraced
    def edges(self) -> tuple[Tensor, Tensor]:
        """Return sources and destinations, int64 [edges] each."""
        now = self._now()
        return now.src, now.dst

    @untraced
    def in_degrees(self) -> Tensor:
        """Return how many edges end in each node, int64 [nodes]."""
        return self._now().in_degrees.clone()

    @untraced
    def out_degrees(self) -> Tensor:
        """Return how many edges begin in each node, int64 [nodes]."""
        return self._now().out_degrees.clone()

    @property
    def structure(self) -> HeteroGraph:
        """Return the `HeteroGraph` that compiled programs run on: edges sorted by
        destination."""
        return self._now().structure

    @untraced
    def derived(self, make: Callable[["Graph"], T]) -> T:
        """Return what `make` makes of the edges alone, made once for edges as they
        are."""
        found: T = self._now().kept(make, lambda: make(self))
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
        self._edges = Edges(self._given, self._num_nodes, self.sampled)

    @untraced
    def to(self, device: torch.device | str) -> "Graph":
        """Return the graph and its features on `device`."""
        made = Graph(
            self._src.to(device),
            self._dst.to(device),
            num_nodes=self._num_nodes,
            sampled=self.sampled,
            programs=self.programs,
        )
        made.ndata.update({k: v.to(device) for k, v in self.ndata.items()})
        made.edata.update({k: v.to(device) for k, v in self.edata.items()})
        made.batch_num_nodes = self.batch_num_nodes
        made.batch_num_edges = self.batch_num_edges
        return made

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Drop features that are set inside when it ends."""
        nodes, edges = self.ndata, self.edata
        self.ndata, self.edata = nodes.copied(), edges.copied()
        try:
            yield
        finally:
            self.ndata, self.edata = nodes, edges

    # Message passing on all edges.

    @untraced
    def update_all(
        self, message_func: Message, reduce_func: Reduce, apply_node_func: Any = None
    ) -> None:
        """Send messages along all edges, reduce them to node features, and apply
        `apply_node_func` to those; nodes without messages get zeros.

        With an apply function, its results alone are stored.
        """
        self.ndata.update(self._propagate(message_func, reduce_func, apply_node_func))

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
        ids = self._edge_ids(edges)
        part = self._part(ids)
        sorted_rows, given_rows = part._edge_rows(func)
        for name, value in sorted_rows.items():
            part.edata.set_sorted(name, value, part._edges)
            given_rows[name] = part.edata[name]
        for name, value in given_rows.items():
            self._write(self.edata, name, ids, value)

    def _edge_rows(self, func: Message) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a message function's results: in the graph's order, or in the
        caller's."""
        try:
            if isinstance(func, MessageFunction):
                key = ("apply", func, self._builtin_shapes(func))
                found = self._run(key, lambda t: [message_rows(t, func)])
                return {func.out: found[0]}, {}
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
        if v is None:
            self.ndata.update(self._apply(func, self.ndata))
            return
        ids = self._node_numbers("v", v)
        data = Features(lambda name: self.ndata[name][ids])
        made = checked(func(NodeBatch(data, {}, lambda: ids)), ids.numel(), "function")
        for name, value in made.items():
            self._write(self.ndata, name, ids, value)

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
        ids = self._edge_ids(edges)
        if ids.numel():
            part = self._part(ids)
            self._receive(part, None, message_func, reduce_func, apply_node_func)

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
        nodes = self._node_numbers("v", v).unique()
        mask = torch.zeros(self._num_nodes, dtype=torch.bool, device=self.device)
        ids = mask.index_fill(0, nodes, True)[self._dst].nonzero().flatten()
        part = self._part(ids, nodes)
        self._receive(part, nodes, message_func, reduce_func, apply_node_func)

    @untraced
    def push(
        self,
        u: Any,
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Any = None,
    ) -> None:
        """Run `send_and_recv` along the edges out of the nodes `u`."""
        nodes = self._node_numbers("u", u)
        mask = torch.zeros(self._num_nodes, dtype=torch.bool, device=self.device)
        ids = mask.index_fill(0, nodes, True)[self._src].nonzero().flatten()
        self.send_and_recv(ids, message_func, reduce_func, apply_node_func)

    @untraced
    def prop_nodes(
        self,
        levels: Iterable[Tensor],
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Any = None,
    ) -> None:
        """Run `pull` for each set of nodes in turn."""
        for nodes in levels:
            self.pull(nodes, message_func, reduce_func, apply_node_func)

    @untraced
    def topological_levels(self) -> Sequence[Tensor]:
        """Return nodes by the longest path that leads to them, found once.

        Raises ValueError if there is a cycle.
        """
        return self._now().levels

    # Compiled programs.

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
            reduced = self._propagate(message, reduce, None)
            return self._apply(apply, reduced)
        return self._reduced(message, reduce)

    def _builtin(self, message: MessageFunction, reduce: ReduceFunction) -> Tensor:
        """Run built-in functions: their program is found without a trace."""
        facts = (message, reduce.reducer, reduce.temperature)
        key = ("update", *facts, self._builtin_shapes(message))
        return self._run(
            key, lambda t: [reduce_rows(message_rows(t, message), reduce)]
        )[0]

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
        trace = Trace(self._row_shape)
        made = call(trace)
        if not made:
            raise UntraceableError("no results")
        return trace, made

    def _pure(
        self,
        parts: tuple[Message | Reduce | Apply | None, ...],
        call: Callable[[Trace], dict[str, Rows]],
    ) -> dict[str, Tensor]:
        """Return the results of `call`, made of `parts` that were declared pure: they
        are traced once for features of a shape."""
        tensors = [
            v
            for p in parts
            if isinstance(p, PureCall)
            for v in p.values
            if isinstance(v, Tensor)
        ]
        places = {id(t): i for i, t in enumerate(tensors)}
        # A trace knows tensors by identity: which of them are one is a fact, too.
        facts = (
            *(p.facts if isinstance(p, PureCall) else p for p in parts),
            tuple(places[id(t)] for t in tensors),
        )
        traces = self.programs.traces(Facts(facts))
        for known in traces:
            if all(self._row_shape(s, n) == shape for s, n, shape in known.reads):
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
            )
            traces.append(known)
            del traces[:-MAX_TRACES]

        def tensor(name: str) -> Tensor:
            if name not in known.captured:
                return self._tensor(name)
            place, dropped = known.captured[name]
            return _without(tensors[place], dropped)

        def build() -> tuple[Trace, list[Sym]]:
            again, made = self._traced(call)
            return again, [r.sym for r in made.values()]

        self.counts["compiled"] += 1
        found = self.programs.run(self.structure, known.key, build, tensor)
        return dict(zip(known.names, found, strict=True))

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
        self,
        key: Any,
        build: Callable[[Trace], list[Rows]],
    ) -> tuple[Tensor, ...]:
        def made() -> tuple[Trace, list[Sym]]:
            trace = Trace(self._row_shape)
            return trace, [r.sym for r in build(trace)]

        self.counts["compiled"] += 1
        structure = self.structure
        return self.programs.run(structure, Facts(key), made, self._tensor)

    def _tensor(self, name: str) -> Tensor:
        kind, feature = name.split(":", 1)
        if kind == "e":
            return self.edata.sorted(feature, self._edges)
        return self.ndata[feature]

    def _row_shape(self, side: Side, name: str) -> tuple[int, ...]:
        edge = side is Side.EDGE
        value = self.edata.either(name) if edge else self.ndata[name]
        if not is_float(value):
            raise UntraceableError(f"{name} is of {value.dtype}")
        return tuple(value.shape[1:])

    def _builtin_shapes(self, f: MessageFunction) -> tuple[tuple[int, ...], ...]:
        sides = (f.left,) if f.right is None else (f.left, f.right)
        return tuple(self._row_shape(*s) for s in sides)

    # Messages in memory.

    def _count(self, error: Exception) -> None:
        self.counts[f"in memory: {error}"] += 1

    def _messages(self, message: Message) -> dict[str, Tensor]:
        """Return the messages of all edges in the caller's order."""
        if isinstance(message, MessageFunction):
            found, dtype = self._builtin_messages(message)
            return {message.out: found.to(dtype)}
        src, dst, data = (
            Features(partial(self._side, side))
            for side in (Side.SOURCE, Side.DESTINATION, Side.EDGE)
        )
        batch = EdgeBatch((src, dst, data), self._ends, self.edge_softmax)
        return checked(message(batch), self.num_edges(), "message function")

    def _builtin_messages(self, f: MessageFunction) -> tuple[Tensor, torch.dtype]:
        """Return messages as they are computed, and the dtype of what is made of
        them."""
        sides = (f.left,) if f.right is None else (f.left, f.right)
        rows = [self._wide_side(*s) for s in sides]
        kinds = [self._column(*s).dtype for s in sides]
        found = combine(f, rows[0], None if f.right is None else rows[1])
        if all(r.dtype is k for r, k in zip(rows, kinds, strict=True)):
            return found, found.dtype
        return found, reduce(torch.promote_types, kinds)

    def _column(self, side: Side, name: str) -> Tensor:
        return self.edata[name] if side is Side.EDGE else self.ndata[name]

    def _wide_side(self, side: Side, name: str) -> Tensor:
        """Rows of the edges; gradients of a node's rows are summed wide."""
        rows = wide(self._column(side, name))
        if side is Side.EDGE:
            return rows
        ids = self._src if side is Side.SOURCE else self._dst
        return rows.index_select(0, ids)

    def _side(self, side: Side, name: str) -> Tensor:
        return self._wide_side(side, name).to(self._column(side, name).dtype)

    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.arange(self.num_edges(), device=self.device)
        return self._src, self._dst, ids

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
                found = reduce_builtin(reduce, value, self._now().groups)
            else:
                found = self._reduce_rows(value, reduce)
            return {reduce.out: found.to(dtype)}
        messages = self._messages(message)

        def call(bucket: Bucket, mailbox: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            data = Features(lambda name: self.ndata[name][bucket.nodes])
            return reduce(
                NodeBatch(data, mailbox, lambda: self._node_ids()[bucket.nodes])
            )

        return reduce_user(call, messages, self._now().groups)

    def _reduce_rows(self, messages: Tensor, reduce: ReduceFunction) -> Tensor:
        """Reduce real messages by a compiled reducer."""
        again = replace(reduce, message="m", out="out")
        with self.local_scope():
            self.edata["m"] = messages if messages.dim() < 4 else messages.flatten(1)
            found = self._builtin(copy_e("m", "m"), again)
        return found.view(-1, *messages.shape[1:])

    def _apply(self, func: Apply, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        def get(name: str) -> Tensor:
            return data[name] if name in data else self.ndata[name]

        batch = NodeBatch(Features(get), {}, self._node_ids)
        return checked(func(batch), self._num_nodes, "function")

    def _node_ids(self) -> Tensor:
        return torch.arange(self._num_nodes, device=self.device)

    @untraced
    def edge_softmax(self, score: Tensor) -> Tensor:
        """Return the softmax of edge rows [edges, ...] over the edges with one
        destination.

        Raises:
            ValueError: the scores are no floating-point numbers.
        """
        if not is_float(score):
            raise ValueError(f"expected floating-point scores, got {score.dtype}")
        with self.local_scope():
            # Rows that the compiler knows have at most two axes.
            self.edata["score"] = score if score.dim() < 4 else score.flatten(1)
            self.apply_edges(lambda edges: {"out": edges.softmax(edges.data["score"])})
            return self.edata["out"].reshape(score.shape)

    # Parts.

    def _node_numbers(self, name: str, nodes: Any) -> Tensor:
        ids = integers(name, nodes).to(self.device)
        check_range(name, ids, self._num_nodes, "num_nodes")
        return ids

    def _edge_ids(self, edges: Any) -> Tensor:
        if isinstance(edges, tuple) and len(edges) == 2:
            u, v = (self._node_numbers(n, e) for n, e in zip("uv", edges, strict=True))
            if u.shape != v.shape:
                raise ValueError(
                    f"expected u and v of one length, got {u.numel()} and {v.numel()}"
                )
            return self._find(u, v)
        ids = integers("edges", edges).to(self.device)
        check_range("edges", ids, self.num_edges(), "edges")
        return ids

    def _find(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the ids of the edges from `u` to `v`: all of them where there are
        several."""
        keys = self._src * self._num_nodes + self._dst
        wanted = u * self._num_nodes + v
        missing = ~torch.isin(wanted, keys)
        if bool(missing.any()):
            i = int(missing.nonzero()[0])
            raise ValueError(
                f"expected an edge from {int(u[i])} to {int(v[i])}, got none"
            )
        return torch.isin(keys, wanted).nonzero().flatten()

    def _part(self, ids: Tensor, nodes: Tensor | None = None) -> "_Part":
        return _Part(self, ids, nodes)

    def _receive(
        self,
        part: "_Part",
        nodes: Tensor | None,
        message: Message,
        reduce: Reduce,
        apply: Apply | None,
    ) -> None:
        found = part._propagate(message, reduce, apply)
        local = (
            part._dst.unique()
            if nodes is None
            else torch.searchsorted(part.nodes, nodes)
        )
        rows = part.nodes[local]
        for name, value in found.items():
            self._write(self.ndata, name, rows, value[local])

    @staticmethod
    def _write(frame: Frame, name: str, ids: Tensor, value: Tensor) -> None:
        """Set a new column with changed rows; a new feature is zero elsewhere."""
        old = frame[name] if name in frame else None
        if old is None or old.shape[1:] != value.shape[1:]:
            old = value.new_zeros(frame.num_rows, *value.shape[1:])
        if not torch.can_cast(value.dtype, old.dtype):
            raise ValueError(
                f"expected rows of {old.dtype} for {name!r}, which other rows of it "
                f"are, got {value.dtype}; convert it or choose another name"
            )
        frame[name] = old.index_copy(0, ids, value.to(old.dtype))

    def __repr__(self) -> str:
        return (
            f"Graph(num_nodes={self._num_nodes}, num_edges={self.num_edges()}, "
            f"ndata={sorted(self.ndata)}, edata={sorted(self.edata)})"
        )


class _Part(Graph):
    """Number some edges of a `Graph` and the nodes that they touch anew; features are
    gathered when they are read."""

    def __init__(self, whole: Graph, ids: Tensor, extra: Tensor | None) -> None:
        src, dst = whole._src[ids], whole._dst[ids]
        parts = (src, dst) if extra is None else (src, dst, extra)
        self.nodes, local = torch.cat(parts).unique(return_inverse=True)
        ends = local[: 2 * ids.numel()].view(2, -1)
        super().__init__(
            ends[0],
            ends[1],
            num_nodes=self.nodes.numel(),
            sampled=True,
            programs=whole.programs,
        )
        self.whole, self.edge_ids = whole, ids
        self.counts = whole.counts
        nodes = self.nodes  # not of `self`, which would hold itself
        self.ndata = Frame(
            nodes.numel(),
            whole.device,
            "node",
            lambda name: whole.ndata[name].index_select(0, nodes),
        )
        self.edata = EdgeFrame(
            ids.numel(),
            whole.device,
            lambda name: whole.edata[name].index_select(0, ids),
        )

    def _node_ids(self) -> Tensor:
        found: Tensor = self.nodes
        return found

    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.whole._src[self.edge_ids],
            self.whole._dst[self.edge_ids],
            self.edge_ids,
        )


def _call_edges(t: Trace, func: Callable[[EdgeBatch], Any]) -> dict[str, Rows]:
    """Call a message function on traced `Rows`."""
    src, dst, data = (
        Features(partial(t.feature, side))
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

    made = _rows(func(NodeBatch(Features(get), mailbox, _no_ids)))
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


MAX_TRACES = 8
"""Traces of one pure function that differ in their features' shapes."""


def _key(trace: Trace, made: Mapping[str, Rows]) -> Facts:
    ends = tuple((r.sym.node.serial, r.sym.rank) for r in made.values())
    return Facts(("traced", trace.builder.signature(), ends))


def _without(tensor: Tensor, axes: int) -> Tensor:
    """Return the shape without leading axes of size 1."""
    return tensor.view(tensor.shape[axes:]) if axes else tensor


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
