"""What happened in a step: counters while it runs, a frozen report afterwards."""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple

from ssdtrain.quantities import bytes_text


class Span(NamedTuple):
    """One interval of the time line, on the host's monotonic clock."""

    row: str
    """compute, store, write, read or load."""
    name: str
    start_ns: int
    end_ns: int
    num_bytes: int


class Peak(NamedTuple):
    """Device memory at three moments, in bytes above the level before the step."""

    backward_start_bytes: int
    """When the first saved tensor is asked for."""
    forward_backward_bytes: int
    """Highest over forward and backward."""
    end_to_end_bytes: int
    """Highest since the session started, optimizer step included."""


class Fallback(str, Enum):
    """Why something was not done the way it was asked for; each is counted."""

    KEPT_BACK_PRESSURE = "kept: the target could not keep up"
    KEPT_HOST_FULL = "kept: pinned host memory was full"
    KEPT_STORAGE_FULL = "kept: the storage was full"
    KEPT_WRITE_FAILED = "kept: a write failed"
    KEPT_UNSUPPORTED = "kept: no plain storage (sparse, subclass, other device)"
    KEPT_IN_BACKWARD = "kept: packed inside backward (recomputation)"
    KEPT_TRANSFORMED = "kept: a transform of torch.func ran the forward"
    KEPT_PIN_FAILED = "kept: host memory could not be pinned"
    COPIES_FROM_PYTHON = "copied by torch's own calls, which cost the host more"
    UNPINNED_LOAD = "loaded through unpinned memory: the pool was exhausted"
    RECIPE_REFUSED = "stored: a recipe was refused (unequal, changed or unknown input)"
    RECIPE_UNSAVED = "stored: a recipe passes a tensor that may have been changed"
    NO_REGION = "stored: a region has side effects, or its call cannot be repeated"
    ATTENTION_COMPUTED = "computed again: stored attention met another call"
    BUFFERED_IO = "buffered: the file system refused O_DIRECT"
    STRIPE_MEMBER_LOST = "stripe: a member failed and left"
    NO_SSD_ON_RANK = "host only: this rank has no SSD"
    PLAN_MISMATCH = "unplanned: a micro-batch saved other tensors than the plan's"
    PLAN_OUTGROWN = "unplanned: a micro-batch was larger than the plan leaves room for"
    PLANNED_ALONE = "planned alone: the ranks of a layer had no profile in common"
    NO_GDS = "staged: no direct path from the GPU to the SSD"


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One training step in numbers. Bytes are bytes of distinct saved tensors."""

    step: int
    """0 is the first step."""
    num_records: int
    """Distinct saved tensors."""
    bytes_saved: int
    """All that autograd saved, parameters excluded."""
    bytes_kept: int
    """Stayed on the device."""
    bytes_offloaded: int
    """Left for the target."""
    bytes_recomputed: int
    """Rebuilt by a recipe instead of stored."""
    bytes_forwarded: int
    """Asked for while still on their way out; handed back without a load."""
    bytes_reloaded: int
    """Came back from the target."""
    bytes_written: int
    """Went to a storage device (0 for the host target)."""
    bytes_parameters: int
    """Parameters and views of them among the saved tensors (never moved)."""
    stall_ms: float
    """Time in which compute waited for a transfer (exposed). On a GPU measured in the
    first six steps and then in one of eight, whose figure the others repeat."""
    waits_ms: dict[str, float]
    """Of `stall_ms`: for a `copy out`, and for a `copy in` or anything else. `host`, in
    steps whose hooks were timed on a GPU (the third under a plan, then one in 128):
    time in which the device waited for ssdtrain's own work on the host."""
    host_wait_module: str
    """Where it waited for the host most; "": unknown, or not at all."""
    recompute_ms: float
    """Time spent in recipes: of the device on a GPU, where the same steps are measured
    as for `stall_ms`; of the host on a CPU."""
    saved_peak_bytes: int
    """Most bytes of saved tensors alive on the device at once."""
    saved_backward_start_bytes: int
    """Bytes of saved tensors alive on the device when backward started."""
    allocated: Peak | None
    """The caching allocator's allocated bytes (None without a GPU)."""
    reserved: Peak | None
    """The caching allocator's reserved bytes (None without a GPU)."""
    plan_error: float | None
    """(measured - predicted) / predicted step time; None without a prediction."""
    recipes: dict[str, int] = field(default_factory=dict)
    """Bytes rebuilt, by recipe."""
    recipe_ms: dict[str, float] = field(default_factory=dict)
    """Time of `recompute_ms`, by recipe."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """How often each `Fallback` happened."""
    num_resized: int = 0
    """Saved tensors that had another size than the plan's and were placed as it says
    (a batch of another length)."""
    num_verified: int = 0
    """Saved tensors that `verify` compared when backward got them."""
    bytes_verified: int = 0
    """Bytes of those, as the operators see them."""

    def __str__(self) -> str:
        """A few lines to read; `repr` has every field."""
        text = bytes_text
        moved = f"offloaded {text(self.bytes_offloaded)}"
        if self.bytes_offloaded:
            moved += f" (reloaded {text(self.bytes_reloaded)}"
            if self.bytes_written:
                moved += f", written to the SSD {text(self.bytes_written)}"
            moved += ")"
        lines = [
            f"step {self.step}: autograd saved {text(self.bytes_saved)} in "
            f"{self.num_records} tensors; at most {text(self.saved_peak_bytes)} of "
            "them on the device at once",
            f"  kept {text(self.bytes_kept)}, {moved}, made again "
            f"{text(self.bytes_recomputed)}",
            f"  compute waited {self.stall_ms:.1f} ms for copies, and spent "
            f"{self.recompute_ms:.1f} ms to make tensors again",
        ]
        if self.allocated is not None:
            peak = text(self.allocated.forward_backward_bytes)
            lines.append(f"  device memory: {peak} above the start of the step")
        lines += [f"  {why} ({number} times)" for why, number in self.fallbacks.items()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; peaks become dictionaries."""
        values = asdict(self)
        for name in ("allocated", "reserved"):
            peak = getattr(self, name)
            values[name] = None if peak is None else peak._asdict()
        return values


