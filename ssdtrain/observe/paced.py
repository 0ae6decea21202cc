"""A step that keeps everything, with its time told mark by mark.

[Note: pace]
The observed step is slow where tensors are many, and at its usual pace where one
operator takes long. One factor for the whole step would make the first look too long,
and copies would be planned into time that is not there. So a step behind the plain one
is run under hooks that keep every tensor and do nothing else. They count their calls as
the observed step's hooks were counted, and at some of the marks they take the time.

[Note: results that are read back]
A loss that the host reads (`item`, in the model or in the loop) is copied out like any
saved tensor, and the copy engine serves in order: the small copy waits for all large
ones, compute and the host wait for the small copy. Torch can warn of each such call
(`torch.cuda.set_sync_debug_mode`), which tells at which marks a forward has them.
(tests/ssdtrain/observe/test_paced.py)
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.cache.bypass import Bypass
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.handles import KeptHandle
from ssdtrain.cache.traced import untraced
from ssdtrain.plan.calibrate import Pace, Segment
from ssdtrain.plan.profile import Phase, Profile
from ssdtrain.remat.modes import mode_stands, without_modes

STRIDE = 8
"""Marks from one look at the clock to the next."""
LONG_SHARE = 0.005
"""Share of the step behind which a mark has a segment of its own."""
SYNCHRONIZES = "called a synchronizing CUDA operation"
"""What torch's warning says."""


class Moment(NamedTuple):
    """When host and device came to a mark."""

    mark: int
    device: Any
    host_ns: int


class Paced(Bypass):
    """Times one step at some of its marks. See [Note: pace].

    Args:
        calls: number of each mark's call among all calls of the hooks, from 1.
        profile: whose marks they are.
        listens: whether to find results that are read back; on a GPU.
    """

    def __init__(
        self, cache: TensorCache, profile: Profile, calls: list[int], *, listens: bool
    ) -> None:
        super().__init__(cache.ledger.clock)
        self._cache = cache
        self._listens = listens
        wanted = looked_at(profile)
        self._wanted = [(calls[mark], mark) for mark in reversed(wanted)]
        self._num_marks, self._num_wanted = len(profile.marks), len(wanted)
        self._num_calls = 0
        self._moments: list[Moment] = []
        self._reads: set[int] = set()
        """Of moments: results were read back behind them."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward."""
        hooks = torch.autograd.graph.saved_tensors_hooks(
            untraced(self._pack), untraced(self._unpack)
        )
        with super().forward(), self._listening(), hooks:
            yield

    def pace(self) -> Pace | None:
        """What was found; None if the step was another one. Waits for the device."""
        moments, ms = self._moments, self._clock.ms_between
        if len(moments) != self._num_wanted or not self._forwards:
            return None
        nexts = [*moments[1:], moments[-1]]
        return Pace(
            num_marks=self._num_marks,
            head_ms=ms(self._forwards[0][0], moments[0].device),
            head_host_ms=(moments[0].host_ns - self._host_ns[0][0]) / 1e6,
            segments=tuple(
                Segment(
                    start=one.mark,
                    ms=max(0.0, ms(one.device, after.device)),
                    host_ms=(after.host_ns - one.host_ns) / 1e6,
                    reads_back=number in self._reads,
                )
                for number, (one, after) in enumerate(zip(moments, nexts, strict=True))
            ),
        )

    def _count(self) -> None:
        self._num_calls += 1
        if self._wanted and self._wanted[-1][0] == self._num_calls:
            _, mark = self._wanted.pop()
            now = self._clock.now()
            self._moments.append(Moment(mark, now, time.monotonic_ns()))

    def _pack(self, tensor: Tensor) -> Any:
        if mode_stands():
            with without_modes():
                return self._pack(tensor)
        self._count()
        base = tensor._base
        if type(tensor) is Tensor and (base is None or type(base) is Tensor):
            return KeptHandle((tensor.detach(), tensor._version))
        return self._cache.pack_staying(tensor)

    def _unpack(self, handle: Any) -> Tensor:
        self._count()
        return self._cache.unpack(handle)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        # Whoever uses the warnings himself is left alone.
        if not self._listens or torch.cuda.get_sync_debug_mode():
            yield
            return
        with _heard(SYNCHRONIZES, self._read_back):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _read_back(self) -> None:
        if self._moments:
            self._reads.add(len(self._moments) - 1)


@contextmanager
def _heard(text: str, hear: Callable[[], None]) -> Iterator[None]:
    """Call `hear` for each warning with this text, instead of showing it; the filters
    of others stay in force for all others."""
    show = warnings.showwarning

    def showing(message: Any, *where: Any, **more: Any) -> None:
        if text in str(message):
            hear()
        else:
            show(message, *where, **more)

    warnings.filterwarnings("always", message=f".*{text}")
    ours = warnings.filters[0]
    warnings.showwarning = showing
    try:
        yield
    finally:
        if warnings.showwarning is showing:
            warnings.showwarning = show
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]


def looked_at(profile: Profile) -> list[int]:
    """Marks at which the clock is read: the first and the last one, some of them all
    along, both ends of whatever takes long, and where backward starts."""
    marks = profile.marks
    long_ms = LONG_SHARE * profile.compute_ms
    found = {0, len(marks) - 1, *range(0, len(marks), STRIDE)}
    for number, mark in enumerate(marks):
        if mark.ms >= long_ms:
            found |= {number, min(number + 1, len(marks) - 1)}
        if number and mark.phase is not marks[number - 1].phase is Phase.FORWARD:
            found.add(number)
    return sorted(found)
