"""Records one step and makes the planner's profile of it (plan/profile.py).

[Note: what is measured]
At each mark two moments are taken on the compute stream: when the cache begins to act
(waits, rebuilds and allocations for loads come after it) and when it has acted. What
lies between the second and the next mark's first is the operator alone. The allocator's
peak is reset at the second and read at the next mark, so that it is the operator's own;
what the saved tensors held then is subtracted, and what is pending release ([Note:
pending release]): no other plan has it. Saved tensors that only the model still holds
are subtracted, too, and the profile says how long it does ([Note: frames]). A leaf that
requires grad is its owner's: no plan frees it, and mostly it is older than the step, so
it is not among the bytes that are subtracted.
No host wait: all is read once the step is over.

[Note: held marks]
In this step the host is busy with what is watched, and where operators are short the
device waits for it: half of what lies between two marks would be launches. A large
operator has no such waits, so one factor for the whole step would take time from it and
give it to the others, and copies would be planned into that. So the device is held at
each second moment, before rebuilds and before re-runs, and operators are launched
before it goes on.

[Note: to the operator's end]
Autograd drops what it kept when an operator has ended, its gradients summed to the
shapes of its inputs. What the cache brought back would be gone before that sum, whose
memory would then hide in its place; so the recording holds it as long as autograd holds
what stands for it, and no longer: two gradients of one tensor are summed after that,
when what the operator had kept is gone.
"""

import statistics
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.cache.bypass import device_ms
from ssdtrain.cache.cursor import ItemRecipe, Observer, Saved
from ssdtrain.cache.identity import asking_node
from ssdtrain.cache.ledger import Ledger
from ssdtrain.cache.record import LaneCursor
from ssdtrain.cache.regioncall import REGION
from ssdtrain.cache.sizes import is_same_item
from ssdtrain.collectives import num_collectives
from ssdtrain.curves import Links
from ssdtrain.observe.frames import Frames
from ssdtrain.observe.hosttime import HostMeter
from ssdtrain.plan.profile import AttentionPart, Item, Mark, Phase, Profile, RegionRun
from ssdtrain.rebuild.clock import RebuildTime
from ssdtrain.transfer.device import Device

ATTENTION, MAKING = "attention", "making"
HOLD_MS = 0.4
"""For how long the device is held before an operator: see [Note: held marks]. Most are
launched in less."""
RERUN_HOLD_MS = 8.0
"""The same before a region runs again: it has some dozen of them."""
FIRST_RUN = 4.0
"""A rebuild that took so many times what others like it take was a first run."""


