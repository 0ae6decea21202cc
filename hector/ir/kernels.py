"""The intra-operator IR: what each generated kernel does, and how (Wu, 3.3.3).

Four kinds of instance cover a lowered program: `Gemm` (Y[S] = X[G] x W[T] with a gather
and a per-row scalar), `Outer` (its weight gradient), `Traversal` (node and edge
loops) and `Parameters` (contractions between parameters; those of two matrices are a
`ParameterOp`, left to PyTorch's BMM as in Wu). What is fixed here is semantics and data
access; speed is a `Schedule`, separate data (Table 3.6).
"""

from dataclasses import dataclass, field
from enum import Enum

from hector.ir.node import Node
from hector.ir.types import Domain, Index


@dataclass(frozen=True, kw_only=True)
class GemmRows:
    """A GEMM operand, row i: scale[..] * value[gather(i)]; see `passes.lower`."""

    value: Node
    gather: Index | None = None
    """None: row i itself."""
    scale: Node | None = None
    """A per-row scalar on the result's rows (or their gathered ones)."""
    scale_gather: Index | None = None

    def __str__(self) -> str:
        rows = f"%{self.value.serial}[{self.gather.value if self.gather else 'i'}]"
        if self.scale is None:
            return rows
        where = self.scale_gather.value if self.scale_gather else "i"
        return f"%{self.scale.serial}[{where}] * {rows}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.value,) if self.scale is None else (self.value, self.scale)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """out[i] = rows(i) @ weight[type(i)], head by head."""

    out: Node
    rows: GemmRows
    weight: Node
    type_index: Index
    transpose: bool
    bias: Node | None = None
    """A vector a type, added to each row."""

    @property
    def outputs(self) -> tuple[Node, ...]:
        return (self.out,)

    @property
    def operands(self) -> tuple[Node, ...]:
        more = () if self.bias is None else (self.bias,)
        return (*self.rows.nodes, self.weight, *more)

    def __str__(self) -> str:
        t = ".T" if self.transpose else ""
        kind = self.type_index.value
        bias = "" if self.bias is None else f" + %{self.bias.serial}[{kind}]"
        return (
            f"gemm      %{self.out.serial}[i] = ({self.rows}) @ "
            f"%{self.weight.serial}[{kind}]{t}{bias} : {self.out.type}"
        )


@dataclass(frozen=True, kw_only=True)
class Outer:
    """out[t] = sum over rows i of type t of left(i) (outer) right(i)."""

    out: Node
    left: GemmRows
    right: GemmRows
    domain: Domain
    """Domain of the rows that are summed over."""
    type_index: Index

    @property
    def outputs(self) -> tuple[Node, ...]:
        return (self.out,)

    @property
    def operands(self) -> tuple[Node, ...]:
        return (*self.left.nodes, *self.right.nodes)

    def __str__(self) -> str:
        return (
            f"outer     %{self.out.serial}[{self.type_index.value}] += "
            f"({self.left}).T @ ({self.right}) : {self.out.type}, "
            f"i in {self.domain.value}"
        )


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a traversal walks: rows of `domain`, grouped by `group` if given.

    With a group the outer loop runs over the groups (nodes, pairs or types) and the
    inner one over the rows of each; without, there is one loop.
    """

    domain: Domain
    group: Index | None = None

    def __str__(self) -> str:
        if self.group is None:
            return f"for i in {self.domain.value}"
        return f"for g in {self.group.value}: for i in {self.domain.value}(g)"


@dataclass(frozen=True, kw_only=True)
class Region:
    """Operations in one generated kernel."""

    members: tuple[Node, ...]
    """Values computed here, operands first."""
    stores: tuple[Node, ...]
    """The members that others read: only these get memory."""
    loads: tuple[Node, ...]
    """Values read from memory."""

    @property
    def outputs(self) -> tuple[Node, ...]:
        return self.stores

    @property
    def operands(self) -> tuple[Node, ...]:
        return self.loads


@dataclass(frozen=True, kw_only=True)
class Traversal(Region):
    """Row operations and reductions over one loop nest; what is not stored is
    recomputed in registers."""

    loop: Loop

    def __str__(self) -> str:
        body = "".join(f"\n            {m!r}" for m in self.members)
        stores = ", ".join(f"%{n.serial}" for n in self.stores)
        return f"traversal {self.loop}: store {stores}{body}"


