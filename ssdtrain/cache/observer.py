"""Records one step and makes the planner's profile of it (plan/profile.py).

[Note: what is measured]
At each mark two moments are taken on the compute stream: when the cache begins to act
(waits, rebuilds and allocations for loads fall behind it) and when it has acted. What
lies between the second and the next mark's first is the operator alone. The allocator's
peak is reset at the second and read at the next mark, so that it is the operator's own;
what the saved tensors held then is subtracted, and what lingers ([Note: lingering]):
no other plan has it. A leaf that requires grad is its owner's: no plan frees it, and
mostly it is older than the step, so it is not among the bytes that are subtracted.
No host wait: all is read once the step is over.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ssdtrain.cache.contention import Contention
from ssdtrain.cache.course import Recipe, Saved
from ssdtrain.cache.ledger import Ledger
from ssdtrain.counters import Span as TraceSpan
from ssdtrain.curves import Curve
from ssdtrain.plan.profile import Item, Links, Mark, Phase, Profile
from ssdtrain.remat.budget import Span
from ssdtrain.storage.base import Slot, Storage
from ssdtrain.storage.choice import transfer_rate
from ssdtrain.transfer.device import Copy, Device
from ssdtrain.transfer.pinned import PinnedPool, page_aligned

COPY_STARTUP_S = 1e-5
PROBE_BYTES = 16 * 1024 * 1024
NUM_PROBES = 3
NUM_DRIVE_PROBES = 5
"""Rounds of blocks: what is read is written first, then each alone, then both."""
MOST_PROBE_S = 0.5
"""A drive whose rates are known and so low that its probe would take longer is assumed
to share one bandwidth."""
LEAST_TRANSFERS = 4
"""Fewer writes or reads say too little about a drive."""
FIRST_RUN = 4.0
"""A rebuild that took so many times what others like it take was a first run."""


@dataclass
class _Lane:
    kind: str
    saved: list[Saved] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    recipes: dict[int, Recipe] = field(default_factory=dict)


@dataclass
class _Row:
    lane: int
    phase: Phase
    item: int
    begin: Any
    node: int | None = None
    """The operator of backward that asked."""
    end: Any = None
    live_bytes: int = 0
    peak_bytes: int = 0


class Recording:
    """The observer of one step. See [Note: what is measured]."""

    listens = True

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        module_now: Callable[[], str],
        lingering_bytes: Callable[[], int],
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._clock = ledger.clock
        self._module_now = module_now
        self._lingering_bytes = lingering_bytes
        self._lanes: list[_Lane] = []
        self._rows: list[_Row] = []
        memory = device.memory()
        self._base_bytes = 0
        if memory is not None:
            self._base_bytes = memory.allocated_bytes - lingering_bytes()
        self._start = self._clock.now()
        self._end: Any = None
        self.waited_ms = 0.0
        """Time before the step's end that was none of it."""

    def lane(self, number: int, kind: str) -> None:
        """A lane begins."""
        self._lanes.append(_Lane(kind))

    def item(self, lane: int, number: int, saved: Saved) -> None:
        """A new item of a lane."""
        self._lanes[lane].saved.append(saved)
        self._lanes[lane].modules.append(self._module_now())

    def recipe(self, lane: int, number: int, recipe: Recipe) -> None:
        """The item is rebuilt in this step."""
        self._lanes[lane].recipes[number] = recipe

    def mark(self, lane: int, phase: Phase, number: int) -> None:
        """The cache begins to act."""
        if self._rows and self._rows[-1].end is None:
            self.seal()  # a recipe stores an input of its own
        self._read_peak()
        node = asking_node() if phase is Phase.BACKWARD else None
        self._rows.append(_Row(lane, phase, number, self._clock.now(), node))

    def seal(self) -> None:
        """The cache has acted; an operator runs next."""
        if not self._rows:
            return
        row = self._rows[-1]
        row.end = self._clock.now()
        own_bytes = self._ledger.live_bytes - self._ledger.held_bytes
        row.live_bytes = own_bytes + self._lingering_bytes()
        self._device.reset_peak()

    def stop(self) -> None:
        """The step is over: what runs from now on is none of it."""
        self._end = self._clock.now()

    def _read_peak(self) -> None:
        memory = self._device.memory()
        if memory is not None and self._rows:
            peak = memory.max_allocated_bytes
            self._rows[-1].peak_bytes = peak - self._base_bytes

    def profile(
        self,
        spans: Iterable[Span],
        links: Links | None,
        host_bytes: int,
        copying_ms: float,
        notes: dict[str, str],
    ) -> Profile | None:
        """The profile; None if the step cannot be planned. Waits for the device.

        Call it after `stop`.

        Args:
            copying_ms: time of all copies, which slowed the step down meanwhile.
        """
        rows = [row for row in self._rows if row.end is not None]
        kinds = self._kinds(spans)
        if not rows or links is None or kinds is None:
            return None
        ms = self._clock.ms_between
        nexts = [row.begin for row in rows[1:]] + [self._end]
        lengths = [ms(row.end, after) for row, after in zip(rows, nexts, strict=True)]
        tail_ms, lengths[-1] = max(0.0, lengths[-1] - self.waited_ms), 0.0
        known = self._device.memory() is not None
        overlap = min(2.0, copying_ms / max(sum(lengths), 1e-9))
        alone = 1.0 / (1.0 + links.copy_slowdown * overlap)
        marks = tuple(
            Mark(
                lane=row.lane,
                phase=row.phase,
                item=row.item,
                ms=length * alone,
                other_bytes=max(0, row.peak_bytes - row.live_bytes) if known else 0,
                goes_on=row.node is not None and row.node == after,
            )
            for row, length, after in zip(
                rows, lengths, [row.node for row in rows[1:]] + [None], strict=True
            )
        )
        return Profile(
            lanes=tuple(lane.kind for lane in self._lanes),
            kinds=kinds,
            marks=marks,
            links=links,
            head_ms=ms(self._start, rows[0].begin),
            tail_ms=tail_ms,
            host_bytes=host_bytes,
            device=str(self._device.torch_device),
            notes=notes,
        )

    def _kinds(self, spans: Iterable[Span]) -> dict[str, tuple[Item, ...]] | None:
        """Items by kind; None if a kind's lanes differ, or a lane has no kind."""
        known = self._device.memory() is not None
        costs = prices(spans)
        kinds: dict[str, tuple[Item, ...]] = {}
        for lane in self._lanes:
            items = tuple(_items(lane, costs, known))
            names = [(item.name, item.num_bytes) for item in items]
            before = kinds.setdefault(lane.kind, items)
            if not lane.kind or names != [(i.name, i.num_bytes) for i in before]:
                return None
        return kinds


