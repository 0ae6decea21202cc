"""Times of real gathers: how the chooser learns the machine it runs on.

[Note: Calibration in the background] What a path takes depends on the GPU, its link,
the CPU and the table, and measuring all that before the first gather would hold
training up for a second. So the first gathers of a kind (`Cell`) take turns on the
paths that the model thinks worth it, each between two events on its own stream, and
later gathers read the times that have arrived: nothing waits and no gather is made for
the measurement. After `_SAMPLES` of each the fastest stays. What was learnt is kept in
the user's cache directory for this device.
"""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath
from typing import Any, NamedTuple, Protocol

from pydirect.gather.request import Path
from pydirect.kernels.cache import read_private, write_atomically

_VERSION = 1
_SAMPLES = 3
_REMEMBERED = 1024
# A path must be so much faster to be taken instead of DIRECT, which needs one launch
# and no memory; the paths of the CPU hold up the calling thread besides.
_NEAR_TIE = 0.95
_HOLDS_CALLER = 0.9

logger = logging.getLogger(__name__)


class Timer(Protocol):
    """`torch.cuda.Event` with timing, or a clock of a test."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any, /) -> float: ...


class Cell(NamedTuple):
    """Gathers that share their times."""

    memory: str
    table_class: int
    """Binary logarithm of the table's bytes, rounded."""

    row_bytes: int
    batch_class: int
    """Twice the binary logarithm of the number of indices, rounded."""

    distinct_class: int
    """Binary logarithm of indices over distinct ones, rounded down; 0 unless repeats
    are read once."""

    runs_class: int
    """Binary logarithm of the mean length of runs, rounded."""

    threads: int
    max_sms: int
    """0 without a budget."""

    @property
    def name(self) -> str:
        """Its name in the file."""
        return "/".join(str(part) for part in self)


class Trial:
    """Times one gather on the current stream, as a context manager."""

    def __init__(
        self, path: Path, num_indices: int, new_timer: Callable[[], Timer]
    ) -> None:
        self.path = path
        self._num_indices = num_indices
        self._begin, self._end = new_timer(), new_timer()
        self.failed = False

    def __enter__(self) -> None:
        self._begin.record()

    def __exit__(self, *failure: object) -> None:
        self.failed = failure[0] is not None
        self._end.record()

    def arrived(self) -> bool:
        """Whether the time can be read without a wait."""
        return self._end.query()

    def ns_per_index(self) -> float:
        """Nanoseconds that the gather took, by its indices."""
        return self._begin.elapsed_time(self._end) * 1e6 / self._num_indices


class CellTimes:
    """What one cell has learnt: samples of each candidate, then the best."""

    def __init__(self, candidates: Iterable[Path]) -> None:
        self._samples: dict[Path, list[float]] = {path: [] for path in candidates}
        self._pending: list[Trial] = []
        self.best: Path | None = None
        if len(self._samples) == 1:
            (self.best,) = self._samples

    @classmethod
    def known(cls, times: dict[Path, float]) -> "CellTimes":
        """A cell whose times (nanoseconds an index) were learnt before."""
        made = cls(times)
        for path, ns in times.items():
            made._samples[path] = [ns] * _SAMPLES
        made._settle()
        return made

    def times(self) -> dict[Path, float]:
        """Nanoseconds an index of each path sampled so far."""
        return {path: min(ns) for path, ns in self._samples.items() if ns}

    def next(self, num_indices: int, new_timer: Callable[[], Timer]) -> Trial:
        """A trial of the path with the fewest samples; the caller runs it."""
        coming = [trial.path for trial in self._pending]
        path = min(self._samples, key=lambda p: len(self._samples[p]) + coming.count(p))
        trial = Trial(path, num_indices, new_timer)
        self._pending.append(trial)
        return trial

    def read(self) -> bool:
        """Take in the times that have arrived; True when that settles the cell."""
        done = [trial for trial in self._pending if trial.failed or trial.arrived()]
        self._pending = [trial for trial in self._pending if trial not in done]
        for trial in done:
            if not trial.failed:
                self._samples[trial.path].append(trial.ns_per_index())
        if self.best is None and all(
            len(ns) >= _SAMPLES for ns in self._samples.values()
        ):
            self._settle()
            return True
        return False

    def _settle(self) -> None:
        weighted = dict(self.times())
        for path in (Path.CPU, Path.DMA):
            if path in weighted:
                weighted[path] /= _HOLDS_CALLER
        if Path.DIRECT in weighted:
            weighted[Path.DIRECT] *= _NEAR_TIE
        self.best = min(weighted, key=weighted.__getitem__)
        self._pending.clear()


class Trials:
    """All cells of one device, kept on disk between processes. Thread-safe."""

    def __init__(self, file: FilePath, new_timer: Callable[[], Timer]) -> None:
        """``file``: in the user's cache directory; ``new_timer``: an event."""
        self._file = file
        self._new_timer = new_timer
        self._cells: OrderedDict[Cell, CellTimes] = OrderedDict()
        self._learnt = _load(file)
        self._lock = threading.Lock()

    def times(self, cell: Cell) -> dict[Path, float]:
        """Nanoseconds an index of each path sampled so far in ``cell``."""
        with self._lock:
            found = self._cells.get(cell)
            return found.times() if found else dict(self._learnt.get(cell.name, {}))

    def settled(self, cell: Cell) -> Path | None:
        """The best path of ``cell``, once its trials are over."""
        with self._lock:
            found = self._cells.get(cell)
            return found.best if found else None

    def take(
        self, cell: Cell, num_indices: int, candidates: Callable[[], list[Path]]
    ) -> Path | Trial:
        """The path of a settled cell, or the trial that this gather is.

        Args:
            cell: kind of the gather.
            num_indices: of the gather.
            candidates: paths worth a trial; asked when the cell is new.
        """
        with self._lock:
            found = self._cells.get(cell)
            if found is None:
                found = self._start(cell, candidates)
            if found.best is None and found.read():
                self._learn(cell, found)
            return found.best or found.next(num_indices, self._new_timer)

    def _start(self, cell: Cell, candidates: Callable[[], list[Path]]) -> CellTimes:
        known = self._learnt.get(cell.name)
        made = CellTimes.known(known) if known else CellTimes(candidates())
        self._cells[cell] = made
        if len(self._cells) > _REMEMBERED:
            self._cells.popitem(last=False)
        return made

    def _learn(self, cell: Cell, found: CellTimes) -> None:
        times = found.times()
        logger.info("gather cell %s: %s ns an index", cell.name, times)
        # Another process may have learnt other cells meanwhile.
        self._learnt = _load(self._file) | self._learnt | {cell.name: times}
        cells = {
            name: {path.value: ns for path, ns in known.items()}
            for name, known in list(self._learnt.items())[-_REMEMBERED:]
        }
        text = json.dumps({"version": _VERSION, "cells": cells}, indent=1)
        try:
            write_atomically(self._file, text.encode())
        except OSError as error:
            logger.warning("gather times are not kept: %s", error)


def _load(file: FilePath) -> dict[str, dict[Path, float]]:
    """What the file tells; what it does not tell is measured again."""
    try:
        data = json.loads(read_private(file))
        if data["version"] != _VERSION:
            return {}
        return {
            str(name): {Path(path): _positive(ns) for path, ns in times.items()}
            for name, times in data["cells"].items()
            if times
        }
    except (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        # Missing, from another version, or damaged.
        return {}


def _positive(ns: Any) -> float:
    if not 0.0 < float(ns) < 1e12:
        raise ValueError(f"expects nanoseconds, got {ns}")
    return float(ns)
