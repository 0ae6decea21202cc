"""How long a gather takes on each path: which paths the chooser tries.

[Note: Translation] The link moves about 55 GB/s (PCIe 5), but on tables beyond what the
GPU's translation caches cover, every row in random order costs one translation of its
address, and translations have a rate of their own, whatever the size of the row. In
address order one translation serves all the rows of its page. So a zero-copy gather
takes the longer of the two, bytes over link rate or translations over translation rate,
and sorting pays where it saves more translations than it costs.

[Note: Cost of a page] The GPU fetches the translations of small pages sixteen at a time
(a line of 128 bytes, 64 KiB of the table). What a line costs depends on the batch: few
rows leave the lines of the last gather in the GPU's L2 cache, the output of many pushes
them out (of a 16 GiB table: 33 MB of lines next to 6 MB of output, or next to 128). So
the cost is kept by number of rows, and beyond the last number it stays what it was.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

from pydirect.gather.request import Path
from pydirect.translation import (
    H200_CELLS,
    H200_LINK_GB_S,
    TranslationModel,
    fit_translation,
)

_SECTOR_BYTES = 32
PAGE_BYTES = 1 << 16
# A path that is foretold to take so much longer than the best gets no trial.
_HOPELESS = 3.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One gather, as far as its time depends on it."""

    num_indices: int
    row_bytes: int
    table_bytes: int
    distinct_share: float = 1.0
    """Rows that a sorted gather reads over indices: those that are distinct, as last
    surveyed, where it reads repeats once; else 1."""

    run_rows: float = 1.0
    """Mean length of runs of consecutive rows, as last surveyed; 1 when unknown."""

    aligned: bool = True
    """Whether every row starts on a 32-byte sector."""

    @property
    def useful_bytes(self) -> int:
        return self.num_indices * self.row_bytes

    @property
    def moved_bytes_a_row(self) -> int:
        """Bytes the link carries for a row: whole sectors."""
        sectors = math.ceil(self.row_bytes / _SECTOR_BYTES)
        return _SECTOR_BYTES * (sectors + (0 if self.aligned else 1))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What predictions rest on, for one device, table size and number of threads."""

    link_gbps: float
    """Zero-copy reads of long rows, GB/s."""

    dma_gbps: float
    """Pinned host-to-device copy, GB/s."""

    direct_ms: float
    """Smallest direct gather."""

    sorted_ms: float
    """Smallest sorted gather."""

    random_ns: float
    """A row of one sector line in random order."""

    sort_ns: float
    """Ordering by page, an index."""

    radix_ns: float
    """The same where repeats are looked for, read once and copied."""

    page_ns: tuple[tuple[int, float], ...]
    """Rows of a gather in address order, ascending, and what each of the 64 KiB pages
    that they touch costs then; see [Note: Cost of a page]."""

    sync_ms: float
    """Bringing an index to the CPU, and one copy."""

    cpu_ms: float
    """What a CPU gather that takes all threads costs besides its rows and bytes."""

    cpu_row_ns: float
    """CPU gather and its copy, a row, all threads."""

    cpu_byte_ns: float
    """CPU gather and its copy, a byte, all threads."""

    dma_call_us: float
    """One more copy call."""

    dma_index_ns: float
    """Looking for runs on the CPU, an index."""


def predict_ms(rates: Rates, work: Workload, path: Path) -> float:
    """Milliseconds of ``work`` on ``path``."""
    return {
        Path.DIRECT: _direct_ms,
        Path.SORTED: _sorted_ms,
        Path.CPU: _cpu_ms,
        Path.DMA: _dma_ms,
    }[path](rates, work)


def _direct_ms(rates: Rates, work: Workload) -> float:
    link_ns = work.num_indices * work.moved_bytes_a_row / rates.link_gbps
    # Rows longer than a page are translated once a page.
    pages = max(1.0, work.row_bytes / PAGE_BYTES)
    translation_ns = work.num_indices / work.run_rows * rates.random_ns * pages
    return rates.direct_ms + max(link_ns, translation_ns) / 1e6


def _sorted_ms(rates: Rates, work: Workload) -> float:
    rows = work.num_indices * work.distinct_share
    link_ns = rows * work.moved_bytes_a_row / rates.link_gbps
    translation_ns = touched_pages(rows, work) * page_ns(rates, rows)
    repeats = work.distinct_share < 1.0
    order_ns = work.num_indices * (rates.radix_ns if repeats else rates.sort_ns)
    return rates.sorted_ms + (order_ns + max(link_ns, translation_ns)) / 1e6


def touched_pages(rows: float, work: Workload) -> float:
    """Pages that hold at least one of ``rows`` rows drawn at random."""
    pages = max(1.0, work.table_bytes / PAGE_BYTES)
    touched = pages * -math.expm1(-rows / pages)
    return touched + rows * work.row_bytes / PAGE_BYTES


def page_ns(rates: Rates, rows: float) -> float:
    """Nanoseconds a page in a gather of ``rows`` rows, between the measured numbers on
    a logarithmic scale."""
    known = rates.page_ns
    if rows <= known[0][0]:
        return known[0][1]
    for (few, least), (many, most) in itertools.pairwise(known):
        if rows <= many:
            share = math.log(rows / few) / math.log(many / few)
            return least + share * (most - least)
    return known[-1][1]


def _cpu_ms(rates: Rates, work: Workload) -> float:
    row_ns = rates.cpu_row_ns + work.row_bytes * rates.cpu_byte_ns
    return rates.cpu_ms + work.num_indices * row_ns / 1e6


def _dma_ms(rates: Rates, work: Workload) -> float:
    look_ns = work.num_indices * rates.dma_index_ns
    calls_ns = work.num_indices / work.run_rows * rates.dma_call_us * 1e3
    copy_ns = max(calls_ns, work.useful_bytes / rates.dma_gbps)
    return rates.sync_ms + (look_ns + copy_ns) / 1e6


def worth_a_trial(rates: Rates, work: Workload) -> list[Path]:
    """The paths whose predicted time is not hopeless, fastest first."""
    times = {path: predict_ms(rates, work, path) for path in Path}
    limit = _HOPELESS * min(times.values())
    return sorted((p for p in Path if times[p] <= limit), key=times.__getitem__)


def reference_rates(table_bytes: int, *, large_pages: bool) -> Rates:
    """Rates for tables of ``table_bytes``, recorded on one H200 with 16 cores.

    They say which paths are worth a trial on the machine at hand, no more. Random rows
    of small pages take what `pydirect.translation` says.
    """
    if large_pages:
        return _LARGE_PAGES
    translated = reference_translation()
    row_ns = translated.random_row_ns(_SECTOR_BYTES, max(1, table_bytes))
    return dataclasses.replace(_SMALL_PAGES, random_ns=row_ns)


@functools.cache
def reference_translation() -> TranslationModel:
    """The translation model of small pages, fitted to the cells of one H200."""
    return fit_translation(H200_CELLS, link_gb_s=H200_LINK_GB_S)


_SMALL_PAGES = Rates(
    link_gbps=51.4,
    dma_gbps=55.3,
    direct_ms=0.02,
    sorted_ms=0.08,
    random_ns=0.0,
    sort_ns=0.1,
    radix_ns=0.3,
    page_ns=((16_000, 18.0), (260_000, 24.0)),
    sync_ms=0.07,
    cpu_ms=0.8,
    cpu_row_ns=1.0,
    cpu_byte_ns=0.04,
    dma_call_us=8.0,
    dma_index_ns=1.5,
)
_LARGE_PAGES = dataclasses.replace(
    _SMALL_PAGES, dma_gbps=17.0, random_ns=3.2, page_ns=((16_000, 2.0),)
)
