"""A step that keeps everything, with its time told mark by mark.

[Note: pace]
The observed step is slow where tensors are many, and at its usual pace where one
operator takes long. One factor for the whole step would make the first look too long,
and copies would be planned into time that is not there. So a step behind the plain one
is run under hooks that keep every tensor and do nothing else. They take the time at
some of the marks: a tensor is known by the number of its `pack`, and in backward by its
handle.

[Note: results that are read back]
A loss that the host reads (`item`, in the model or in the loop) is copied out like any
saved tensor, and the copy engine serves in order: the small copy waits for all large
ones, compute and the host wait for the small copy. Behind it the host is ahead of the
device no more, and what hooks take it there shows: Liger's loss asks in backward
whether its gradient is 1. Torch can warn of each such call
(`torch.cuda.set_sync_debug_mode`), which tells at which marks a step has them. What
C++ alone calls in backward torch tells of when backward has ended, and nobody knows
where it was.

[Note: a step that is held]
Where the host bounds a step, its device idles between operators, and their times are
those of the launches. A CUDA graph has no launches. So another step is run in which the
device waits at looks at the clock for longer than the host takes to the next one: what
comes behind is launched before it begins, and takes the device's own time. Which looks
these are says [Note: held in parts] in heldparts.py.
(tests/ssdtrain/observe/test_paced.py)
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.cache.bypass import Bypass, device_ms
from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.handles import KeptHandle
from ssdtrain.cache.traced import untraced
from ssdtrain.plan.calibrate import AHEAD_MS, Pace, Segment
from ssdtrain.plan.profile import Phase, Profile
from ssdtrain.plan.timeline import Timeline
from ssdtrain.remat.clock import Clock
from ssdtrain.remat.modes import may_meddle, without_modes
from ssdtrain.transfer.device import Device

STRIDE = 8
"""Marks from one look at the clock to the next."""
LONG_SHARE = 0.005
"""Share of the step behind which a mark has a segment of its own."""
HOLD_MS, HOLD_FACTOR = 0.1, 1.5
"""For how long the device is held: at least, and over the host's time."""
SYNCHRONIZES = "called a synchronizing CUDA operation"
"""What torch's warning says."""


class Moment(NamedTuple):
    """When host and device came to a mark."""

    mark: int
    device: Any
    host_ns: int
    """On its clock, without the time spent in these hooks."""
    begins: Any
    """When the device went on: later than `device` where it was held."""
    entered_ns: int
    """When the host came, by its clock."""


class Watched(NamedTuple):
    """What autograd holds of a tensor whose use is a mark to look at."""

    handle: Any
    mark: int