@dataclass
class _Lane:
    cursor: LaneCursor
    kind: str
    saved: list[Saved] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    recipes: dict[int, ItemRecipe] = field(default_factory=dict)
    rebuild_bytes: dict[int, int] = field(default_factory=dict)
    made: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Moments around the making of items that recipes store in a smaller dtype."""
    regions: dict[int, "_Region"] = field(default_factory=dict)
    autograds: set[int] = field(default_factory=set)
    """Inputs of regions that autograd itself saves, too."""

    def bytes_of(self, region: int) -> int:
        """Return the bytes that a region call saves."""
        return sum(each.num_bytes for each in self.saved if each.region == region)


@dataclass
class _Region:
    module: str
    inputs: list[int] = field(default_factory=list)
    host_ns: int = 0
    other_bytes: int = 0
    small_bytes: int = 0
    communicates: bool = False
    attention: dict[tuple[int, ...], tuple[Any, Any]] = field(default_factory=dict)
    """Moments around each attention, by its items."""


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
    host_ns: int = 0
    """Host time up to it, outside of the hooks."""
    num_calls: int = 0
    """Of the hooks, up to it."""


class _Given(weakref.ref[Any]):
    """A tensor that is held as long as the handle that autograd holds for it. No code
    of Python runs when that dies: [Note: destructors] in cache/record.py."""

    __slots__ = ("tensor",)
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    tensor: Tensor

    def __new__(
        cls, handle: object, drop: Callable[[Any], None], tensor: Tensor
    ) -> "_Given":
        self = weakref.ref.__new__(cls, handle, drop)
        self.tensor = tensor
        return self

    def __init__(self, *_: object) -> None:
        """`__new__` has made it."""


class _HostTimes(NamedTuple):
    """Host times of a profile, in ms."""

    marks_ms: list[float]
    num_handles: list[int]
    head_ms: float
    tail_ms: float
    lead_ms: float


class Recording(Observer):
    """The observer of one step. See [Note: what is measured]."""

    listens = hears_reruns = True

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        module_now: Callable[[], str],
        lingering_bytes: Callable[[], int],
        meter: HostMeter,
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._clock = ledger.clock
        self._module_now = module_now
        self._lingering_bytes = lingering_bytes
        self._lanes: list[_Lane] = []
        self._rows: list[_Row] = []
        self._alive_bytes = 0
        self._rerun_ns = 0
        self._num_collectives: int | None = 0
        self._made: tuple[Any, Any] | None = None
        """Around the making of the next item, which a recipe stores."""
        self._given: set[_Given] = set()
        """See [Note: to the operator's end]."""
        self._frames = Frames(device.torch_device)
        memory = ledger.start_level()
        self._base_bytes = self._rest_bytes = 0
        self._most_bytes = self._most_torn_bytes = self._most_reserved_bytes = 0
        self._highest_bytes = 0
        """As `_most_bytes`; second forwards of regions included."""
        self.has_refused = False
        """Whether a region call that was recorded will not run again. Such modules are
        no regions soon: [Note: calls with side effects] in observation.py."""
        self.peak_module = ""
        """The module in which most was in use."""
        if memory is not None:
            self._base_bytes = memory.allocated_bytes - lingering_bytes()
        self._meter = meter
        self._start = self._clock.now()
        self._start_ns = self._sealed_ns = self._stopped_ns = meter.now()
        self._rebuild_ns = self._start_ns
        """When the last recipe began to run."""
        self._end: Any = None
        self._awaited = -1
        """The backward whose end autograd will tell."""
        self.waited_ms = 0.0
        """Time before the step's end that was none of it."""

    def lane(self, cursor: LaneCursor, kind: str) -> None:
        """Record a new lane."""
        self._lanes.append(_Lane(cursor, kind))

    def item(self, lane: int, number: int, saved: Saved, tensor: Tensor) -> None:
        """Record a tensor that a lane saves for the first time."""
        start_ns = self._meter.now()
        own = self._lanes[lane]
        own.saved.append(saved)
        own.modules.append(self._module_now())
        if self._made is not None:
            own.made[number], self._made = self._made, None
        row = len(self._rows)
        self._frames.enter(own.cursor, number, tensor, saved.num_bytes, row)
        self._meter.exclude(start_ns)

    def recipe(self, lane: int, number: int, recipe: ItemRecipe) -> None:
        """Record that this recipe rebuilds the item."""
        self._lanes[lane].recipes[number] = recipe

    def region(self, lane: int, number: int, module: str) -> None:
        """Record the start of a region call."""
        self._lanes[lane].regions[number] = _Region(module)

    def small(self, lane: int, number: int, num_bytes: int) -> None:
        """Add what a region call has saved that is no item, and goes."""
        self._lanes[lane].regions[number].small_bytes += num_bytes

    def refused(self) -> None:
        """Note that a region call has side effects."""
        self.has_refused = True

    def reads(self, lane: int, number: int, item: int) -> None:
        """Record an item that a region call reads."""
        inputs = self._lanes[lane].regions[number].inputs
        if item not in inputs:
            inputs.append(item)

    def saved_again(self, lane: int, item: int) -> None:
        """Record that autograd saves an input of a region itself."""
        self._lanes[lane].autograds.add(item)

    def runs_again(self) -> None:
        """Note what there is before a region's forward runs again, and hold the
        device for it."""
        self._note_memory()
        self._num_collectives = num_collectives()
        self._device.hold(RERUN_HOLD_MS)
        self._rerun_ns = self._meter.now()

    def rebuilds(self) -> None:
        """The same before a recipe runs."""
        start_ns = self._meter.now()
        self._note_memory()
        self._device.hold(HOLD_MS)
        self._meter.exclude(start_ns)
        self._rebuild_ns = self._meter.now()

    def _note_memory(self) -> None:
        self._device.reset_peak()
        self._alive_bytes = self._saved_bytes()

    def ran_again(self, lane: int, number: int) -> None:
        """Record host time and extra memory of a region's second forward. The tensor
        that is asked for may be one that a recipe makes from what it gives."""
        found = self._lanes[lane].regions[number]
        found.host_ns = max(found.host_ns, self._meter.now() - self._rerun_ns)
        self._meter.exclude(self._rerun_ns)
        needed_bytes = self._needed_bytes()
        found.other_bytes = max(found.other_bytes, needed_bytes)
        peak_bytes = needed_bytes + self._alive_bytes + self._base_bytes
        self._reach(peak_bytes, found.module)
        before, behind = self._num_collectives, num_collectives()
        # Where nobody counts them there may be some.
        found.communicates |= behind is None or before != behind

    def attention(
        self, lane: int, number: int, items: Iterable[int], before: Any, behind: Any
    ) -> None:
        """Record an attention inside a region's second forward."""
        own = self._lanes[lane]
        numbers = tuple(sorted(items))
        if numbers and all(own.saved[item].region == number for item in numbers):
            own.regions[number].attention[numbers] = before, behind

    def makes(self) -> None:
        """Record the moment before a recipe makes what it stores."""
        now = self._clock.now()
        self._made = now, now

    def made(self) -> None:
        """Record the moment after it."""
        if self._made is not None:
            self._made = self._made[0], self._clock.now()

    def rebuilt(self, lane: int, number: int) -> None:
        """Record host time and extra memory of a recipe."""
        start_ns = self._meter.now()
        self._meter.recipe_ran(lane, number, start_ns - self._rebuild_ns)
        needed = self._lanes[lane].rebuild_bytes
        needed[number] = max(needed.get(number, 0), self._needed_bytes())
        self._meter.exclude(start_ns)

    def _needed_bytes(self) -> int:
        """Return the peak since `runs_again` above what was in use then, in bytes."""
        memory = self._device.memory()
        if memory is None:
            return 0
        return memory.max_allocated_bytes - self._base_bytes - self._alive_bytes

    def mark(self, lane: int, phase: Phase, number: int) -> None:
        """Record the moment at which the cache begins to serve a tensor."""
        if self._rows and self._rows[-1].end is None:
            self.seal()  # a recipe stores an input of its own
        start_ns = self._meter.now()
        self._read_peak()
        gone_bytes = self._frames.look(len(self._rows))
        if self._rows:
            self._rows[-1].live_bytes -= gone_bytes
        node = None
        if phase is Phase.BACKWARD:
            self._await_end()
            node = asking_node()
            self._frames.use(self._lanes[lane].cursor, number, len(self._rows))
        before = self._rows[-1].node if self._rows else None
        if node is None or node != before:
            self._given.clear()
        self._rows.append(
            _Row(
                lane,
                phase,
                number,
                self._clock.now(),
                node,
                host_ns=self._meter.outside_ns(),
                num_calls=self._meter.num_calls,
            )
        )
        self._meter.exclude(start_ns)

    def _await_end(self) -> None:
        """Have autograd say when this backward ends: after the last mark operators
        still run, and the gradient of an embedding is as large as its table."""
        task = torch._C._current_graph_task_id()
        if task in (-1, self._awaited):
            return
        self._awaited = task
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if self._end is None:
            self._read_peak()

    def given(self, handle: Any, tensor: Tensor) -> None:
        """Hold a tensor that was returned to backward until its operator has ended."""
        self._given.add(_Given(handle, self._given.discard, tensor))

    def seal(self) -> None:
        """Record the moment at which the cache has served; an operator runs next."""
        if not self._rows:
            return
        start_ns = self._meter.now()
        row = self._rows[-1]
        self._device.hold(HOLD_MS)
        row.end = self._clock.now()
        row.live_bytes = self._saved_bytes()
        self._device.reset_peak()
        self._sealed_ns = self._meter.now()
        self._meter.exclude(start_ns)

    def _saved_bytes(self) -> int:
        own_bytes = self._ledger.live_bytes - self._ledger.held_bytes
        return own_bytes + self._lingering_bytes() + self._frames.count()

    def stop(self) -> None:
        """End the recording with the step."""
        self._given.clear()
        self._end = self._clock.now()
        self._stopped_ns = self._meter.now()
        memory = self._device.memory()
        if memory is not None:  # since the last mark: the optimizer's step
            self._rest_bytes = memory.max_allocated_bytes - self._base_bytes

    @property
    def module(self) -> str:
        """The module that runs, or whose tensor backward asked for last; "": none."""
        is_backward = bool(self._rows) and self._rows[-1].phase is Phase.BACKWARD
        last = self._module_of(len(self._rows) - 1) if is_backward else ""
        return self._module_now() or last

    def _module_of(self, at: int) -> str:
        if at >= len(self._rows):
            return ""
        row = self._rows[at]
        return self._lanes[row.lane].modules[row.item]

    @property
    def needed_bytes(self) -> int:
        """What forward and backward needed at most beyond what was in use before."""
        return max(0, self._highest_bytes - self._base_bytes)

    @property
    def torn_bytes(self) -> int:
        """By how much what the allocator could not give back exceeded what was
        allocated, where that was most: see [Note: torn blocks] in room.py."""
        return self._most_torn_bytes - self._most_bytes

    @property
    def cached_bytes(self) -> int:
        """By how much what was reserved at most exceeded what was allocated at most:
        with so much left free no step like this one has to empty the cache."""
        return max(0, self._most_reserved_bytes - self._most_bytes)

    def _read_peak(self) -> None:
        memory = self._device.memory()
        if memory is not None and self._rows:
            peak = memory.max_allocated_bytes
            self._rows[-1].peak_bytes = peak - self._base_bytes
            self._most_bytes = max(self._most_bytes, peak)
            self._reach(peak, self._module_of(len(self._rows) - 1))
            torn = peak + memory.torn_bytes
            self._most_torn_bytes = max(self._most_torn_bytes, torn)
            reserved = memory.max_reserved_bytes
            self._most_reserved_bytes = max(self._most_reserved_bytes, reserved)

    def _reach(self, peak_bytes: int, module: str) -> None:
        if peak_bytes > self._highest_bytes:
            self._highest_bytes, self.peak_module = peak_bytes, module

    def profile(
        self,
        spans: Iterable[RebuildTime],
        links: Links | None,
        host_bytes: int,
        copying_ms: float,
        notes: Mapping[str, str],
    ) -> Profile | None:
        """Make the profile; None if the step cannot be planned. Waits for the device.

        Call it after `stop`.

        Args:
            copying_ms: time of all copies, which slowed the step down meanwhile.
        """
        rows = [row for row in self._rows if row.end is not None]
        spans = list(spans)
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
        host = self._host(rows)
        marks = tuple(
            Mark(
                lane=row.lane,
                phase=row.phase,
                item=row.item,
                ms=length * alone,
                other_bytes=max(0, row.peak_bytes - row.live_bytes) if known else 0,
                goes_on=row.node is not None and row.node == after,
                host_ms=host_ms,
                num_handles=num_handles,
            )
            for row, length, after, host_ms, num_handles in zip(
                rows,
                lengths,
                [row.node for row in rows[1:]] + [None],
                host.marks_ms,
                host.num_handles,
                strict=True,
            )
        )
        return Profile(
            lanes=tuple(lane.kind for lane in self._lanes),
            kinds=kinds,
            regions=self._regions(spans),
            marks=marks,
            links=links,
            head_ms=ms(self._start, rows[0].begin),
            tail_ms=tail_ms,
            base_bytes=max(0, self._base_bytes),
            rest_bytes=max(0, self._rest_bytes),
            head_host_ms=host.head_ms,
            tail_host_ms=host.tail_ms,
            host_lead_ms=host.lead_ms,
            host_bytes=host_bytes,
            device=str(self._device.torch_device),
            notes=notes,
        )

    @property
    def _is_gpu(self) -> bool:
        return self._device.torch_device.type == "cuda"

    def _host(self, rows: list[_Row]) -> "_HostTimes":
        """Return host times per mark; all 0 on a CPU, where the host is the device."""
        if not self._is_gpu:
            none = [0] * len(rows)
            return _HostTimes([0.0] * len(rows), none, 0.0, 0.0, 0.0)
        clock = self._clock
        ends = [row.host_ns for row in rows[1:]] + [rows[-1].host_ns]
        calls = [row.num_calls for row in rows[1:]] + [rows[-1].num_calls + 1]
        lead_ms = device_ms(clock, self._start) - self._start_ns / 1e6
        ended_ms = max(device_ms(clock, rows[-1].end), self._sealed_ns / 1e6)
        return _HostTimes(
            [
                max(0.0, (end - row.host_ns) / 1e6)
                for row, end in zip(rows, ends, strict=True)
            ],
            [
                max(0, after - row.num_calls - 1)
                for row, after in zip(rows, calls, strict=True)
            ],
            (rows[0].host_ns - self._start_ns) / 1e6,
            max(0.0, self._stopped_ns / 1e6 - ended_ms - self.waited_ms),
            max(0.0, lead_ms),
        )

    def _regions(
        self, spans: Iterable[RebuildTime]
    ) -> dict[str, tuple[RegionRun, ...]]:
        """Return region calls by kind of lane. Lanes of a kind make the same calls: of
        each call the longest time and the most memory count."""
        costs = prices(spans)
        attention_ms = prices(self._attention_spans())
        found: dict[str, list[RegionRun]] = {}
        for lane in self._lanes:
            own = found.setdefault(lane.kind, [])
            for number in range(1 + max(lane.regions, default=-1)):
                region = lane.regions.get(number, _Region(""))
                run = RegionRun(
                    module=region.module,
                    inputs=tuple(region.inputs),
                    ms=costs.get((lane.kind, REGION, number), 0.0),
                    host_ms=region.host_ns / 1e6 if self._is_gpu else 0.0,
                    other_bytes=region.other_bytes or lane.bytes_of(number),
                    small_bytes=region.small_bytes,
                    communicates=region.communicates,
                    parts=tuple(
                        AttentionPart(items=items, ms=attention_ms[lane.kind, items])
                        for items in region.attention
                    ),
                )
                if number == len(own):
                    own.append(run)
                elif own[number].other_bytes < run.other_bytes:
                    communicates = run.communicates or own[number].communicates
                    ms = max(run.ms, own[number].ms)
                    own[number] = replace(run, ms=ms, communicates=communicates)
        return {kind: tuple(runs) for kind, runs in found.items() if runs}

    def _made_spans(self) -> Iterable[RebuildTime]:
        """Return the making of what recipes store, as if it were rebuilds."""
        ms = self._clock.ms_between
        for lane in self._lanes:
            for number, moments in lane.made.items():
                num_bytes = lane.saved[number].num_bytes
                yield RebuildTime(
                    MAKING, (lane.kind, MAKING, number), num_bytes, ms(*moments)
                )

    def _attention_spans(self) -> Iterable[RebuildTime]:
        """Return attention in second forwards, as if it were rebuilds."""
        ms = self._clock.ms_between
        for lane in self._lanes:
            for region in lane.regions.values():
                for items, moments in region.attention.items():
                    num_bytes = sum(lane.saved[item].num_bytes for item in items)
                    place = lane.kind, items
                    yield RebuildTime(ATTENTION, place, num_bytes, ms(*moments))

    def _kinds(
        self, spans: Iterable[RebuildTime]
    ) -> dict[str, tuple[Item, ...]] | None:
        """Return items by kind of lane; None if lanes of a kind differ or have none."""
        known = self._device.memory() is not None
        costs = {**prices(spans), **prices(self._made_spans())}
        kinds: dict[str, tuple[Item, ...]] = {}
        for lane in self._lanes:
            frames = self._frames if known else None
            meter = self._meter if self._is_gpu else None
            items = tuple(_items(lane, costs, frames, meter))
            before = kinds.setdefault(lane.kind, items)
            if not lane.kind or not _are_alike(before, items):
                return None
            kinds[lane.kind] = tuple(map(_larger, before, items))
        return kinds


def _are_alike(before: Sequence[Item], items: Sequence[Item]) -> bool:
    """Return whether two lanes saved the same tensors, whatever their sizes."""
    return len(before) == len(items) and all(
        (one.name, one.num_bytes) == (other.name, other.num_bytes)
        or (one.name != other.name and is_same_item(one.name, other.name))
        for one, other in zip(before, items, strict=True)
    )


def _larger(one: Item, other: Item) -> Item:
    """Return the larger item, with the longer of both times in the model's hands."""
    larger = other if other.num_bytes > one.num_bytes else one
    return replace(larger, frame_marks=max(one.frame_marks, other.frame_marks))


def prices(spans: Iterable[RebuildTime]) -> dict[Hashable, float]:
    """Return the time of each rebuild in ms: the least of its runs.

    The first run of a kernel may have waited for its compilation. It shows by the
    others of its recipe and size, whose median then counts.
    """
    least: dict[Hashable, RebuildTime] = {}
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


def _rebuild_hosts_ms(lane: _Lane, meter: HostMeter) -> dict[int, float]:
    """Return what the first rebuild of each item costs the host: [Note: the host's time
    of a rebuild] in hosttime.py."""
    alike: dict[tuple[str, str, int], list[int]] = {}
    for number, recipe in lane.recipes.items():
        saved = lane.saved[number]
        key = recipe.name, saved.name, saved.num_bytes
        alike.setdefault(key, []).append(number)
    found: dict[int, float] = {}
    for items in alike.values():
        own_ms = meter.rebuild_ms(lane.cursor.number, items)
        found |= dict.fromkeys(items, own_ms)
    return found


def _items(
    lane: _Lane,
    costs: Mapping[Hashable, float],
    frames: Frames | None,
    meter: HostMeter | None,
) -> Iterable[Item]:
    """Make the items of a lane; without `frames` (a CPU) all saved bytes count."""
    hosts_ms = {} if meter is None else _rebuild_hosts_ms(lane, meter)
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
            recipe_host_ms=hosts_ms.get(number, 0.0),
            recipe_other_bytes=lane.rebuild_bytes.get(number, 0),
            inputs=() if recipe is None else recipe.inputs,
            made_ms=costs.get((lane.kind, MAKING, number), 0.0),
            owner=saved.owner,
            region=saved.region,
            serves=-1 if number in lane.autograds else saved.serves,
            floats=saved.serves >= 0 and number in lane.autograds,
            held=saved.held and frames is not None,
            frame_marks=(
                0 if frames is None else frames.marks(lane.cursor.number, number)
            ),
        )
