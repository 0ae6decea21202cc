"""What an expression reads, and how: questions that the lowering asks."""

from collections.abc import Set

from hector.ir.kernels import Loop
from hector.ir.node import ROWWISE, Node, Op, oldest, stored, topological
from hector.ir.types import TARGET, TYPE_DOMAINS

ADDRESSED = frozenset((Op.RESHAPE, Op.SLICE))
"""In registers they are another address of their operand, which must have memory."""


def frontier(node: Node, stop: Set[Node]) -> list[Node]:
    """The anchors and leaves that `node` is computed from."""
    found: dict[Node, None] = {}
    stack = list(reversed(node.inputs))
    seen: set[Node] = set()
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if x in stop or x.op in (Op.INPUT, Op.GRAPH):
            found[x] = None
        else:
            stack.extend(reversed(x.inputs))
    return list(found)


def wide_reads(node: Node) -> set[Node]:
    """READs of wide rows in the expression right below `node`."""
    found: set[Node] = set()
    stack = [node]
    while stack:
        for x in stack.pop().inputs:
            if x.op is Op.READ and x.shape[1] > 1:
                found.add(x)
            elif x.op in ROWWISE and x.op is not Op.SUM_WIDTH:
                stack.append(x)
    return found


def reads_between(node: Node, dep: Node, stop: set[Node]) -> list[Node]:
    """The READ nodes on any path from `node` down to its operand `dep`."""
    between: dict[Node, None] = {node: None}
    stack = [node]
    while stack:
        for i in stack.pop().inputs:
            if i not in between and i not in stop:
                between[i] = None
                stack.append(i)
    leads = {dep}
    for x in topological(between, oldest(between)):
        if x in between and not leads.isdisjoint(x.inputs):
            leads.add(x)
    return [x for x in between if x in leads and x.op is Op.READ]


def _halves(node: Node) -> set[Node]:
    """The concats that a concat is made of: they are joined where it is stored."""
    if node.op is not Op.CONCAT:
        return set()
    inner = [i for i in node.inputs if i.op is Op.CONCAT]
    return set(inner).union(*(_halves(i) for i in inner))


def read_from_memory(node: Node, stop: set[Node]) -> set[Node]:
    """Operands that `node` needs in memory and not in registers.

    A row is split and cut by addressing, and a concat is joined by its stores. A kernel
    must not load what it stored itself: its threads would race.
    """
    halves = _halves(node)
    found = {d for d in frontier(node, stop) if d.op is Op.CONCAT} - halves
    stack, seen = [node], {node}
    while stack:
        x = stack.pop()
        if x.op in ADDRESSED:
            found.update(stored(i) for i in x.inputs)
        for i in x.inputs:
            if i not in seen and i not in stop:
                seen.add(i)
                stack.append(i)
    return found


def needed_again(loop: Loop, members: tuple[Node, ...]) -> set[Node]:
    """Dot products of wide rows, if the loop runs more than once over them because a
    row reads its group's sum: storing them is less traffic than the wide rows."""
    inside = set(members)
    group = TARGET.get((loop.domain, loop.group)) if loop.group else None
    if group is None or group in TYPE_DOMAINS:
        return set()
    least = oldest(inside)
    rereads = any(
        x.op is Op.READ
        and x.index is loop.group
        and not inside.isdisjoint(topological(x.inputs, least))
        for x in topological(members, least)
    )
    return {
        m
        for m in members
        if rereads and m.op is Op.SUM_WIDTH and m.domain is loop.domain
    }
