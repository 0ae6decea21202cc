"""When the values of a plan need memory.

[Note: lifetimes] A value that a plan makes gets memory at the kernel that stores it and
loses it after the last kernel that reads it; results of the plan stay. Kernels run in
the order of one stream, so memory may be used again as soon as its last reader has been
launched.
"""

from hector.ir.kernels import Plan
from hector.ir.node import Node


def lifetimes(plan: Plan) -> dict[Node, tuple[int, int]]:
    """{value that the plan makes: (kernel that stores it, last kernel that needs it)};
    results of the plan have the number of kernels as their last."""
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for position, kernel in enumerate(plan.kernels):
        for node in kernel.outputs:
            first[node] = last[node] = position
        for node in kernel.operands:
            last[node] = position
    for node in plan.outputs:
        last[node] = len(plan.kernels)
    return {n: (first[n], last[n]) for n in first}