def asking_node() -> int | None:
    """A number of the operator whose backward runs; None outside of backward."""
    # torch has no public name for it (2.11 to 2.13).
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def prices(spans: Iterable[Span]) -> dict[Hashable, float]:
    """ms of each rebuild; the least of its runs.

    The first run of a kernel may have waited for its compilation. It shows by the
    others of its recipe and size, whose middle then counts.
    """
    least: dict[Hashable, Span] = {}
    for span in spans:
        before = least.get(span.place)
        if before is None or span.ms < before.ms:
            least[span.place] = span
    alike: dict[tuple[str, int], list[float]] = {}
    for span in least.values():
        alike.setdefault((span.recipe, span.num_bytes), []).append(span.ms)
    found = {}
    for place, span in least.items():
        middle = statistics.median(alike[span.recipe, span.num_bytes])
        found[place] = middle if span.ms > FIRST_RUN * middle else span.ms
    return found


def _items(lane: _Lane, costs: Mapping[Hashable, float], known: bool) -> Iterable[Item]:
    """Without an allocator to ask, saved bytes are counted, and all of them."""
    for number, (saved, module) in enumerate(
        zip(lane.saved, lane.modules, strict=True)
    ):
        recipe = lane.recipes.get(number)
        yield Item(
            name=saved.name,
            num_bytes=saved.num_bytes,
            module=module,
            recipe=None if recipe is None else recipe.name,
            recipe_ms=0.0 if recipe is None else costs.get(recipe.place, 0.0),
            inputs=() if recipe is None else recipe.inputs,
            owner=saved.owner,
            held=saved.held and known,
        )


class Drive(NamedTuple):
    """Curves of the storage."""

    write: Curve
    read: Curve
    duplex_slowdown: float = 1.0
    """See `Links`; unless it was measured, both directions share one bandwidth."""
    direct: bool = False
    """See `Links.ssd_direct`."""


def fitted_links(
    copies: Iterable[Copy], drive: Drive | None, contention: Contention
) -> Links | None:
    """Curves of the copies of one step, and of the drive; None without any copy."""
    both = list(copies)
    out = _rate([copy for copy in both if copy.outwards])
    into = _rate([copy for copy in both if not copy.outwards])
    if out is None and into is None:
        return None
    return Links(
        d2h=_straight(out or into or 0.0),
        h2d=_straight(into or out or 0.0),
        ssd_write=None if drive is None else drive.write,
        ssd_read=None if drive is None else drive.read,
        copy_slowdown=contention.copy_slowdown,
        copy_slowdown_error=contention.copy_slowdown_error,
        duplex_slowdown=contention.duplex_slowdown or 0.0,
        ssd_duplex_slowdown=0.0 if drive is None else drive.duplex_slowdown,
        ssd_direct=drive is not None and drive.direct,
    )


