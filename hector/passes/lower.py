"""Greedy lowering in three passes by preference: GEMM, traversal, PyTorch (3.3.2).

[Note: anchors] A value gets memory only where a kernel ends: results of GEMM, sums over
groups, operands of GEMM, dot products on rows, outputs. Everything between two anchors
is recomputed in the registers of whoever needs it, since a row operation costs less
than the traffic of storing its result.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hector.ir.kernels import (
    Fallback,
    Gemm,
    GemmRows,
    Kernel,
    Loop,
    Outer,
    ParameterOp,
    Plan,
    Traversal,
)
from hector.ir.node import LEAVES, Node, Op, oldest, stored, topological
from hector.ir.types import ROW_DOMAINS, TARGET, TYPE_DOMAINS, Domain, Index
from hector.passes.parameters import join
from hector.passes.reads import (
    ADDRESSED,
    frontier,
    needed_again,
    read_from_memory,
    reads_between,
    wide_reads,
)


def lower(outputs: Iterable[Node], given: Iterable[Node] = ()) -> Plan:
    """A plan computing `outputs`; `given` values are in memory already."""
    outputs = tuple(dict.fromkeys(stored(n) for n in outputs))
    known = frozenset(given)
    anchors = _find_anchors(outputs, known)
    region = _Regions(anchors, known)
    for node in _by_level(anchors):
        region.place(node)
    return _finish(region, outputs, known)


def peel(x: Node) -> GemmRows:
    """A GEMM operand as gather and per-row scalar of a stored value."""
    x = stored(x)
    value, scale = x, None
    if x.op is Op.MUL:
        for wide, narrow in (x.inputs, x.inputs[::-1]):
            if narrow.shape == (1, 1) and wide.shape == x.shape and x.type.width > 1:
                value, scale = wide, narrow
                break
    value, gather = _peel_read(value)
    if scale is None:
        return GemmRows(value=value, gather=gather)
    scale, scale_gather = _peel_read(scale)
    return GemmRows(value=value, gather=gather, scale=scale, scale_gather=scale_gather)


def _peel_read(x: Node) -> tuple[Node, Index | None]:
    """The stored value and index after `x`: a reshape changes no memory."""
    x = stored(x)
    if x.op is not Op.READ or x.inputs[0].domain not in ROW_DOMAINS:
        return x, None
    return stored(x.inputs[0]), x.index


def _is_memory(x: Node, known: frozenset[Node]) -> bool:
    return x in known or x.op in (Op.INPUT, Op.GRAPH)


def _find_anchors(outputs: tuple[Node, ...], known: frozenset[Node]) -> list[Node]:
    """Every value that ends a kernel; see [Note: anchors]."""
    anchors: dict[Node, None] = {}
    stack = [n for n in outputs if not _is_memory(n, known)]
    seen: set[Node] = set()
    forced = set(stack)
    while stack:
        node = stack.pop()
        if node in seen or _is_memory(node, known):
            continue
        seen.add(node)
        must = _operands_in_memory(node)
        forced.update(must)
        stack.extend(must)
        stack.extend(node.inputs)
    for node in topological(outputs):
        if node in seen and (
            node in forced or any(r.holds(node) for r in ANCHOR_RULES)
        ):
            if node.op is not Op.CONST or node in outputs:
                anchors[node] = None
    return list(anchors)


def _operands_in_memory(node: Node) -> tuple[Node, ...]:
    if node.op is Op.LINEAR:
        return (*peel(node.inputs[0]).nodes, *node.inputs[1:])
    if node.op is Op.OUTER:
        return (*peel(node.inputs[0]).nodes, *peel(node.inputs[1]).nodes)
    if node.op in ADDRESSED or node.op is Op.EINSUM:
        return tuple(stored(i) for i in node.inputs)
    if node.domain in TYPE_DOMAINS and node.op not in LEAVES | {Op.AGG, Op.OUTER}:
        return node.inputs
    return ()


_ENDS = frozenset((Op.LINEAR, Op.OUTER, Op.AGG, Op.EINSUM))


class AnchorRule(NamedTuple):
    """A value for which `holds` ends a kernel; see [Note: anchors]."""

    name: str
    holds: Callable[[Node], bool]


ANCHOR_RULES = (
    AnchorRule("products, sums over groups", lambda n: n.op in _ENDS),
    AnchorRule("joined rows", lambda n: n.op is Op.CONCAT),
    AnchorRule(
        "dot products on rows",
        lambda n: n.op is Op.SUM_WIDTH and n.domain in ROW_DOMAINS,
    ),
    AnchorRule(
        "what is computed of parameters",
        lambda n: n.domain in TYPE_DOMAINS and n.op not in LEAVES,
    ),
)


def _by_level(anchors: list[Node]) -> list[Node]:
    """Anchors by depth, GEMM first, so that a kernel that could use a GEMM result in
    its epilogue is placed after it."""
    level: dict[Node, int] = {}
    members = set(anchors)
    for node in anchors:
        below = [level[d] for d in frontier(node, members) if d in level]
        level[node] = 1 + max(below, default=-1)

    def order(node: Node) -> tuple[int, int, int]:
        gemm = 0 if node.op in (Op.LINEAR, Op.OUTER, Op.EINSUM) else 1
        return (level[node], gemm, -node.type.width if node.op is Op.AGG else 1)

    return sorted(anchors, key=order)


@dataclass
class _Open:
    """A kernel under construction."""

    position: int
    loop: Loop | None
    members: list[Node] = field(default_factory=list)
    reads: set[Node] = field(default_factory=set)
    """READ nodes of wide rows that its members already load."""


class _Regions:
    """Assigns each anchor to a kernel."""

    def __init__(self, anchors: list[Node], known: frozenset[Node]) -> None:
        self.anchors = set(anchors)
        self.stop = self.anchors | known
        self.kernels: list[_Open] = []
        self.home: dict[Node, _Open] = {}
        self.waiting: set[Node] = set()

    def place(self, node: Node) -> None:
        if node.op in (Op.LINEAR, Op.OUTER) or node.domain in TYPE_DOMAINS:
            if node.op is not Op.AGG:
                self._settle_operands(node)
                self._open(None).members.append(node)
                self.home[node] = self.kernels[-1]
                return
        if node.op is Op.AGG:
            self._join(node, Loop(domain=node.inputs[0].domain, group=node.index))
        elif not self._join_wherever(node):
            self.waiting.add(node)

    def flush(self) -> None:
        """Waiting row anchors that no reduction took: loops of their own."""
        for node in sorted(self.waiting, key=lambda n: n.serial):
            self._settle(node)

    def _settle_operands(self, node: Node) -> None:
        for dep in frontier(node, self.stop):
            self._settle(dep)

    def _settle(self, node: Node) -> None:
        if node not in self.waiting:
            return
        self._settle_operands(node)
        self.waiting.discard(node)
        if not self._join_wherever(node):
            self._join(node, Loop(domain=node.domain))

    def _open(self, loop: Loop | None) -> _Open:
        kernel = _Open(len(self.kernels), loop)
        self.kernels.append(kernel)
        return kernel

    def _join(self, node: Node, loop: Loop) -> None:
        """Into the latest kernel with this loop that may compute `node`."""
        self._settle_foreign(node, loop)
        for kernel in reversed(self.kernels):
            if kernel.loop == loop and self._legal(node, kernel):
                return self._add(node, kernel)
        self._add(node, self._open(loop))

    def _settle_foreign(self, node: Node, loop: Loop) -> None:
        """Waiting operands on other rows than the loop's, or that are read from
        memory, need their own kernel."""
        addressed = read_from_memory(node, self.stop)
        for dep in frontier(node, self.stop):
            if dep not in self.waiting:
                continue
            if dep.domain is not loop.domain or dep in addressed:
                self._settle(dep)
            else:
                self._settle_foreign(dep, loop)

    def _join_wherever(self, node: Node) -> bool:
        """A row anchor into a kernel that has its rows at hand, if there is one."""
        for kernel in reversed(self.kernels):
            if kernel.loop is None or not _covers(kernel.loop, node.domain):
                continue
            at_hand = self._uses_member(node, kernel) or (
                kernel.loop.domain is node.domain
                and bool(wide_reads(node) & kernel.reads)
            )
            if at_hand and self._legal(node, kernel):
                self._add(node, kernel)
                return True
        return False

    def _uses_member(self, node: Node, kernel: _Open) -> bool:
        return any(d in kernel.members for d in frontier(node, self.stop))

    def _legal(self, node: Node, kernel: _Open) -> bool:
        addressed = read_from_memory(node, self.stop)
        for dep in frontier(node, self.stop):
            home = self.home.get(dep)
            if home is kernel:
                if dep in addressed or not self._reachable(node, dep, kernel):
                    return False
            elif dep in self.waiting:
                if dep in addressed or not self._legal(dep, kernel):
                    return False
            elif home is not None and home.position >= kernel.position:
                return False
        return True

    def _reachable(self, node: Node, dep: Node, kernel: _Open) -> bool:
        """Whether the member `dep` can be had from registers where `node` needs it:
        on the same row, or as the group's value read by the group's own index."""
        loop = kernel.loop
        if loop is None:
            return False
        group = TARGET.get((loop.domain, loop.group)) if loop.group else None
        if group in TYPE_DOMAINS:
            # Sums into types are complete only after every program has ended.
            return dep.domain is loop.domain
        return all(
            use.op is Op.READ and use.index is loop.group and use.domain is loop.domain
            for use in reads_between(node, dep, self.stop)
        )

    def _add(self, node: Node, kernel: _Open) -> None:
        for dep in frontier(node, self.stop):
            if dep in self.waiting:
                self.waiting.discard(dep)
                self._add(dep, kernel)
        kernel.members.append(node)
        kernel.reads |= wide_reads(node)
        self.home[node] = kernel


def _covers(loop: Loop, domain: Domain) -> bool:
    if loop.domain is domain:
        return True
    if loop.group is None:
        return False
    target = TARGET[loop.domain, loop.group]
    return target is domain and target in ROW_DOMAINS


def _finish(
    regions: _Regions, outputs: tuple[Node, ...], known: frozenset[Node]
) -> Plan:
    regions.flush()
    needed = set(outputs)
    loads: dict[int, list[Node]] = {}
    for k in regions.kernels:
        found: dict[Node, None] = {}
        for node in k.members:
            direct = _operands_in_memory(node) if k.loop is None else ()
            for dep in (*direct, *frontier(node, regions.stop)):
                if dep not in k.members and dep.op is not Op.CONST:
                    found[dep] = None
        loads[k.position] = list(found)
        needed.update(found)
    kernels = [_kernel(k, loads[k.position], needed) for k in regions.kernels]
    given = {d for found in loads.values() for d in found} - set(regions.home)
    return Plan(
        kernels=join(kernels, outputs),
        outputs=outputs,
        given=tuple(sorted(given | (set(outputs) & known), key=lambda n: n.serial)),
    )


def _kernel(k: _Open, loads: list[Node], needed: set[Node]) -> Kernel:
    node = k.members[0]
    if k.loop is not None:
        members = tuple(topological_members(k.members))
        again = needed_again(k.loop, members)
        return Traversal(
            loop=k.loop,
            members=members,
            stores=tuple(m for m in members if m in needed or m in again),
            loads=tuple(loads),
        )
    return next(r.make(node) for r in INSTANCE_RULES if r.holds(node))


class InstanceRule(NamedTuple):
    """The kernel of a value that has one for itself, where `holds`."""

    name: str
    holds: Callable[[Node], bool]
    make: Callable[[Node], Kernel]


INSTANCE_RULES = (
    InstanceRule(
        "typed product",
        lambda n: n.op is Op.LINEAR,
        lambda n: Gemm(
            out=n,
            rows=peel(n.inputs[0]),
            weight=n.inputs[1],
            type_index=n.index,
            transpose=bool(n.attr("transpose")),
            bias=n.inputs[2] if len(n.inputs) > 2 else None,
        ),
    ),
    InstanceRule(
        "gradient of a typed weight",
        lambda n: n.op is Op.OUTER,
        lambda n: Outer(
            out=n,
            left=peel(n.inputs[0]),
            right=peel(n.inputs[1]),
            domain=n.inputs[0].domain,
            type_index=n.index,
        ),
    ),
    InstanceRule(
        "parameters alone",
        lambda n: all(i.domain in TYPE_DOMAINS for i in n.inputs),
        lambda n: ParameterOp(out=n),
    ),
    InstanceRule("no template", lambda n: True, lambda n: Fallback(out=n)),
)
"""By preference: the first one that holds."""


def topological_members(members: list[Node]) -> list[Node]:
    inside = set(members)
    return [n for n in topological(members, oldest(inside)) if n in inside]
