"""Legality of the IR as data: a list of (name, condition), checked after every pass."""

from collections.abc import Callable
from dataclasses import dataclass

from hector.ir.kernels import Gemm, Outer, Parameters, Plan, Traversal
from hector.ir.node import BINARY, LEAVES, ROWWISE, UNARY, Node, Op, Program, stored
from hector.ir.types import ROW_DOMAINS, TARGET, TYPE_DOMAINS, TYPE_INDEX


class IllegalIRError(RuntimeError):
    """A pass produced a node or plan that breaks a rule: a bug of the compiler."""


@dataclass(frozen=True)
class LegalityRule:
    """`holds` must be true of every node with one of `ops`."""

    name: str
    ops: frozenset[Op]
    holds: Callable[[Node], bool]


def _stretches(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return len(small) == len(large) and all(
        a in (1, b) for a, b in zip(small, large, strict=True)
    )


NODE_RULES = (
    LegalityRule("leaves have no operands", LEAVES, lambda n: not n.inputs),
    LegalityRule(
        "row operations stay on their rows",
        frozenset(ROWWISE),
        lambda n: all(i.domain is n.domain for i in n.inputs),
    ),
    LegalityRule(
        "operands of row arithmetic stretch to the result",
        frozenset(BINARY | UNARY | {Op.EXPAND}),
        lambda n: all(_stretches(i.shape, n.shape) for i in n.inputs),
    ),
    LegalityRule(
        "READ follows its index",
        frozenset((Op.READ,)),
        lambda n: (
            TARGET.get((n.domain, n.index)) is n.inputs[0].domain
            and n.shape == n.inputs[0].shape
        ),
    ),
    LegalityRule(
        "AGG is the adjoint of READ",
        frozenset((Op.AGG,)),
        lambda n: (
            TARGET.get((n.inputs[0].domain, n.index)) is n.domain
            and n.shape == n.inputs[0].shape
        ),
    ),
    LegalityRule(
        "LINEAR multiplies rows by a typed matrix",
        frozenset((Op.LINEAR,)),
        lambda n: (
            n.inputs[0].domain in ROW_DOMAINS
            and len(n.inputs[1].shape) == 3
            and TARGET.get((n.domain, n.index)) is n.inputs[1].domain
        ),
    ),
    LegalityRule(
        "OUTER sums rows into a type",
        frozenset((Op.OUTER,)),
        lambda n: n.domain in TYPE_DOMAINS and n.index is TYPE_INDEX[n.domain],
    ),
    LegalityRule(
        "EINSUM sees parameters only",
        frozenset((Op.EINSUM,)),
        lambda n: all(i.domain in TYPE_DOMAINS for i in n.inputs),
    ),
)

_RULES_OF = {op: tuple(r for r in NODE_RULES if op in r.ops) for op in Op}


def check_program(program: Program, after: str) -> None:
    """IllegalIRError naming the pass, the rule and the node, if a rule is broken."""
    for node in program.order():
        for rule in _RULES_OF[node.op]:
            if not rule.holds(node):
                raise IllegalIRError(f"after {after}: {rule.name}, but {node!r}")
        for operand in node.inputs:
            if operand.serial >= node.serial:
                raise IllegalIRError(f"after {after}: {node!r} reads a later node")


def check_plan(plan: Plan) -> None:
    """Every kernel finds its operands, and every output is made once."""
    ready = set(plan.given)
    for kernel in plan.kernels:
        for operand in kernel.operands:
            free = operand.op in (Op.INPUT, Op.GRAPH, Op.CONST)
            if not free and operand not in ready:
                raise IllegalIRError(f"{kernel} reads {operand!r} before it is made")
        for out in kernel.outputs:
            if out in ready:
                raise IllegalIRError(f"{out!r} is made twice")
        ready.update(kernel.outputs)
        _check_kernel(kernel)
    for out in plan.outputs:
        if out not in ready and out.op not in (Op.INPUT, Op.GRAPH):
            raise IllegalIRError(f"no kernel makes the output {out!r}")


def _check_kernel(kernel: object) -> None:
    if isinstance(kernel, Gemm | Outer):
        rows = (
            (kernel.rows,) if isinstance(kernel, Gemm) else (kernel.left, kernel.right)
        )
        for r in rows:
            if r.scale is not None and r.scale.shape != (1, 1):
                raise IllegalIRError(f"a per-row scalar of shape {r.scale.shape}")
    if isinstance(kernel, Parameters) and not kernel.stores:
        raise IllegalIRError(f"operations on parameters that store nothing: {kernel}")
    if isinstance(kernel, Traversal):
        if not kernel.stores:
            raise IllegalIRError(f"a traversal that stores nothing: {kernel}")
        _check_no_race(kernel)


def _check_no_race(kernel: Traversal) -> None:
    """Splitting and cutting a row loads it from memory: not what the kernel makes."""
    made, loaded = set(kernel.members), set(kernel.loads)
    stack, seen = list(kernel.members), set(kernel.members)
    while stack:
        x = stack.pop()
        if x.op in (Op.RESHAPE, Op.SLICE):
            source = stored(x if x.op is Op.RESHAPE else x.inputs[0])
            if source in made:
                raise IllegalIRError(f"{x!r} loads what its kernel stores: {kernel}")
        for i in x.inputs:
            if i.op is Op.CONCAT and i in made and x.op is not Op.CONCAT:
                raise IllegalIRError(f"{x!r} joins rows in registers: {kernel}")
            if i not in seen and i not in loaded:
                seen.add(i)
                stack.append(i)