def probe(device: Device, pool: PinnedPool, num_bytes: int = PROBE_BYTES) -> list[Copy]:
    """Measure copies of a buffer of its own: for steps that moved too little."""
    buffer = pool.take(num_bytes, for_load=True)
    if buffer is None:
        return []
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
    host = buffer.memory[:num_bytes]
    copies: list[Copy] = []
    for turn in range(NUM_PROBES):
        device.watch_copies()
        last = device.copy_out(there, host, [device.now(), *buffer.busy])
        last = device.copy_in(host, there, [last])
        last.synchronize()
        found = device.watched_copies()
        copies += found if turn else []  # the first one touches the pages
    pool.give(buffer)
    return copies


def _straight(bytes_per_second: float) -> Curve:
    return Curve.straight(COPY_STARTUP_S, max(bytes_per_second, 1.0))


def _rate(copies: list[Copy]) -> float | None:
    """Bytes per second at which the middle byte was copied.

    A mean would count the copies beside the opposite direction, which cost
    `duplex_slowdown` once more in the simulation.
    """
    rates = sorted(
        (each.num_bytes / max(each.ms / 1e3 - COPY_STARTUP_S, 1e-9), each.num_bytes)
        for each in copies
        if each.num_bytes
    )
    left = sum(num_bytes for _, num_bytes in rates) / 2
    for rate, num_bytes in rates:
        left -= num_bytes
        if left <= 0:
            return rate
    return None


def fitted_drive(
    storage: Storage | None, spans: Sequence[TraceSpan], num_threads: int
) -> Drive | None:
    """Curves of the writes and reads of one step, and what they cost one another; of
    blocks written and read for the purpose where the step tells too little. None
    without a storage, or if that is full and the step told nothing."""
    if storage is None:
        return None
    write, read = _busy(spans, "write"), _busy(spans, "read")
    if write is not None and read is not None:
        slower = min(write.bytes_per_second, read.bytes_per_second)
        if NUM_DRIVE_PROBES * num_threads * PROBE_BYTES > MOST_PROBE_S * slower:
            return Drive(write, read)
    try:
        probed = probed_drive(storage, num_threads)
    except OSError:
        return None if write is None or read is None else Drive(write, read)
    return Drive(write or probed.write, read or probed.read, probed.duplex_slowdown)


def probed_drive(storage: Storage, num_threads: int) -> Drive:
    """Write blocks, read them, and do both at once.

    Raises:
        OSError: the storage is full, or fails.
    """
    slots: list[Slot] = []
    try:
        while len(slots) < 2 * num_threads:
            slots.append(storage.allocate(PROBE_BYTES))
        # Filled: the first touch of a page would be timed as a read of the drive.
        buffers = [page_aligned(PROBE_BYTES).fill_(1) for _ in slots]
        ways = [
            (storage.write, slots[:num_threads], buffers[:num_threads]),
            (storage.read, slots[num_threads:], buffers[num_threads:]),
        ]
        transfer_rate(storage.write, slots, buffers)  # first writes are slow
        alone = [1.0 / transfer_rate(*way) for way in ways]
        began = time.monotonic()
        with ThreadPoolExecutor(len(ways)) as pool:
            list(pool.map(lambda way: transfer_rate(*way), ways))
        both_s = time.monotonic() - began
    finally:
        for slot in slots:
            storage.free(slot)
    num_gb = num_threads * PROBE_BYTES / 1e9
    longer, shorter = max(alone) * num_gb, min(alone) * num_gb
    # Above 1 where mixed transfers are slower than one after the other.
    shared = max(0.0, (both_s - longer) / shorter)
    write, read = (_straight(1e9 / seconds) for seconds in alone)
    return Drive(write, read, shared)


def _busy(spans: Sequence[TraceSpan], row: str) -> Curve | None:
    """Bytes over the time in which at least one transfer of the row was running."""
    own = sorted((s.start_ns, s.end_ns, s.num_bytes) for s in spans if s.row == row)
    busy_ns, until = 0, 0
    for start, end, _ in own:
        busy_ns += max(0, end - max(start, until))
        until = max(until, end)
    total = sum(num_bytes for _, _, num_bytes in own)
    if busy_ns == 0 or len(own) < LEAST_TRANSFERS:
        return None
    return _straight(total / (busy_ns / 1e9))
