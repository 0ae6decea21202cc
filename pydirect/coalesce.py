"""Which PCIe requests a kernel makes when it reads host memory in place.

The rules (S. W. Min, dissertation, section 2.3): the 32-byte sectors that one warp
instruction touches inside one 128-byte line become one request for each run of adjacent
sectors: 32, 64, 96 or 128 bytes. No cache is modelled, and lanes that are masked off
read nothing. Pure arithmetic on addresses: runs anywhere.
"""

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SECTOR_BYTES = 32
LINE_BYTES = 128
WARP_LANES = 32
HEADER_BYTES = 18
"""Of a completion packet on the link, at least (section 2.3)."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests counted by size."""

    counts: tuple[int, int, int, int]
    """Of 32, 64, 96 and 128 bytes."""

    useful_bytes: int
    """What the kernel asked for."""

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def moved_bytes(self) -> int:
        """Payload on the link."""
        return SECTOR_BYTES * sum(n * (i + 1) for i, n in enumerate(self.counts))

    @property
    def full_share(self) -> float:
        """Share of requests that fetch a whole line."""
        return self.counts[3] / max(1, self.total)

    @property
    def wire_efficiency(self) -> float:
        """Useful bytes over payload and headers. For ranking: too pessimistic by some
        ten percent against measured bandwidth."""
        wire = self.moved_bytes + HEADER_BYTES * self.total
        return self.useful_bytes / max(1, wire)


class Access(enum.Enum):
    """How warps walk over rows or adjacency lists."""

    STRIDED = "strided"  # one thread a list (EMOGI's naive kernel)
    MERGED = "merged"  # one warp a list, from its first element
    ALIGNED = "aligned"  # one warp a list, from the line before its first element
    INDEXED = "indexed"  # one thread an element of the result (PyTorch's index kernel)
    SHIFTED = "shifted"  # the same with the circular shift of Figure 4.5


def requests_of(warps: Integers, addresses: Integers) -> list[tuple[int, int]]:
    """The requests of single loads: (first byte, bytes), by warp and address.

    Args:
        warps: which warp instruction each load belongs to, shape (num_loads,).
        addresses: first byte of each load, shape (num_loads,); loads are of at most a
            sector and aligned to themselves.
    """
    sectors = addresses // SECTOR_BYTES
    base = int(sectors.max()) + 1 if len(sectors) else 1
    warp, sector = np.divmod(np.unique(warps * base + sectors), base)
    per_line = LINE_BYTES // SECTOR_BYTES
    starts = np.ones(len(sector), dtype=bool)
    starts[1:] = (
        (np.diff(warp) != 0) | (np.diff(sector) != 1) | (sector[1:] % per_line == 0)
    )
    first = np.flatnonzero(starts)
    lengths = np.diff(np.append(first, len(sector)))
    return [
        (int(sector[i]) * SECTOR_BYTES, int(n) * SECTOR_BYTES)
        for i, n in zip(first, lengths, strict=True)
    ]


def row_requests(
    rows: Integers, row_bytes: int, access: Access, *, element_bytes: int = 4
) -> Requests:
    """The requests of gathering ``rows`` of a table that starts on a line.

    Args:
        rows: row numbers, shape (num_rows,).
        row_bytes: bytes a row, a multiple of ``element_bytes``.
        access: INDEXED, SHIFTED, MERGED or ALIGNED.
        element_bytes: bytes a lane reads at once.

    Raises:
        ValueError: rows of broken elements, or an access that rows do not have.
    """
    if row_bytes % element_bytes:
        raise ValueError(
            f"row_bytes: expects a multiple of {element_bytes}, got {row_bytes}"
        )
    rows = np.asarray(rows, dtype=np.int64)
    if access in (Access.MERGED, Access.ALIGNED):
        begin = rows * row_bytes
        return _lists(begin, begin + row_bytes, access, element_bytes)
    if access is Access.STRIDED:
        raise ValueError("row_requests: no gather gives a whole row to one thread")
    warps, addresses = indexed_loads(rows, row_bytes // element_bytes, access)
    found = requests_of(warps, addresses * element_bytes)
    return _count([size for _, size in found], len(rows) * row_bytes)


def indexed_loads(
    rows: Integers, width: int, access: Access
) -> tuple[Integers, Integers]:
    """Warp and source element of every load of an index kernel (Listing 3.2).

    Thread i makes element i of the result. With the shift, each lane takes the element
    that makes lane 0 of its warp read the start of a line, and wraps inside the row;
    the result is the same, element for element.
    """
    lanes = np.arange(len(rows) * width, dtype=np.int64)
    row, offset = lanes // width, lanes % width
    begin = rows[row] * width
    if access is Access.SHIFTED and width > WARP_LANES and width % WARP_LANES:
        shift = (row * width - begin) % WARP_LANES
        offset = (offset + shift) % width
    return lanes // WARP_LANES, begin + offset


def traversal_requests(
    offsets: Integers, access: Access, *, id_bytes: int = 8
) -> Requests:
    """The requests of visiting every adjacency list once (EMOGI, chapter 2).

    Args:
        offsets: shape (num_vertices + 1,), of an edge list that starts on a line.
        access: MERGED or ALIGNED; STRIDED needs a cache model and has none here.
        id_bytes: 4 or 8.

    Raises:
        ValueError: another access.
    """
    if access not in (Access.MERGED, Access.ALIGNED):
        raise ValueError(f"traversal_requests expects merged or aligned, got {access}")
    bounds = np.asarray(offsets, dtype=np.int64) * id_bytes
    return _lists(bounds[:-1], bounds[1:], access, id_bytes)


def _lists(begin: Integers, end: Integers, access: Access, item: int) -> Requests:
    """One warp a list of bytes [begin, end): 32 items an instruction."""
    step = WARP_LANES * item
    start = begin - begin % LINE_BYTES if access is Access.ALIGNED else begin
    rounds = np.where(end > begin, -((start - end) // step), 0)
    lists = np.repeat(np.arange(len(begin)), rounds)
    number = np.arange(len(lists)) - np.repeat(np.cumsum(rounds) - rounds, rounds)
    low = start[lists] + number * step
    first = np.maximum(low, begin[lists])
    last = np.minimum(low + step, end[lists])
    return _intervals(first, last, int((end - begin).sum()))


def _intervals(first: Integers, last: Integers, useful_bytes: int) -> Requests:
    """Warp instructions that read the bytes [first, last) each."""
    counts = np.zeros(4, dtype=np.int64)
    line = first // LINE_BYTES
    while True:
        live = line * LINE_BYTES < last
        if not live.any():
            break
        first, last, line = first[live], last[live], line[live]
        low = np.maximum(first, line * LINE_BYTES) // SECTOR_BYTES
        high = -(-np.minimum(last, (line + 1) * LINE_BYTES) // SECTOR_BYTES)
        counts += np.bincount(high - low - 1, minlength=4)
        line = line + 1
    small, medium, large, full = (int(n) for n in counts)
    return Requests(counts=(small, medium, large, full), useful_bytes=useful_bytes)


def _count(sizes: list[int], useful_bytes: int) -> Requests:
    one, two, three, four = (sizes.count(SECTOR_BYTES * k) for k in (1, 2, 3, 4))
    return Requests(counts=(one, two, three, four), useful_bytes=useful_bytes)


def header_share(request_bytes: int) -> float:
    """Share of the link that packet headers take."""
    return HEADER_BYTES / (request_bytes + HEADER_BYTES)
