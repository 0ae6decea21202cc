"""Engine, survey, chooser and counters of one device, brought together."""

import contextlib
import functools
import math
import threading
from collections import Counter
from dataclasses import dataclass

import torch

from pydirect.gather.chooser import UNKNOWN, Chooser, Look, Survey, chooser_on
from pydirect.gather.engine import DirectGather, Engine, engine_on
from pydirect.gather.request import Path, Request
from pydirect.gather.trials import Trial
from pydirect.memory import Reach, reach


@dataclass(frozen=True, kw_only=True)
class GatherStats:
    """Counts since the process started (or the last reset)."""

    calls: dict[Path, int]
    """Gathers onto a GPU, by the path that carried them."""

    useful_bytes: int
    """Bytes of the rows gathered onto GPUs."""

    num_unpinned: int
    """Gathers that had to take the CPU path because the table was not pinned."""


class GatherCounters:
    """Thread-safe counts after `GatherStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[Path] = Counter()
        self._useful_bytes = 0
        self._num_unpinned = 0

    def count(self, path: Path, useful_bytes: int, *, unpinned: bool) -> None:
        with self._lock:
            self._calls[path] += 1
            self._useful_bytes += useful_bytes
            self._num_unpinned += unpinned

    def read(self) -> GatherStats:
        with self._lock:
            return GatherStats(
                calls=dict(self._calls),
                useful_bytes=self._useful_bytes,
                num_unpinned=self._num_unpinned,
            )


# Calls of one shape that go by without asking the survey and the chooser again.
_CALLS = 7
_SHAPES = 256


class Front:
    """Gathers onto one device, path included."""

    def __init__(self, engine: Engine, chooser: Chooser, survey: Survey) -> None:
        """See `front_of` for a GPU."""
        self.engine = engine
        self.chooser = chooser
        self.survey = survey

    def gather(self, request: Request, path: Path | None, max_sms: int | None) -> None:
        """Gather on the current stream; ``path`` None lets the chooser decide.

        Raises:
            ValueError: a zero-copy path on memory that is not pinned.
        """
        self.engine.raise_if_any()
        if request.num_indices == 0 or request.row_bytes == 0:
            return
        found = reach(request.table)
        if found is Reach.NONE and (
            path in (Path.DIRECT, Path.SORTED) or request.tiers is not None
        ):
            raise ValueError(
                f"{'a tiered gather' if path is None else f'path {path.value!r}'} "
                "expects a pinned table, got plain memory of "
                f"{request.table.nbytes} bytes: pass it through pydirect.memory.pin"
            )
        if path is None and _capturing():
            # A graph holds kernels: no trial, no question to an event, no CPU.
            known = self.chooser.settled(request, UNKNOWN, found, max_sms)
            path = known if known is Path.SORTED else Path.DIRECT
            self._run(request, path, max_sms, UNKNOWN)
            return
        surveyed = path in (None, Path.SORTED)
        look = self.survey.look(request) if surveyed else UNKNOWN
        taken = path or self.chooser.choose(request, look, found, max_sms)
        chosen = taken.path if isinstance(taken, Trial) else taken
        unpinned = path is None and found is Reach.NONE
        with taken if isinstance(taken, Trial) else contextlib.nullcontext():
            self._run(request, chosen, max_sms, look, unpinned=unpinned)
        if surveyed:
            self.survey.follow(request, max_sms)

    def _run(
        self,
        request: Request,
        path: Path,
        max_sms: int | None,
        look: Look,
        *,
        unpinned: bool = False,
    ) -> None:
        process_counters().count(path, request.out.nbytes, unpinned=unpinned)
        self.engine.gather(
            request, path, max_sms=max_sms, distinct_share=look.distinct_share
        )


class BoundTable:
    """A pinned host table, prepared for many gathers onto one device.

    What a gather asks about a table and its shapes is asked once here, and the path of
    a shape that has settled is looked up: one call that is waited for takes little more
    than its kernels. The memory must stay pinned as long as this lives.
    """

    def __init__(self, front: Front, table: torch.Tensor) -> None:
        """``table``: CPU, contiguous, shape (num_rows, ...)."""
        self._front = front
        self._table = table
        self._found = reach(table)
        self._row, self._dtype = tuple(table.shape[1:]), table.dtype
        self._row_bytes = math.prod(self._row) * table.element_size()
        self._direct = DirectGather(front.engine, table)
        self._counters = process_counters()
        self._settled: dict[int, _Settled] = {}

    def index_select(self, index: torch.Tensor, *, wraps: bool) -> torch.Tensor:
        """``table[index]``, shape (num_indices, ...), on the current stream.

        Args:
            index: int32 or int64, shape (num_indices,), on the front's device, which
                must be the current one.
            wraps: whether negative indices count from the end.
        """
        front, index = self._front, index.contiguous()
        num = index.shape[0]
        out = torch.empty((num, *self._row), dtype=self._dtype, device=index.device)
        settled = self._settled.get(num)
        if settled is None or settled.calls_left <= 0:
            request = Request(table=self._table, index=index, out=out, wraps=wraps)
            front.gather(request, None, None)
            self._look_up(request, num)
            return out
        settled.calls_left -= 1
        front.engine.raise_if_any()
        self._counters.count(settled.path, num * self._row_bytes, unpinned=False)
        if settled.path is Path.DIRECT:
            self._direct(index, out, wraps=wraps)
            return out
        request = Request(table=self._table, index=index, out=out, wraps=wraps)
        front.engine.gather(
            request, settled.path, distinct_share=settled.distinct_share
        )
        return out

    def _look_up(self, request: Request, num: int) -> None:
        """Remember what `Front.gather` would do with such a gather again."""
        if self._found is Reach.NONE or num * request.row_bytes == 0:
            return
        look = self._front.survey.look(request)
        path = self._front.chooser.settled(request, look, self._found, None)
        if len(self._settled) >= _SHAPES:
            self._settled.clear()
        self._settled.pop(num, None)
        if path is not None:
            self._settled[num] = _Settled(path, look.distinct_share, _CALLS)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass
class _Settled:
    path: Path
    distinct_share: float
    calls_left: int


@functools.cache
def front_of(device: torch.device) -> Front:
    """The front of a device (with an index)."""
    with torch.cuda.device(device):
        engine = engine_on(device)
        return Front(
            engine,
            chooser_on(engine, functools.partial(torch.cuda.Event, enable_timing=True)),
            Survey(engine.module, device, 4 * engine.tuning.num_sms),
        )


@functools.cache
def process_counters() -> GatherCounters:
    """The counters of this process."""
    return GatherCounters()
