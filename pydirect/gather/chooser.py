"""Choose the path of a gather on a GPU: from predictions, trials and surveys.

[Note: Surveys after a gather] How many indices are distinct, and how long their runs
are, decides between paths, but the index is on the GPU and the CPU must not wait for
it. So now and then a kernel counts both after a gather, and a later gather of that
table reads what has arrived.
"""

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch

from pydirect.gather.engine import Engine
from pydirect.gather.model import (
    Workload,
    reference_rates,
    worth_a_trial,
)
from pydirect.gather.request import Path, Request
from pydirect.gather.trials import Cell, Timer, Trial, Trials
from pydirect.kernels import gather as kernels
from pydirect.kernels.cache import cache_directory
from pydirect.kernels.driver import Module
from pydirect.memory import Reach, empty_pinned

_EVERY = 16
MAX_TABLES = 64
_BITS_AN_INDEX = 16
# A gather that is over sooner than a survey has nothing to learn from it.
SURVEY_BYTES = 2 << 20
# Smaller gathers are over in a launch or two, which only DIRECT is.
_WORTH_BYTES = 1 << 20

_Key = tuple[int, int, int, int]


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

    def __init__(self, module: Module, device: torch.device, num_blocks: int) -> None:
        """``num_blocks``: that a survey takes at most, without a budget."""
        self._module = module
        self._device = device
        self._num_blocks = num_blocks
        self._calls: OrderedDict[_Key, int] = OrderedDict()
        self._looks: dict[_Key, Look] = {}
        self._pending: dict[_Key, _Pending] = {}

    def look(self, request: Request) -> Look:
        """Return the last survey of the request's table that has arrived."""
        key = _key_of(request)
        pending = self._pending.get(key)
        if pending is not None and pending.arrived.query():
            self._looks[key] = _look_of(pending)
            self._pending.pop(key, None)
        return self._looks.get(key, UNKNOWN)

    def follow(self, request: Request, max_sms: int | None) -> None:
        """Survey the index after its gather, one call in `_EVERY` of its kind."""
        if request.num_indices * request.row_bytes < SURVEY_BYTES:
            return
        key = _key_of(request)
        calls = self._calls.pop(key, 0)
        self._calls[key] = calls + 1
        if calls % _EVERY == 0 and key not in self._pending:
            blocks = min(max_sms or self._num_blocks, self._num_blocks)
            self._pending[key] = self._start(request.index, blocks)
        if len(self._calls) > MAX_TABLES:
            oldest, _ = self._calls.popitem(last=False)
            self._looks.pop(oldest, None)
            self._pending.pop(oldest, None)

    def _start(self, index: torch.Tensor, num_blocks: int) -> _Pending:
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
            self._module,
            arguments,
            index.dtype,
            num_blocks=num_blocks,
            stream=int(stream.cuda_stream),
        )
        counts = empty_pinned((2,), torch.int32)
        counts.copy_(space[:2], non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(stream)
        return _Pending(counts=counts, arrived=arrived, num_indices=num)


def _key_of(request: Request) -> _Key:
    # Larger batches repeat more: sizes within a factor of two share a survey. The
    # first rows of a table are another table: there, a batch repeats more too.
    table = request.table
    batch = request.num_indices.bit_length()
    return table.data_ptr(), table.nbytes, request.row_bytes, batch


def _look_of(pending: _Pending) -> Look:
    breaks, distinct = pending.counts.tolist()
    return Look(
        distinct_share=min(1.0, distinct / pending.num_indices),
        run_rows=pending.num_indices / (breaks + 1),
    )


class Chooser:
    """Paths for one engine: see [Note: Calibration in the background] in trials."""

    def __init__(self, engine: Engine, trials: Trials) -> None:
        self._dedup_below = engine.tuning.dedup_below
        self.trials = trials
        # Finding a cell takes longer than launching; training repeats its shapes.
        self._cells: dict[object, Cell] = {}

    def choose(
        self, request: Request, look: Look, found: Reach, max_sms: int | None
    ) -> Path | Trial:
        """Choose the path to take, or make this gather a trial.

        CPU for memory that is not pinned, DIRECT for gathers of little.
        """
        if found is Reach.NONE:
            return Path.CPU
        if is_little(request):
            return Path.DIRECT
        cell = self.cell(request, look, found, max_sms)
        return self.trials.take(
            cell,
            request.num_indices,
            lambda: self._candidates(request, look, found),
        )

    def settled(
        self, request: Request, look: Look, found: Reach, max_sms: int | None
    ) -> Path | None:
        """Return the path that `choose` has come to for such gathers; None while
        trials of them go on."""
        if found is Reach.NONE:
            return Path.CPU
        if is_little(request):
            return Path.DIRECT
        return self.trials.settled(self.cell(request, look, found, max_sms))

    def cell(
        self, request: Request, look: Look, found: Reach, max_sms: int | None
    ) -> Cell:
        """Return the cell that a gather belongs to."""
        threads = torch.get_num_threads()
        shape = request.num_rows, request.row_bytes, request.num_indices
        memory = _memory_of(request, found)
        key = memory, threads, shape, look, max_sms
        cell = self._cells.get(key)
        if cell is None:
            share = look.distinct_share
            repeats = -math.log2(share) if share < self._dedup_below else 0.0
            cell = Cell(
                memory=memory,
                table_class=round(math.log2(max(1, request.table.nbytes))),
                row_bytes=request.row_bytes,
                batch_class=round(2 * math.log2(max(1, request.num_indices))),
                distinct_class=math.ceil(repeats),
                runs_class=round(math.log2(max(1.0, look.run_rows))),
                threads=threads,
                max_sms=max_sms or 0,
            )
            if len(self._cells) >= 4096:
                self._cells.clear()
            self._cells[key] = cell
        return cell

    def _candidates(self, request: Request, look: Look, found: Reach) -> list[Path]:
        if request.tiers is not None:
            return [Path.DIRECT, Path.SORTED]
        large_pages = found is Reach.MANAGED
        rates = reference_rates(request.table.nbytes, large_pages=large_pages)
        return worth_a_trial(rates, workload(request, look, self._dedup_below))


def _memory_of(request: Request, found: Reach) -> str:
    """Name how rows are reached; tiered tables by tenths of rows that are near."""
    if request.tiers is None:
        return found.value
    share = request.tiers.num_near / max(1, request.num_rows)
    return f"{found.value} beside {round(10 * share)} tenths"


def is_little(request: Request) -> bool:
    """Tell whether a gather is over in the time of a launch or two."""
    return request.num_indices * request.row_bytes < _WORTH_BYTES


def chooser_on(engine: Engine, new_timer: Callable[[], Timer]) -> Chooser:
    """Make the chooser of a GPU, with what was learnt there before."""
    return Chooser(engine, Trials(_times_file(engine.device), new_timer))


def _times_file(device: torch.device) -> FilePath:
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "device": properties.name,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_directory() / f"gather-{digest[:24]}.json"


def workload(request: Request, look: Look, dedup_below: float) -> Workload:
    """Describe a request to the model; the engine reads repeats once where
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
