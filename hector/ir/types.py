"""Where the rows of a value live, and how one kind of row finds another.

The inter-operator IR (Wu, section 3.3.2) says on *what* a value is defined, nodes,
edges, or the (edge type, node) pairs of compact materialization, and never how its
rows lie in memory. A value has one row for each member of its `Domain`; a row has the
feature shape (heads, width), or (heads, in, out) for a matrix held by a type.
"""

from dataclasses import dataclass
from enum import Enum


class Domain(Enum):
    """What a value has one row for."""

    __hash__ = object.__hash__  # of millions of look-ups

    NODE = "node"
    EDGE = "edge"
    SRC_PAIR = "src_pair"
    """Unique (edge type, source node)."""
    DST_PAIR = "dst_pair"
    """Unique (edge type, destination node)."""
    ETYPE = "etype"
    NTYPE = "ntype"
    GLOBAL = "global"
    """One row."""


ROW_DOMAINS = frozenset((Domain.NODE, Domain.EDGE, Domain.SRC_PAIR, Domain.DST_PAIR))
PAIR_DOMAINS = frozenset((Domain.SRC_PAIR, Domain.DST_PAIR))
TYPE_DOMAINS = frozenset((Domain.ETYPE, Domain.NTYPE, Domain.GLOBAL))


NARROW = 16
"""Rows up to this width are kept in fp32 whatever the features are: attention scores
and softmax sums lose too much in 16 bits, and they weigh nothing."""


class Index(Enum):
    """A function from the rows of one domain to those of another."""

    __hash__ = object.__hash__

    SRC = "src"
    DST = "dst"
    ETYPE = "etype"
    NTYPE = "ntype"
    SRC_PAIR = "src_pair"
    DST_PAIR = "dst_pair"
    PAIR_NODE = "node"
    """The node of a pair."""
    ALL = "all"
    """Every row to the one row of GLOBAL."""


TARGET: dict[tuple[Domain, Index], Domain] = {
    (Domain.EDGE, Index.SRC): Domain.NODE,
    (Domain.EDGE, Index.DST): Domain.NODE,
    (Domain.EDGE, Index.ETYPE): Domain.ETYPE,
    (Domain.EDGE, Index.SRC_PAIR): Domain.SRC_PAIR,
    (Domain.EDGE, Index.DST_PAIR): Domain.DST_PAIR,
    (Domain.SRC_PAIR, Index.PAIR_NODE): Domain.NODE,
    (Domain.DST_PAIR, Index.PAIR_NODE): Domain.NODE,
    (Domain.SRC_PAIR, Index.ETYPE): Domain.ETYPE,
    (Domain.DST_PAIR, Index.ETYPE): Domain.ETYPE,
    (Domain.NODE, Index.NTYPE): Domain.NTYPE,
    (Domain.NODE, Index.ALL): Domain.GLOBAL,
    (Domain.EDGE, Index.ALL): Domain.GLOBAL,
    (Domain.SRC_PAIR, Index.ALL): Domain.GLOBAL,
    (Domain.DST_PAIR, Index.ALL): Domain.GLOBAL,
}
"""The domain that an index leads to; a pair that is missing is illegal."""

COMPOSE: dict[tuple[Domain, Index, Index], Index] = {
    (Domain.EDGE, Index.SRC_PAIR, Index.PAIR_NODE): Index.SRC,
    (Domain.EDGE, Index.DST_PAIR, Index.PAIR_NODE): Index.DST,
    (Domain.EDGE, Index.SRC_PAIR, Index.ETYPE): Index.ETYPE,
    (Domain.EDGE, Index.DST_PAIR, Index.ETYPE): Index.ETYPE,
    (Domain.EDGE, Index.SRC_PAIR, Index.ALL): Index.ALL,
    (Domain.EDGE, Index.DST_PAIR, Index.ALL): Index.ALL,
    (Domain.EDGE, Index.SRC, Index.ALL): Index.ALL,
    (Domain.EDGE, Index.DST, Index.ALL): Index.ALL,
    (Domain.SRC_PAIR, Index.PAIR_NODE, Index.ALL): Index.ALL,
    (Domain.DST_PAIR, Index.PAIR_NODE, Index.ALL): Index.ALL,
}
"""(start, first index, second index) -> the one index that does both."""

TYPE_INDEX: dict[Domain, Index] = {
    Domain.ETYPE: Index.ETYPE,
    Domain.NTYPE: Index.NTYPE,
    Domain.GLOBAL: Index.ALL,
}
"""The index by which a row finds the parameters of a type domain."""


@dataclass(frozen=True)
class RowType:
    """Type of a value: its domain and the feature shape of one row."""

    domain: Domain
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Elements of one row."""
        n = 1
        for s in self.shape:
            n *= s
        return n

    def __str__(self) -> str:
        return f"{self.domain.value}[{', '.join(map(str, self.shape))}]"