MOST_SPANS = 200_000
"""Of a time line: the newest."""


class Trace:
    """A bounded time line; recording is a single append (atomic under the GIL)."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)

    def add(self, row: str, name: str, start_ns: int, num_bytes: int) -> None:
        """Record an interval that ends now."""
        if self.enabled:
            now = time.monotonic_ns()
            self._spans.append(Span(row, name, start_ns, now, num_bytes))

    def spans(self) -> list[Span]:
        """Everything recorded so far, oldest first."""
        return list(self._spans)


class Count(IntEnum):
    """What is summed up over a step: bytes, where it does not say otherwise."""

    RECORDS = auto()
    SAVED = auto()
    """See `StepReport`, as for all up to `PARAMETERS`."""
    KEPT = auto()
    OFFLOADED = auto()
    RECOMPUTED = auto()
    FORWARDED = auto()
    RELOADED = auto()
    PARAMETERS = auto()
    WRITTEN = auto()
    """To a storage device."""
    VERIFIED = auto()
    TENSORS_VERIFIED = auto()
    RESIZED = auto()
    """Tensors that had another size than the plan's."""


class Sums(NamedTuple):
    """What was counted since the last step boundary."""

    counts: Counter[Count]
    fallbacks: Counter[Fallback]
    recipes: Counter[str]
    """Bytes rebuilt, by recipe."""


class Counters:
    """Running sums of one session; every method is safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = _none()

    def add(self, count: Count, amount: int = 1) -> None:
        """Add to a sum."""
        with self._lock:
            self._sums.counts[count] += amount

    def add_all(self, amounts: Mapping[Count, int]) -> None:
        """Add to several sums."""
        with self._lock:
            for count, amount in amounts.items():  # faster than Counter.update
                self._sums.counts[count] += amount

    def shift(self, source: Count, target: Count, amount: int) -> None:
        """Count under one sum what was counted under another."""
        self.add_all({source: -amount, target: amount})

    def of(self, count: Count) -> int:
        """One sum so far."""
        with self._lock:
            return self._sums.counts[count]

    def fell_back(self, reason: Fallback) -> None:
        """Something was not done the way it was asked for."""
        with self._lock:
            self._sums.fallbacks[reason] += 1

    def rebuilt(self, recipe: str, num_bytes: int, *, num_records: int = 0) -> None:
        """So many bytes are made again instead of stored; records of their own are
        counted with them."""
        with self._lock:
            counts, _, recipes = self._sums
            if num_records:
                counts[Count.RECORDS] += num_records
                counts[Count.SAVED] += num_bytes
            counts[Count.RECOMPUTED] += num_bytes
            recipes[recipe] += num_bytes

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Count nothing of the block but what was not done as it was asked for."""
        with self._lock:
            before, self._sums = self._sums, _none()
        try:
            yield
        finally:
            with self._lock:
                inside, self._sums = self._sums, before
                before.fallbacks.update(inside.fallbacks)

    def take(self) -> Sums:
        """Return the sums and start again (at a step boundary)."""
        with self._lock:
            taken, self._sums = self._sums, _none()
        return taken


def _none() -> Sums:
    return Sums(Counter(), Counter(), Counter())


FIGURES = (
    "saved_peak_bytes",
    "bytes_offloaded",
    "bytes_recomputed",
    "stall_ms",
)
"""Fields of `StepReport` for the log that a training loop keeps anyway."""


def figures_of(report: StepReport | None) -> dict[str, float]:
    """Return figures such as {"ssdtrain/stall_ms": 0.1}; none before a report."""
    if report is None:
        return {}
    return {f"ssdtrain/{name}": float(getattr(report, name)) for name in FIGURES}
