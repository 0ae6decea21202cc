"""When the values of a plan need memory.

[Note: lifetimes] A value that a plan makes gets memory at the kernel that stores it and
loses it after the last kernel that reads it; results of the plan stay. Kernels run in
the order of one stream, so memory may be used again as soon as its last reader has been
launched. What a kernel reads through a view is read there. Sums into types that no
kernel of the plan reads (`late_sums`) are completed after its last kernel: their
partial rows live that long.
"""

from hector.ir.kernels import Outer, Parameters, Plan, Region, Traversal
from hector.ir.node import Node, Op
from hector.ir.types import TYPE_DOMAINS
from hector.passes.parameters import sums_types


def lifetimes(plan: Plan) -> dict[Node, tuple[int, int]]:
    """{value that the plan makes: (kernel that stores it, last kernel that needs it)};
    results of the plan have the number of kernels as their last."""
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for position, kernel in enumerate(plan.kernels):
        for node in kernel.outputs:
            first[node] = last[node] = position
        for node in kernel.operands:
            last.update(dict.fromkeys(_with_bases(node), position))
    for node in plan.outputs:
        last[node] = len(plan.kernels)
    return {n: (first[n], last[n]) for n in first}


def _with_bases(node: Node) -> list[Node]:
    """A value, and those that it is a view of."""
    found = [node]
    while found[-1].op is Op.RESHAPE:
        found.append(found[-1].inputs[0])
    return found


def late_sums(plan: Plan) -> frozenset[Node]:
    """Sums into types that the plan makes and none of its kernels reads."""
    read = {node for kernel in plan.kernels for node in kernel.operands}
    made = {
        node
        for kernel in plan.kernels
        if isinstance(kernel, Outer | Region)
        for node in kernel.outputs
        if node.domain in TYPE_DOMAINS
        and (not isinstance(kernel, Parameters) or sums_types(node))
    }
    return frozenset((made & set(plan.outputs)) - read)


def constants(plan: Plan) -> frozenset[Node]:
    """Values of rows that depend on the graph alone, such as one over a degree."""
    found: set[Node] = set()
    for kernel in plan.kernels:
        if isinstance(kernel, Traversal) and all(
            n.op is Op.GRAPH or n in found for n in kernel.operands
        ):
            found.update(kernel.outputs)
    return frozenset(found)
