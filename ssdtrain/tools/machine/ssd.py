"""Measure an SSD as the offloader uses it: aligned O_DIRECT blocks, many at once.

[Note: what a probe may cost]
A measurement wears the drive and fills it. So it is bounded in bytes written and
in seconds, and its file has no name (O_TMPFILE, or unlinked at once where the
file system has none): whatever ends the process, nothing is left behind.
"""

import errno
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ssdtrain.errors import ConfigError
from ssdtrain.rates import side_by_side
from ssdtrain.tools.machine.fit import fit_curve
from ssdtrain.tools.machine.links import Link, LinkKind, Sample

KIB = 1024
MIB = 1024 * KIB
ALIGNMENT_BYTES = 4096
MOST_CELL_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class SsdBudget:
    """What a measurement may cost."""

    max_bytes: int = 4096 * MIB
    """Bytes written to the drive at most (reads are not counted: they wear nothing)."""
    max_seconds: float = 20.0
    """Seconds for all cells of one directory; a cell that has begun ends its block."""
    file_bytes: int = 512 * MIB
    """Size of the nameless file; never more than half of `max_bytes`."""
    block_bytes: tuple[int, ...] = tuple(64 * KIB * 4**step for step in range(6))
    """Transfer sizes, multiples of 4096: 64 KiB to 64 MiB."""
    depths: tuple[int, ...] = (1, 4, 16)
    """Threads, each with one transfer in flight."""

    def __post_init__(self) -> None:
        if self.max_bytes < 2 * ALIGNMENT_BYTES or self.max_seconds <= 0:
            raise ConfigError(
                f"an SSD budget expects max_bytes >= {2 * ALIGNMENT_BYTES} and "
                f"max_seconds > 0, got {self.max_bytes} and {self.max_seconds}"
            )
        wrong = [b for b in self.block_bytes if b <= 0 or b % ALIGNMENT_BYTES]
        if wrong or any(d < 1 for d in self.depths):
            raise ConfigError(
                f"block_bytes expects multiples of {ALIGNMENT_BYTES} and depths >= 1, "
                f"got {wrong or self.depths}"
            )

    @property
    def usable_file_bytes(self) -> int:
        """`file_bytes`, at most half of `max_bytes`, aligned."""
        size = min(self.file_bytes, self.max_bytes // 2)
        return size // ALIGNMENT_BYTES * ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class SsdResult:
    """Links of one directory, and what it took."""

    links: tuple[Link, ...]
    direct: bool
    """False: the file system refused O_DIRECT; the page cache is in the numbers."""
    bytes_written: int
    seconds: float
    skipped_cells: tuple[str, ...]
    """Cells the budget did not reach, or that do not fit into the file."""


@contextmanager
def nameless_file(directory: str, direct: bool) -> Iterator[int]:
    """Open a file without a name in the directory, for reading and writing. Raises
    OSError: the directory refuses the file (EINVAL: no O_DIRECT there)."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    try:
        descriptor = os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        # These two mean "no O_TMPFILE here"; anything else is real.
        if error.errno not in (errno.EISDIR, errno.EOPNOTSUPP):
            raise
        path = os.path.join(directory, f".ssdtrain-probe-{os.getpid()}")
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def accepts_direct(directory: str) -> bool:
    """Return whether one aligned O_DIRECT write of 4 KiB works there. Raises OSError:
    the directory takes no file at all (missing, read-only, full)."""
    try:
        with (
            nameless_file(directory, direct=True) as descriptor,
            mmap.mmap(-1, ALIGNMENT_BYTES) as block,
        ):
            return os.pwrite(descriptor, block, 0) == ALIGNMENT_BYTES
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system has no O_DIRECT
            return False
        raise


def measure_ssd(directory: str, budget: SsdBudget) -> SsdResult:
    """Write and read curves of the file system after `directory`. Raises OSError: the
    directory takes no file, or the drive fails; ValueError: fewer than three block
    sizes fit the budget."""
    began = time.perf_counter()
    direct = accepts_direct(directory)
    with nameless_file(directory, direct) as descriptor:
        probe = _Measurement(descriptor, directory, budget, direct)
        try:
            probe.fill()
            kinds = LinkKind.SSD_WRITE, LinkKind.SSD_READ
            links = tuple(link for kind in kinds for link in probe.curves(kind))
        finally:
            probe.close()
    if not links:
        raise ValueError(
            f"measuring {directory} expects room for three block sizes, the budget of "
            f"{budget.max_bytes} bytes and {budget.max_seconds} s left fewer; raise it."
        )
    return SsdResult(
        links=links,
        direct=direct,
        bytes_written=probe.bytes_written,
        seconds=time.perf_counter() - began,
        skipped_cells=tuple(probe.skipped),
    )


class _Measurement:
    """One measurement: the file, the buffers and the running budget."""

    def __init__(
        self, descriptor: int, directory: str, budget: SsdBudget, direct: bool
    ) -> None:
        self._descriptor = descriptor
        self._directory = directory
        self._budget = budget
        self._direct = direct
        self._deadline = time.perf_counter() + budget.max_seconds
        self._file_bytes = budget.usable_file_bytes
        self.bytes_written = 0
        self.skipped: list[str] = []
        blocks = [b for b in budget.block_bytes if b <= self._file_bytes]
        self._blocks = sorted(set(blocks), reverse=True)
        largest = max(self._blocks, default=ALIGNMENT_BYTES)
        # Anonymous mmap is page-aligned, as O_DIRECT demands. All threads share it:
        # what lies in the file does not matter, only that it is written and read.
        self._buffer = mmap.mmap(-1, largest)
        # Random bytes: some drives compress, and zeros would flatter them.
        noise = random.Random(0).randbytes(min(largest, MIB))
        for start in range(0, largest, len(noise)):
            self._buffer[start : start + len(noise)] = noise[: largest - start]

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer.close()

    def fill(self) -> None:
        """Write the whole file once: unwritten extents read as zeros without I/O."""
        os.posix_fallocate(self._descriptor, 0, self._file_bytes)
        with memoryview(self._buffer) as view:
            for start in range(0, self._file_bytes, len(view)):
                with view[: min(len(view), self._file_bytes - start)] as piece:
                    self._write(piece, start)
        os.fsync(self._descriptor)
        self.bytes_written += self._file_bytes

    def curves(self, kind: LinkKind) -> list[Link]:
        """Return one link for each depth that reached at least three sizes."""
        cells = [
            (depth, block)
            for depth in self._budget.depths
            for block in self._blocks
            if depth * block <= self._file_bytes
        ]
        samples: dict[int, list[Sample]] = {}
        # Writes come first and may use half of the time, reads the rest.
        half = 2 if kind is LinkKind.SSD_WRITE else 1
        for index, (depth, block) in enumerate(cells):
            share = 1 / half / (len(cells) - index)
            sample = self._cell(kind, depth, block, share)
            if sample is None:
                self.skipped.append(f"{kind.value} {block} B x {depth}")
            else:
                samples.setdefault(depth, []).append(sample)
        source, target = "host", self._directory
        if kind is LinkKind.SSD_READ:
            source, target = target, source
        return [
            Link(
                kind=kind,
                source=source,
                target=target,
                depth=depth,
                mode="direct" if self._direct else "buffered",
                samples=tuple(sorted(found, key=lambda s: s.size_bytes)),
                curve=fit_curve(found),
            )
            for depth, found in samples.items()
            if len(found) >= 3
        ]

    def _cell(
        self, kind: LinkKind, depth: int, block: int, share: float
    ) -> Sample | None:
        """Transfers of one size and depth; None: one of each thread is too much."""
        writing = kind is LinkKind.SSD_WRITE
        room = self._file_bytes // block
        seconds = share * (self._deadline - time.perf_counter())
        left = self._budget.max_bytes - self.bytes_written
        if (writing and left < depth * block) or seconds <= 0:
            return None
        most = min(MOST_CELL_BYTES, self._budget.max_bytes)
        if writing:
            most = min(most, int(2 * share * left))
        per_thread = max(1, most // (block * depth))
        self._forget_cache()
        transfer = self._write if writing else self._read
        began = time.perf_counter()
        limits = (per_thread, began + seconds)

        def job(number: int) -> Callable[[], int]:
            places = range(number, room - room % depth, depth)
            return lambda: self._run_thread(transfer, places, block, limits)

        timed = side_by_side([job(number) for number in range(depth)])
        num_done, seconds = sum(timed.results), timed.seconds
        if writing:
            self.bytes_written += num_done * block
            if not self._direct:
                os.fsync(self._descriptor)
                seconds = time.perf_counter() - began
        return Sample(size_bytes=block, seconds=seconds / max(num_done, 1))

    def _run_thread(
        self,
        transfer: Callable[[memoryview, int], None],
        places: range,
        block: int,
        limits: tuple[int, float],
    ) -> int:
        """Transfer blocks in turn until the count or the time is used up."""
        count, deadline = limits
        done = 0
        with memoryview(self._buffer) as whole, whole[:block] as view:
            while done < count and (done == 0 or time.perf_counter() < deadline):
                transfer(view, places[done % len(places)] * block)
                done += 1
        return done

    def _write(self, view: memoryview, offset: int) -> None:
        self._whole("write", os.pwrite(self._descriptor, view, offset), view, offset)

    def _read(self, view: memoryview, offset: int) -> None:
        self._whole("read", os.preadv(self._descriptor, [view], offset), view, offset)

    def _whole(self, what: str, done: int, view: memoryview, offset: int) -> None:
        if done != len(view):
            raise OSError(
                f"short {what} in {self._directory}: {done} of {len(view)} bytes at "
                f"offset {offset}"
            )

    def _forget_cache(self) -> None:
        if not self._direct:
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