@dataclass(frozen=True, kw_only=True)
class _OneNode:
    """A kernel that computes a single node from that node's inputs."""

    out: Node

    @property
    def outputs(self) -> tuple[Node, ...]:
        return (self.out,)

    @property
    def operands(self) -> tuple[Node, ...]:
        return self.out.inputs


@dataclass(frozen=True, kw_only=True)
class ParameterOp(_OneNode):
    """An operation on parameters alone; rows of nodes or edges are never involved."""

    def __str__(self) -> str:
        return f"parameter {self.out!r}"


@dataclass(frozen=True, kw_only=True)
class Parameters(Region):
    """Operations on parameters, none of which reads a contraction among them; see
    `passes.parameters`."""

    def __str__(self) -> str:
        return "\n".join(f"parameter {m!r}" for m in self.members)


@dataclass(frozen=True, kw_only=True)
class Fallback(_OneNode):
    """A row operation that no template covers: run by PyTorch, counted, reported."""

    def __str__(self) -> str:
        return f"fallback  {self.out!r}"


Kernel = Gemm | Outer | Traversal | ParameterOp | Parameters | Fallback


class SegmentMapping(Enum):
    """Who walks a group's rows in a traversal (Table 3.6: parallel strategies)."""

    PROGRAM = "program"
    """One program a group, its lanes over the rows: for large groups."""
    LANE = "lane"
    """One lane a group, so one program takes several: for small groups."""
    SPLIT = "split"
    """Two launches: PROGRAM for the groups of more than `heavy_rows` rows, LANE for all
    others. Starting a program costs as much as summing a few rows, so millions of small
    groups must share programs; but a lane walks its group alone."""
    TWO_STEPS = "two-steps"
    """Two launches of PROGRAM: in wide steps for the groups of more than `heavy_rows`
    rows, in steps of `block` for all others. For large groups of which a few are so
    large that one program would walk them when all others have ended."""

    @property
    def is_split(self) -> bool:
        """Whether heavy groups have a launch of their own."""
        return self in (SegmentMapping.SPLIT, SegmentMapping.TWO_STEPS)


@dataclass(frozen=True, kw_only=True)
class GemmSchedule:
    """How a GEMM instance runs; every field is a tuning axis."""

    block_rows: int = 64
    block_cols: int = 64
    block_inner: int = 64
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, kw_only=True)
class OuterSchedule:
    """How a weight gradient runs."""

    chunk_rows: int = 1024
    """Rows that one program sums; partial results are then added in a fixed order."""
    block_rows: int = 32
    block_left: int = 64
    block_right: int = 64
    num_warps: int = 4
    num_stages: int = 2


ALL_COLUMNS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TraversalSchedule:
    """How a traversal runs."""

    mapping: SegmentMapping = SegmentMapping.PROGRAM
    block: int = 16
    """PROGRAM: rows of a group taken at once. LANE and ungrouped: rows a program.
    SPLIT: groups a program of the small ones."""
    heavy_first: bool = False
    """Row remapping: start with the largest groups. Two launches always do."""
    heavy_rows: int = 64
    """Two launches: rows of the largest group of the second."""
    heavy_block: int = 64
    """Two launches: rows of a larger group taken at once."""
    heavy_warps: int = 8
    """Two launches: warps of the program that walks a larger group."""
    chunk_rows: int = 1024
    """For sums into types: rows one program takes."""
    block_columns: int = ALL_COLUMNS
    """Columns of a program where columns do not meet; see [Note: columns apart]."""
    in_order: bool = False
    """The rows of a group lie one after another: no list of them is read."""
    ends_in_order: bool = False
    """Where the rows of a group lead is kept in the list's order, and not looked up
    through the list: one array more, and one read less that waits for another."""
    num_warps: int = 2
    num_stages: int = 2


Schedule = GemmSchedule | OuterSchedule | TraversalSchedule


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A lowered program: kernels in launch order."""

    kernels: tuple[Kernel, ...]
    outputs: tuple[Node, ...]
    given: tuple[Node, ...] = field(default=())
    """Values that must be bound before the plan runs."""

    def fallbacks(self) -> tuple[Fallback, ...]:
        return tuple(k for k in self.kernels if isinstance(k, Fallback))

    def __str__(self) -> str:
        return "\n".join(str(k) for k in self.kernels)
