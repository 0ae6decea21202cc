"""Which statement of a traversal runs in which pass over a group's rows.

[Note: phases] A sum over a group that a row of the same group reads (the maximum of a
softmax) must be complete first, so the inner loop runs once a phase: phase 0 makes the
sums that read none, phase 1 those that read phase 0, and so on. A statement is emitted
at the outermost level where its operands are known: what depends on the group alone
stands before the loop (Wu's hoisting), partial sums stay in registers until a
group ends. A narrow row that an earlier phase stored (the dot product of two wide ones)
is read back after a barrier of the program, not computed from the wide rows again.

[Note: columns apart] Where no operation joins columns, a launch may take some columns
of all groups before it takes others: the rows that it gathers meanwhile are a part of
the whole table that stays in the L2 cache. Groups are walked once a part, so this is
for walks of one phase.
"""

from hector.ir.kernels import Traversal
from hector.ir.node import Node, Op
from hector.ir.types import ROW_DOMAINS


def phases_of(k: Traversal) -> list[list[Node]]:
    """The members of each phase, operands first; see [Note: phases]."""
    at: dict[Node, int] = {}
    for node in k.members:
        below = _below(k, node, at)
        is_group = node.domain is not k.loop.domain and not is_sum(k, node)
        at[node] = max((below[d] - (1 if is_group else 0) for d in below), default=0)
        at[node] = max(at[node], 0)
    count = 1 + max(at.values(), default=0)
    return [[n for n in k.members if at[n] == p] for p in range(count)]


def _below(k: Traversal, node: Node, at: dict[Node, int]) -> dict[Node, int]:
    """{member operand: first phase in which a row may read it}."""
    found: dict[Node, int] = {}
    stack, seen = list(node.inputs), set()
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if x in at:
            on_rows = x.domain is k.loop.domain and not is_sum(k, x)
            found[x] = at[x] + (0 if on_rows else 1)
        elif x not in k.loads:
            stack.extend(x.inputs)
    return found


def is_sum(k: Traversal, node: Node) -> bool:
    """Whether the traversal reduces a group to this node."""
    return node.op is Op.AGG and node.index is k.loop.group


def has_heads(members: tuple[Node, ...]) -> bool:
    """Whether any row in registers has several heads."""
    stack, seen = list(members), set()
    while stack:
        x = stack.pop()
        if x in seen or len(x.shape) != 2:
            continue
        seen.add(x)
        if x.domain in ROW_DOMAINS or x in members:
            if x.shape[0] > 1:
                return True
            stack.extend(x.inputs)
    return False


JOINS = (Op.SUM_WIDTH, Op.SUM_HEADS, Op.RESHAPE, Op.SLICE, Op.CONCAT)


def separable_width(k: Traversal) -> int | None:
    """The one width of the wide rows of a walk whose columns do not meet, else None."""
    if k.loop.group is None or len(phases_of(k)) > 1 or has_heads(k.members):
        return None
    values = {*k.members, *k.loads, *(i for m in k.members for i in m.inputs)}
    if any(v.op in JOINS for v in values) or any(len(v.shape) != 2 for v in values):
        return None
    widths = {v.shape[1] for v in values} - {1}
    sums = [m for m in k.members if is_sum(k, m)]
    if len(widths) != 1 or any(n.shape[1] == 1 for n in (*sums, *k.stores)):
        return None
    return widths.pop()
