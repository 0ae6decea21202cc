"""What the indices of a table look like, learned without a wait.

How many indices are distinct, and how long their runs are, decides between paths, but
the index is on the GPU and the CPU must not wait for it. So now and then a kernel
counts both behind a gather, and a later gather of that table reads what has arrived.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from pydirect.kernels import gather as kernels
from pydirect.kernels.driver import Module
from pydirect.memory import empty_pinned

_EVERY = 16
_TABLES = 64
_BITS_AN_INDEX = 16
# A gather that is over sooner than a survey has nothing to learn from it.
_WORTH_BYTES = 2 << 20

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

    def __init__(self, module: Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._calls: OrderedDict[_Key, int] = OrderedDict()
        self._looks: dict[_Key, Look] = {}
        self._pending: dict[_Key, _Pending] = {}

    def look(self, table: torch.Tensor, index: torch.Tensor) -> Look:
        """The last survey of ``table`` that has arrived; starts one now and then."""
        row_bytes = table.nbytes // max(1, table.shape[0])
        if index.numel() * row_bytes < _WORTH_BYTES:
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
