"""Rewriting of IR graphs by lists of named rules."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hector.ir.builder import Builder
from hector.ir.node import Node, Op, Program, topological
from hector.ir.types import RowType

MAX_STEPS = 64
"""Rules applied to one node before a loop between rules is assumed."""


@dataclass(frozen=True)
class Rule:
    """A rewrite: `apply` gives the replacement of a node, or None."""

    name: str
    ops: frozenset[Op]
    apply: Callable[[Builder, Node], Node | None]


def rule(
    name: str, *ops: Op
) -> Callable[[Callable[[Builder, Node], Node | None]], Rule]:
    """Decorator: a function from (builder, node) as a named rule on `ops`."""
    return lambda fn: Rule(name, frozenset(ops), fn)


def rebuild(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
    """`node` on other operands of the same types."""
    if inputs == node.inputs:
        return node
    if [i.type for i in inputs] == [i.type for i in node.inputs]:
        return b.make(node.op, inputs, node.type, **dict(node.attrs))
    return retype(b, node, inputs)


def retype(b: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
    """`node` on operands of another domain, or narrower rows (same result shape)."""
    kind = RowType(inputs[0].domain, node.shape)
    return b.make(node.op, inputs, kind, **dict(node.attrs))


class Rewriter:
    """Applies rules bottom-up until none fires; results are shared between calls."""

    def __init__(self, b: Builder, rules: Sequence[Rule]) -> None:
        self.b = b
        self._by_op: dict[Op, list[Rule]] = {}
        for r in rules:
            for op in r.ops:
                self._by_op.setdefault(op, []).append(r)
        self._done: dict[Node, Node] = {}

    def __call__(self, node: Node) -> Node:
        for n in topological([node]):
            if n not in self._done:
                inputs = tuple(self._done[i] for i in n.inputs)
                self._done[n] = self._fixpoint(rebuild(self.b, n, inputs))
        return self._done[node]

    def _fixpoint(self, node: Node) -> Node:
        for _ in range(MAX_STEPS):
            if node in self._done:
                return self._done[node]
            better = self._once(node)
            if better is None:
                self._done[node] = node
                return node
            # A replacement may contain new nodes below its root.
            inputs = tuple(self(i) for i in better.inputs)
            node = rebuild(self.b, better, inputs)
        raise RecursionError(f"rewrite rules do not terminate on {node}")

    def _once(self, node: Node) -> Node | None:
        for r in self._by_op.get(node.op, ()):
            better = r.apply(self.b, node)
            if better is not None and better is not node:
                if better.type != node.type:
                    raise TypeError(f"rule {r.name} turned {node} into {better}")
                return better
        return None


def rewrite(b: Builder, program: Program, rules: Iterable[Rule]) -> Program:
    """The program with every rule applied until none fires."""
    run = Rewriter(b, tuple(rules))
    return Program(outputs=tuple((name, run(node)) for name, node in program))
