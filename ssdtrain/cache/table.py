"""The compiled plan: what happens to the n-th tensor that a lane's forward saves.

[Note: compiled plan]
Under a plan the first lane of each kind is served by the general path of the cache,
which identifies every saved tensor and searches for recipes. A `Binding` watches it and
leaves a `Table`: one row for each call of `pack`, in order. Later lanes of the kind
look their rows up. A row checks that the tensor may be treated as the row says, and
acts. What it checks is what safety needs, at every step: that a kept tensor is no
parameter (`[Note: parameters]`), its version, and for moved bytes their identity
(`[Note: identity]`). A tensor of another length is served as well ([Note: sizes]). One
of another dtype or rank, or one too many, ends the table for its lane: the rest goes
the general way, and the lane is counted as a plan mismatch.
Most of what is kept is *quiet*: nothing is sent, released or loaded when it is packed
or used. Such rows do not even count. What they would have counted, marks and bytes,
stands at the next row of the lane that does (`QuietCounts`), so releases and loads come
exactly where the plan wants them.
Rows act on one tensor only, so a program that saves other tensors in other places gets
more traffic or more memory, never other gradients.
(tests/ssdtrain/cache/test_table.py)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from ssdtrain.cache.quiet import Passage
from ssdtrain.cache.record import Handle
from ssdtrain.cache.rows import BY_NUMBER, RegionItemRow, Row, bare
from ssdtrain.cache.sizes import MOST, TensorMetadata
from ssdtrain.cache.spec import NOTHING, QuietCounts
from ssdtrain.counters import Count

Pack = Callable[[Tensor], Handle]
Unpack = Callable[[Handle], Tensor]
Hooks = tuple[Pack, Unpack]


class Totals(NamedTuple):
    """What one row adds to the counters."""

    num_records: int = 0
    kept_bytes: int = 0
    parameter_bytes: int = 0


class Sizes(NamedTuple):
    """What a row that opens an item says of its lane's size: [Note: sizes]."""

    planned_bytes: int = 0
    own_bytes: int = 0
    """In the lane that the table was made of."""


@dataclass(frozen=True)
class RegionPart:
    """The rows of one region call's forward: [Note: saved by index]."""

    first: int
    end: int
    marking: dict[int, RegionItemRow]
    """Those with something to do when they are saved, by index."""
    using: dict[int, RegionItemRow]
    """Those with something to do when they are used, by index."""
    stored: dict[int, tuple[int, Row]]
    """Rows of what is stored, and their numbers, by index."""
    looks: tuple[tuple[TensorMetadata | None, int], ...]
    """Of each index: what it looked like, and the bytes that its row counts."""


@dataclass(frozen=True)
class Table:
    """Rows in the order of `pack`; the last one is `EndRow`."""

    rows: tuple[Row, ...]
    totals: tuple[Totals, ...]
    """Of each row."""
    behind: QuietCounts
    """Quiet rows after the last one that counts."""
    sizes: tuple["Sizes", ...]
    """Of each row."""
    is_resized: bool
    """Whether the lane that it was made of had another size than the plan's."""
    looks: tuple[TensorMetadata | None, ...]
    """Of each row; None where another size is not the row's to serve."""
    passages: dict[int, Passage]
    """Calls of layers that run without hooks, by number: [Note: quiet calls]."""
    parts: dict[int, RegionPart]
    """Of region calls that run again, by number."""

    @cached_property
    def telling(self) -> dict[int, Any]:
        """Rows by number whose use has quiet ones before it to tell of."""
        rows = enumerate(map(bare, self.rows))
        known = ((number, row) for number, row in rows if isinstance(row, BY_NUMBER))
        return {n: row for n, row in known if row.used_behind is not NOTHING}

    @property
    def most(self) -> int:
        """By how much a dimension may differ from its row's: [Note: sizes]."""
        return MOST * MOST if self.is_resized else MOST

    def sizes_of(self, num_packed: int) -> Sizes:
        """The sum of so many rows."""
        whole = num_packed == len(self.sizes)
        return self._sizes if whole else _sum(self.sizes[:num_packed])

    @cached_property
    def _sizes(self) -> Sizes:
        return _sum(self.sizes)

    @cached_property
    def first_item(self) -> int:
        """Row that opens the first item; -1: none does."""
        rows = enumerate(self.sizes)
        return next((n for n, sizes in rows if sizes.own_bytes), -1)

    @cached_property
    def first_ratio(self) -> float:
        """Size of that item in the lane that the table was made of, over the plan's."""
        if self.first_item < 0:
            return 1.0
        planned_bytes, own_bytes = self.sizes[self.first_item]
        return own_bytes / planned_bytes

    @cached_property
    def num_items(self) -> int:
        """Rows that open an item."""
        return sum(sizes.planned_bytes > 0 for sizes in self.sizes)

    def counters(self, num_packed: int) -> dict[Count, int]:
        """What the counters are told of kept rows and parameters, once a lane."""
        whole = num_packed == len(self.totals)
        return dict(self._counters) if whole else self._counted(num_packed)

    @cached_property
    def _counters(self) -> dict[Count, int]:
        return self._counted(len(self.totals))

    def _counted(self, num_packed: int) -> dict[Count, int]:
        records, kept, parameters = (
            sum(column)
            for column in zip(Totals(), *self.totals[:num_packed], strict=True)
        )
        return {
            Count.RECORDS: records,
            Count.SAVED: kept,
            Count.KEPT: kept,
            Count.PARAMETERS: parameters,
        }


def _sum(sizes: Sequence[Sizes]) -> Sizes:
    planned = sum(each.planned_bytes for each in sizes)
    return Sizes(planned, sum(each.own_bytes for each in sizes))
