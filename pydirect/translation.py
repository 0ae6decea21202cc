"""How fast rows of a large host table can be read at random: translation reach.

On an H200 random zero-copy reads are not bound by PCIe requests but by address
translation: whatever the row size, so many rows a second and fewer as the table grows.
A GPU translates host addresses through caches, each of which reaches so many bytes. A
row read at random misses a cache of reach R in a table of T bytes with probability
max(0, 1 - R/T), and each miss occupies the walkers for a while. Rows in sorted order
miss once a page. The fit is to medians measured once; `fit_translation` refits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PAGE_BYTES = 2 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured cell."""

    row_bytes: int
    table_bytes: int
    gb_s: float
    """Useful bytes a second, in 10^9."""


@dataclass(frozen=True, kw_only=True)
class TranslationModel:
    """Nanoseconds a row, from the sizes of row and table."""

    reaches_bytes: tuple[int, ...]
    """Bytes that each level of translation reaches; 0: paid by every row."""

    miss_ns: tuple[float, ...]
    """What a miss of each level costs, in nanoseconds of the whole GPU."""

    link_gb_s: float
    """Payload the link carries with whole lines, 10^9 bytes a second."""

    drag: float = 0.0
    """Share of a row's time on the link that misses keep from overlapping."""

    def random_row_ns(self, row_bytes: int, table_bytes: int) -> float:
        """A row read at random."""
        link = row_bytes / self.link_gb_s
        levels = zip(self.reaches_bytes, self.miss_ns, strict=True)
        walk = sum(ns * _miss(reach, table_bytes) for reach, ns in levels)
        largest = max((r for r in self.reaches_bytes if r), default=0)
        first = min((r for r in self.reaches_bytes if r), default=largest)
        return max(link, walk + self.drag * _miss(first, table_bytes) * link)

    def sorted_row_ns(self, row_bytes: int, table_bytes: int, num_rows: int) -> float:
        """One of ``num_rows`` rows read in the order of their addresses."""
        link = row_bytes / self.link_gb_s
        pages = min(num_rows, table_bytes / PAGE_BYTES)
        return max(link, sum(self.miss_ns) * pages / num_rows)

    def random_gb_s(self, row_bytes: int, table_bytes: int) -> float:
        """Useful bandwidth of random rows, 10^9 bytes a second."""
        return row_bytes / self.random_row_ns(row_bytes, table_bytes)

    def sorted_gb_s(self, row_bytes: int, table_bytes: int, num_rows: int) -> float:
        """Useful bandwidth of sorted rows, 10^9 bytes a second."""
        return row_bytes / self.sorted_row_ns(row_bytes, table_bytes, num_rows)


def _miss(reach_bytes: int, table_bytes: int) -> float:
    return max(0.0, 1.0 - reach_bytes / table_bytes)


def fit_translation(
    cells: Sequence[Measured],
    *,
    link_gb_s: float,
    reaches_bytes: tuple[int, ...] = (0, GIB, 4 * GIB),
    drag: float = 0.35,
) -> TranslationModel:
    """Fit the miss costs to cells that the link does not bound.

    Least squares without negative costs, by active set: a level whose cost comes out
    negative is left out and the rest fitted again.

    Raises:
        ValueError: fewer such cells than levels.
    """
    bound = [c for c in cells if c.gb_s < 0.95 * link_gb_s]
    if len(bound) < len(reaches_bytes):
        raise ValueError(
            f"fit_translation expects at least {len(reaches_bytes)} cells below the "
            f"link's {link_gb_s} GB/s, got {len(bound)}: measure smaller rows"
        )
    first = min(r for r in reaches_bytes if r)
    times = np.array(
        [
            c.row_bytes / c.gb_s
            - drag * _miss(first, c.table_bytes) * c.row_bytes / link_gb_s
            for c in bound
        ]
    )
    levels = np.array([[_miss(r, c.table_bytes) for r in reaches_bytes] for c in bound])
    active = np.ones(len(reaches_bytes), dtype=bool)
    costs = np.zeros(len(reaches_bytes))
    while active.any():
        # Relative errors: fast cells matter as much as slow ones.
        weighted = levels[:, active] / times[:, None]
        solved, *_ = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)
        costs[:] = 0
        costs[active] = solved
        if (solved >= 0).all():
            break
        active &= costs >= 0
    return TranslationModel(
        reaches_bytes=reaches_bytes,
        miss_ns=tuple(float(c) for c in costs),
        link_gb_s=link_gb_s,
        drag=drag,
    )


# Random rows from pinned memory, one H200 behind PCIe 5 (2026-11): (row bytes, GB/s on
# a table of 1, 4 and 16 GiB).
H200_CELLS = tuple(
    Measured(row_bytes=row, table_bytes=gib * GIB, gb_s=gb_s)
    for row, *measured in (
        (128, 13.5, 6.1, 4.3),
        (256, 27.0, 11.4, 8.1),
        (512, 51.0, 20.7, 15.5),
        (1024, 51.0, 37.0, 30.0),
        (4096, 51.0, 51.0, 51.0),
    )
    for gib, gb_s in zip((1, 4, 16), measured, strict=True)
)
H200_LINK_GB_S = 51.0
