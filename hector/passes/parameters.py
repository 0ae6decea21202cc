"""Joins operations on parameters into generated kernels.

[Note: parameter blocks] A product of two weights is little work for the device and as
much for the host as any launch: as an operation of PyTorch, with the casts, views and
copies of its operands, tens of microseconds. Reordering takes two such products
forward and six backward in an attention layer, more than the rest of a small graph's
step. So operations that follow one another become one kernel, forward and backward
alike: what is computed element by element (sums, outer products) is recomputed in the
registers of whoever needs it, and only a contraction that another one reads begins a
new kernel. Products of two matrices stay with PyTorch, whose kernels use tensor cores.
"""

from collections.abc import Iterable, Iterator
from math import prod

from hector.ir.kernels import Kernel, ParameterOp, Parameters
from hector.ir.node import BINARY, UNARY, Node, Op
from hector.ir.types import Domain

NARROW_SIDE = 16
"""Most rows, columns or terms of a product that is generated: a few vectors."""
_POINTWISE = (BINARY | UNARY | {Op.EXPAND}) - {Op.LEAKY_RELU}


def inner_letters(node: Node) -> list[tuple[str, int]]:
    """The axes that a contraction sums over, with their sizes, but for the types."""
    left, right = str(node.attr("equation")).split("->")
    sizes = _sizes(node, left)
    return [(c, n) for c, n in sizes.items() if c not in right and n > 1]


def sums_types(node: Node) -> bool:
    """Whether a contraction sums over types."""
    typed = any(i.domain is not Domain.GLOBAL for i in node.inputs)
    return node.op is Op.EINSUM and node.domain is Domain.GLOBAL and typed


def reduces(node: Node) -> bool:
    """Whether an element needs many of an operand."""
    return node.op is Op.EINSUM and (sums_types(node) or bool(inner_letters(node)))


def _sizes(node: Node, left: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for letters, operand in zip(left.split(","), node.inputs, strict=True):
        found.update(zip(letters, operand.shape, strict=True))
    return found


def generated(node: Node) -> bool:
    """Whether a generated kernel computes this operation on parameters."""
    if node.op is not Op.EINSUM:
        return node.op in _POINTWISE
    if len(node.inputs) != 2:
        return False
    left, right = str(node.attr("equation")).split("->")
    a, b = left.split(",")
    sizes = _sizes(node, left)
    rows = prod(sizes[c] for c in right if c in a and c not in b)
    columns = prod(sizes[c] for c in right if c in b and c not in a)
    terms = prod(size for _, size in inner_letters(node))
    return min(rows, columns, terms) <= NARROW_SIDE


def join(kernels: Iterable[Kernel], outputs: Iterable[Node]) -> tuple[Kernel, ...]:
    """The kernels with operations on parameters joined; see [Note: parameter
    blocks]."""
    kernels = tuple(kernels)
    found: list[Kernel] = []
    run: list[Node] = []
    for position, kernel in enumerate(kernels):
        if _joins(kernel):
            run += kernel.outputs
        if run and (not _joins(kernel) or position == len(kernels) - 1):
            inside = set(run)
            wanted = set(outputs)
            for other in kernels:
                if not inside.intersection(other.outputs):
                    wanted.update(other.operands)
            found += _blocks(run, wanted)
            run = []
        if not _joins(kernel):
            found.append(kernel)
    return tuple(found)


def _joins(kernel: Kernel) -> bool:
    if not isinstance(kernel, ParameterOp):
        return False
    return kernel.out.op is Op.RESHAPE or generated(kernel.out)


def _blocks(run: list[Node], wanted: set[Node]) -> Iterator[Kernel]:
    """The kernels of one run, of which `wanted` is read outside; a view that is stays
    one, after what it is a view of."""
    members = [n for n in run if n.op is not Op.RESHAPE]
    inside, wanted = set(run), set(wanted)
    for node in reversed(run):
        if node.op is Op.RESHAPE and node in wanted:
            wanted.update(node.inputs)
    views = [n for n in run if n.op is Op.RESHAPE and n in wanted]
    level: dict[Node, int] = {}
    for node in members:
        below = [d for d in _operands(node, inside) if d in inside]
        level[node] = max((level[d] + reduces(d) for d in below), default=0)
    for node in members:
        below = _operands(node, inside)
        wanted |= {d for d in below if d in level and level[d] < level[node]}
    for step in sorted(set(level.values())):
        mine = [n for n in members if level[n] == step]
        loads: dict[Node, None] = {}
        for node in mine:
            below = _operands(node, inside)
            loads.update((d, None) for d in below if level.get(d) != step)
        stores = tuple(n for n in mine if n in wanted)
        if stores:
            yield Parameters(members=tuple(mine), stores=stores, loads=tuple(loads))
    yield from (ParameterOp(out=v) for v in views)


def _operands(node: Node, inside: set[Node]) -> list[Node]:
    """What a node reads, seen through the views of its run."""
    found = []
    for operand in node.inputs:
        while operand.op is Op.RESHAPE and operand in inside:
            operand = operand.inputs[0]
        if operand.op is not Op.CONST:
            found.append(operand)
    return found