class Paced(Bypass):
    """Times one step at some of its marks. See [Note: pace].

    Args:
        profile: of the observed step, whose marks they are.
        packs: how often `pack` was called up to each mark, its own call included.
        listens: whether to find results that are read back; on a GPU.
        holds_ms: for how long the device is held at which marks.
    """

    def __init__(
        self,
        cache: TensorCache,
        profile: Profile,
        packs: list[int],
        *,
        listens: bool,
        holds_ms: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__(cache.ledger.clock)
        self._cache = cache
        self._listens = listens
        self._num_marks, self._num_packs = len(profile.marks), 0
        self._to_pack, self._to_use = looked_at(profile, packs)
        self._num_wanted = len(self._to_pack) + len(self._to_use)
        self._moments: list[Moment] = []
        self.holds_ms = holds_ms or {}
        self._spent_ns = self._entered_ns = 0
        self._reads: set[int] = set()
        """Of moments: results were read back behind them."""
        self._in_backward: ExitStack | None = None
        """What is heard from the first backward to the end of the step."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward."""
        hooks = torch.autograd.graph.saved_tensors_hooks(
            untraced(self._timed(self._pack)), untraced(self._timed(self._unpack))
        )
        with super().forward(), self._listening(), hooks:
            yield

    def close(self) -> None:
        """End what goes on behind forward. Idempotent."""
        if self._in_backward is not None:
            self._in_backward.close()

    def _timed(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(argument: Any) -> Any:
            self._entered_ns = start_ns = time.monotonic_ns()
            try:
                return hook(argument)
            finally:
                self._spent_ns += time.monotonic_ns() - start_ns

        return timed

    def pace(self) -> Pace | None:
        """What was found; None if the step was another one. Waits for the device."""
        moments, ms = self._moments, self._clock.ms_between
        marks = [one.mark for one in moments]
        if len(marks) != self._num_wanted or marks != sorted(marks):
            return None
        if not marks or not self._forwards:
            return None
        ahead_ms = leads_ms(moments, self._clock, self._cache.device)
        return Pace(
            num_marks=self._num_marks,
            head_ms=ms(self._forwards[0][0], moments[0].device),
            head_host_ms=(moments[0].host_ns - self._host_ns[0][0]) / 1e6,
            segments=tuple(
                Segment(
                    start=one.mark,
                    ms=max(0.0, ms(one.begins, after.device)),
                    host_ms=(after.host_ns - one.host_ns) / 1e6,
                    reads_back=number in self._reads,
                    lead_ms=ahead_ms[number],
                )
                for number, (one, after) in enumerate(pairwise(moments))
            ),
            end=marks[-1],
            end_lead_ms=ahead_ms[-1],
        )

    def _note(self, mark: int) -> None:
        # From the hook's start: what went by since is its own.
        host_ns = self._entered_ns - self._spent_ns
        came = begins = self._clock.now()
        if mark in self.holds_ms:
            self._cache.device.hold(self.holds_ms[mark])
            begins = self._clock.now()
        self._moments.append(Moment(mark, came, host_ns, begins, self._entered_ns))

    def _pack(self, tensor: Tensor) -> Any:
        if may_meddle():
            with without_modes():
                return self._pack(tensor)
        self._num_packs += 1
        mark = self._to_pack.get(self._num_packs)
        if mark is not None:
            self._note(mark)
        base, use = tensor._base, self._to_use.get(self._num_packs)
        handle: Any
        if type(tensor) is Tensor and (base is None or type(base) is Tensor):
            handle = KeptHandle((tensor.detach(), tensor._version))
        else:
            handle = self._cache.pack_staying(tensor)
        return handle if use is None else Watched(handle, use)

    def _unpack(self, handle: Any) -> Tensor:
        if self._in_backward is None:
            self._in_backward = ExitStack()
            self._in_backward.enter_context(self._listening())
        if type(handle) is Watched:
            self._note(handle.mark)
            handle = handle.handle
        return self._cache.unpack(handle)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        # Whoever uses the warnings himself is left alone.
        if not self._listens or torch.cuda.get_sync_debug_mode():
            yield
            return
        with heard(SYNCHRONIZES, self._read_back):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _read_back(self) -> None:
        if self._moments:
            self._reads.add(len(self._moments) - 1)


def leads_ms(moments: Sequence[Moment], clock: Clock, device: Device) -> list[float]:
    """Return by how much the host was ahead at each moment; any, where it is the
    device. Waits for the device.

    Args:
        moments: at least one.
    """
    if not device.runs_beside:
        return [AHEAD_MS] * len(moments)
    first = moments[0].device
    since_ms = device_ms(clock, first)
    return [
        max(0.0, since_ms + clock.ms_between(first, one.device) - one.entered_ns / 1e6)
        for one in moments
    ]


@contextmanager
def heard(text: str, hear: Callable[[], None]) -> Iterator[None]:
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
        # Not by `catch_warnings`, which would take back what the forward itself set.
        # The list of filters is a sequence to typeshed, and whoever changes it without
        # `warnings`' own functions must tell its cache.
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]


def looked_at(
    profile: Profile, packs: list[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Marks at which the clock is read, by the number of a call of `pack`: of those at
    which it is called, and of those at which what it took is used, once.

    They are the first one, some all along, both ends of whatever takes long, and the
    start of backward, each as near as a mark can be recognized.
    """
    marks, timeline = profile.marks, Timeline(profile)
    long_ms = LONG_SHARE * profile.compute_ms
    to_pack: dict[int, int] = {}
    to_use: dict[int, int] = {}
    since, wanted = STRIDE, True
    for number, mark in enumerate(marks):
        item = timeline.item_of_mark[number]
        at = timeline.pack_mark[item]
        is_pack = mark.phase is Phase.FORWARD
        # What a region or a recipe reads is stored without a call of its own.
        own = packs[at] != (packs[at - 1] if at else 0)
        ours = to_pack if is_pack else to_use
        known = own and packs[at] not in ours
        if not is_pack:
            known = known and timeline.uses[item] == [number]
        before = marks[number - 1] if number else mark
        wanted |= before.ms >= long_ms or mark.ms >= long_ms
        wanted |= before.phase is not mark.phase or since >= STRIDE
        since += 1
        if known and wanted:
            ours[packs[at]] = number
            since, wanted = 1, False
    return to_pack, to_use
