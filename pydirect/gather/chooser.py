"""Choose the path of a gather on a GPU, from rates and from what its indices look like.

How many indices are distinct, and how long their runs are, decides between paths, but
the index is on the GPU and the CPU must not wait for it. So now and then a kernel
counts both behind a gather, and a later gather of that table reads what has arrived.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

import torch

from pydirect.gather.calibrate import load, measure_and_store, size_class
from pydirect.gather.engine import Engine
from pydirect.gather.model import Rates, Workload, choose_path
from pydirect.gather.request import Path, Request
from pydirect.kernels import gather as kernels
from pydirect.kernels.driver import Module
from pydirect.memory import Reach, empty_pinned

_EVERY = 16
_TABLES = 64
_BITS_AN_INDEX = 16
# A gather that is over sooner than a survey has nothing to learn from it.
_SURVEY_BYTES = 2 << 20

_Key = tuple[int, int, int, int]

_REMEMBERED = 4096
# Smaller gathers are over before a measurement would have paid: they do not start one.
_WORTH_BYTES = 4 << 20

RatesKey = tuple[Reach, int, int]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Look:
    """Shares of one surveyed index; the defaults stand for "not known yet"."""

    distinct_share: float = 1.0
    run_rows: float = 1.0


UNKNOWN = Look()


@dataclass(kw_only=True)
class _Pending:
    counts: torch.Tensor
    arrived: torch.cuda.Event
    num_indices: int


class Survey:
    """Surveys of the tables gathered from on one device."""

    def __init__(self, module: Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._calls: OrderedDict[_Key, int] = OrderedDict()
        self._looks: dict[_Key, Look] = {}
        self._pending: dict[_Key, _Pending] = {}

    def look(self, table: torch.Tensor, index: torch.Tensor) -> Look:
        """The last survey of ``table`` that has arrived; starts one now and then."""
        row_bytes = table.nbytes // max(1, table.shape[0])
        if index.numel() * row_bytes < _SURVEY_BYTES:
            return UNKNOWN
        # Larger batches repeat more: sizes within a factor of two share a survey. The
        # first rows of a table are another table: there, a batch repeats more too.
        batch = index.numel().bit_length()
        key = (table.data_ptr(), table.nbytes, row_bytes, batch)
        pending = self._pending.get(key)
        if pending is not None and pending.arrived.query():
            self._looks[key] = _look_of(pending)
            self._pending.pop(key, None)
        calls = self._calls.pop(key, 0)
        self._calls[key] = calls + 1
        if calls % _EVERY == 0 and key not in self._pending:
            self._pending[key] = self._start(index)
        if len(self._calls) > _TABLES:
            oldest, _ = self._calls.popitem(last=False)
            self._looks.pop(oldest, None)
            self._pending.pop(oldest, None)
        return self._looks.get(key, UNKNOWN)

    def _start(self, index: torch.Tensor) -> _Pending:
        num = index.numel()
        words = max(2, 1 << (num * _BITS_AN_INDEX // 32 - 1).bit_length())
        # Two counts, padding to 8 bytes, then the bitmap: one allocation to clear.
        space = torch.zeros(2 + words, dtype=torch.int32, device=self._device)
        arguments = kernels.SurveyArgs(
            index=index.data_ptr(),
            bitmap=space[2:].data_ptr(),
            counts=space.data_ptr(),
            num_indices=num,
            num_bits=32 * words,
        )
        stream = torch.cuda.current_stream()
        kernels.launch_survey(
            self._module, arguments, index.dtype, int(stream.cuda_stream)
        )
        counts = empty_pinned((2,), torch.int32)
        counts.copy_(space[:2], non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(stream)
        return _Pending(counts=counts, arrived=arrived, num_indices=num)


def _look_of(pending: _Pending) -> Look:
    breaks, distinct = pending.counts.tolist()
    return Look(
        distinct_share=min(1.0, distinct / pending.num_indices),
        run_rows=pending.num_indices / (breaks + 1),
    )


class Chooser:
    """Paths for one engine; rates are calibrated when a size class is first met."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rates: dict[RatesKey, Rates] = {}
        self._not_cached: set[RatesKey] = set()
        # Weighing takes longer than launching; training repeats its shapes.
        self._chosen: dict[object, Path] = {}

    def choose(self, request: Request, look: Look, found: Reach) -> Path:
        """The path with the least predicted time; CPU for memory that is not pinned.

        Before there are rates, small gathers go DIRECT and large ones measure them.
        """
        if found is Reach.NONE:
            return Path.CPU
        key = (
            found,
            torch.get_num_threads(),
            request.num_rows,
            request.row_bytes,
            request.num_indices,
            look,
        )
        path = self._chosen.get(key)
        if path is None:
            worth = request.num_indices * request.row_bytes >= _WORTH_BYTES
            rates = self.rates(request.table_bytes, found, measure=worth)
            if rates is None:
                return Path.DIRECT
            dedup_below = self._engine.tuning.dedup_below
            path = choose_path(rates, workload(request, look, dedup_below))
            if len(self._chosen) >= _REMEMBERED:
                self._chosen.clear()
            self._chosen[key] = path
        return path

    def known(self) -> dict[RatesKey, Rates]:
        """All rates so far, by (memory, size class, number of threads)."""
        return dict(self._rates)

    def rates(
        self, table: torch.Tensor, found: Reach, *, measure: bool = True
    ) -> Rates | None:
        """The calibrated rates for ``table``, which GPUs reach as ``found``; None if
        there are none yet and ``measure`` is off."""
        key = (found, size_class(table.nbytes), torch.get_num_threads())
        if key in self._rates:
            return self._rates[key]
        if key not in self._not_cached:
            cached = load(self._engine, table)
            if cached is not None:
                self._rates[key] = cached
                return cached
            self._not_cached.add(key)
        if not measure:
            return None
        self._rates[key] = measure_and_store(self._engine, table)
        logger.info("gather rates for size class %s: %s", key, self._rates[key])
        return self._rates[key]


def workload(request: Request, look: Look, dedup_below: float) -> Workload:
    """What the model needs to know of a request; the engine reads repeats once where
    fewer than ``dedup_below`` are distinct, and only there."""
    reads_once = look.distinct_share < dedup_below
    return Workload(
        num_indices=request.num_indices,
        row_bytes=request.row_bytes,
        table_bytes=request.table.nbytes,
        distinct_share=look.distinct_share if reads_once else 1.0,
        run_rows=look.run_rows,
        aligned=(request.table.data_ptr() | request.row_bytes) % 32 == 0,
    )
