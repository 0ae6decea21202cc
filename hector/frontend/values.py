"""What names stand for while a layer is read: symbols over the inter-operator IR."""

from dataclasses import dataclass, field
from typing import Any

from hector.frontend.guards import Guards
from hector.ir.builder import Builder
from hector.ir.node import Node, Op
from hector.ir.types import TYPE_DOMAINS, Domain, Index


class FrontendError(ValueError):
    """A layer uses what the compiler does not know; the message has the line."""


@dataclass(frozen=True)
class Sym:
    """Rows: an IR value with the rank that PyTorch would give it.

    rank 1 is [rows], 2 is [rows, width], 3 is [rows, heads, width].
    """

    node: Node
    rank: int


@dataclass(frozen=True)
class Param:
    """An argument or a module's parameter; how it is used decides what it is."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Typed:
    """`W[e.etype]`: a parameter with one slice a type, seen from rows."""

    param: Param
    domain: Domain
    """ETYPE, NTYPE or GLOBAL."""

    @property
    def slice_shape(self) -> tuple[int, ...]:
        return (
            self.param.shape if self.domain is Domain.GLOBAL else self.param.shape[1:]
        )


@dataclass(frozen=True)
class IndexVar:
    """`src`, `dst`, `edge_type`: an index of the edges (or nodes)."""

    index: Index


@dataclass(frozen=True)
class EdgeIndex:
    """PyG's `edge_index`."""


@dataclass(frozen=True)
class GraphVar:
    """The graph of Listing 3.1."""


@dataclass(frozen=True)
class DataVar:
    """`g.ndata` and `g.edata`."""

    domain: Domain


@dataclass(frozen=True)
class RowVar:
    """A loop variable, or an endpoint of one: `e`, `n`, `e.src`."""

    domain: Domain
    """Where the loop runs."""
    via: Index | None = None
    """`e.src` is RowVar(EDGE, SRC)."""

    @property
    def data_domain(self) -> Domain:
        return Domain.NODE if self.via is not None else self.domain


@dataclass(frozen=True)
class RowLoop:
    """`g.edges()`, `g.nodes()`, `n.incoming_edges()`."""

    domain: Domain
    group: Index | None = None
    """Set for the edges of a node."""


@dataclass
class State:
    """Everything known while one layer is read."""

    builder: Builder
    num_nodes: int
    data: dict[tuple[Domain, str], Any] = field(default_factory=dict)
    """`n["name"]` and `e["name"]`: rows, or the types of nodes or edges."""
    node_params: set[str] = field(default_factory=set)
    """Arguments known to hold one row a node."""
    edge_params: set[str] = field(default_factory=set)
    """Arguments whose rows were sorted with the edges."""
    bound: dict[Node, str] = field(default_factory=dict)
    """{program input: argument it comes from}."""
    order: dict[str, Any] = field(default_factory=dict)
    """Symbols of the arguments by name."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """Tensors of modules and namespaces by path, to find them by identity."""
    inner_group: Index | None = None
    guards: Guards = field(default_factory=Guards)

    def input(self, name: str, domain: Domain, shape: tuple[int, ...]) -> Node:
        node = self.builder.input(name, domain, shape)
        self.bound[node] = name
        return node

    def rows_of(self, p: Param, domain: Domain) -> Sym:
        """An argument that holds one row a node or edge."""
        tail = p.shape[1:]
        if len(tail) > 2:
            raise FrontendError(
                f"expected {p.name} as [rows], [rows, width] or [rows, heads, width], "
                f"got {list(p.shape)}"
            )
        shape = {0: (1, 1), 1: (1, *tail), 2: tail}[len(tail)]
        return Sym(self.input(p.name, domain, shape), 1 + len(tail))

    def matrix(self, t: Typed, heads: int) -> Node:
        """A typed parameter as (heads, in, out)."""
        s = self._slice_shape(t)
        if len(s) == 2:
            return self.input(t.param.name, t.domain, (1, *s))
        if len(s) == 3 and s[0] == heads:
            return self.input(t.param.name, t.domain, s)
        raise FrontendError(
            f"expected {t.param.name} with slices [in, out] or [{heads}, in, out], got "
            f"{list(s)}"
        )

    def _slice_shape(self, t: Typed) -> tuple[int, ...]:
        if t.domain is Domain.GLOBAL and t.param.shape:
            self.guards.size(t.param.name, 0, t.param.shape[0])
        return t.slice_shape

    def vector(self, t: Typed, rows: Domain) -> Sym:
        """A typed parameter as rows that arithmetic can use."""
        s = self._slice_shape(t)
        while len(s) > 2 and s[0] == 1:
            s = s[1:]
        if len(s) > 2:
            raise FrontendError(f"{t.param.name} with slices {list(s)} is no row")
        shape = {0: (1, 1), 1: (1, *s), 2: s}[len(s)]
        if math_prod(shape) == 1:
            shape = (1, 1)
        node = self.input(t.param.name, t.domain, shape)
        return Sym(self.builder.spread(node, rows), max(len(s) + 1, 1))

    def read(self, value: Node, index: Index, domain: Domain) -> Node:
        return self.builder.read(value, index, domain)

    def same_rows(self, a: Node, b: Node) -> tuple[Node, Node]:
        """Both on one domain, constants and parameters spread."""
        if a.domain is b.domain:
            return a, b
        for x, y, flip in ((a, b, False), (b, a, True)):
            if x.domain in TYPE_DOMAINS or x.op is Op.CONST:
                x = self.builder.spread(x, y.domain)
                return (y, x) if flip else (x, y)
        raise FrontendError(
            f"expected values of the same rows, got {a.domain.value} and "
            f"{b.domain.value} values"
        )


def math_prod(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
