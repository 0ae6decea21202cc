"""Regions in the cache: saved tensors that the forward of their module makes again.

[Note: regions]
A region call stores the inputs of its module's forward as saved tensors (kept or moved
like all others) and gives out handles for what autograd saves meanwhile. When the
forward has ended, and nothing but its result has changed (`[Note: side effects]` in
regions/watch.py), the handles let go of their tensors. The first one that backward asks
for runs the forward again, from the inputs, under the same conditions, and every saved
tensor is handed to its handle by its place: the n-th one that is no parameter. Nothing
is pushed in forward, so a re-run is told from a backward that is differentiated by
whose hooks are the innermost: the collector's stand there during a re-run alone.
A call inside a checkpoint of the user's saves nothing through our hooks, and is none.
(tests/ssdtrain/regions/test_regions.py)

[Note: narrow copies in regions]
Where recipes are looked for in a region (to learn what a plan may choose), one may
store a copy of its own: a widened tensor in its smaller dtype. Autograd does not save
it, so it has no place. Stored until backward, it is as much again as the region's
inputs for each norm that computes in float32: 40 hidden states of a T5 of 16 layers,
0.7 GB, which checkpointing at 4.8 GB does not have. So it goes with the region's other
tensors, and is copied again from the tensor at the place that it was made for, once the
re-run's graph is gone.
(tests/ssdtrain/regions/test_narrow_copies.py)
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable, forward_ad
from torch.optim import Optimizer

from ssdtrain.cache.attention import StoredAttention
from ssdtrain.cache.course import OUTSIDE_PLAN, Entry
from ssdtrain.cache.digest import Digests, word_bytes
from ssdtrain.cache.handles import KeptHandle
from ssdtrain.cache.identity import (
    Stamp,
    check_late_writer,
    check_version,
    identify,
    is_plain,
    raw_bytes,
    stamp_of,
)
from ssdtrain.cache.living import Living
from ssdtrain.cache.quiet import Around, ForwardHooks
from ssdtrain.cache.record import (
    Handle,
    Known,
    Lane,
    RebuiltView,
    Record,
    RecordView,
    item_of,
    part_of,
)
from ssdtrain.cache.savedindex import (
    FromRegion,
    SavedIndex,
    SavedTensors,
    SealedIndex,
    hooks_of,
    looks_of,
)
from ssdtrain.cache.scope import OWNER
from ssdtrain.cache.state import Holding, RecordState
from ssdtrain.cache.table import RegionPart
from ssdtrain.cache.traced import untraced
from ssdtrain.cache.wrapped import as_made, bytes_of, counter_of
from ssdtrain.counters import Count, Fallback
from ssdtrain.errors import ForkedError, InPlaceError, RegionError
from ssdtrain.plan.placement import Placement
from ssdtrain.rebuild.modes import may_meddle, without_modes
from ssdtrain.rebuild.recipes import narrow
from ssdtrain.regions.arguments import Arguments, flatten, may_change
from ssdtrain.regions.before import Before, Seen
from ssdtrain.regions.conditions import (
    Conditions,
    RandomState,
    caches_parametrizations,
    modes_stand,
)
from ssdtrain.regions.find import Region
from ssdtrain.regions.rerun import (
    Collector,
    as_part,
    is_parameter,
    views_parameter,
)
from ssdtrain.regions.weights import Weights

logger = logging.getLogger(__name__)

TINY_BYTES = 4096
"""What is smaller inside a region stays: its handle would take as much."""
REGION = "region"
MAX_DRAWS = 3
"""Re-runs of a forward that draws, while others draw from the same generator."""


class Choice(Enum):
    """Which regions run again."""

    NONE = auto()
    ALL = auto()
    PLANNED = auto()
    """Those of the lane's plan."""


Owner = weakref.ref[Any] | None


class Place(tuple[torch.Size, torch.dtype, tuple[int, ...] | None, Owner]):
    """One tensor that autograd saved in a region call: shape, dtype and strides, which
    that of a re-run must have as well, and who waits for it (a `Record` or a
    `PlaceHandle`; None: it was stored, or is a recipe's). A tuple: made without a call
    of Python."""

    __slots__ = ()


def place_of(tensor: Tensor, owner: Owner) -> Place:
    """The place of a tensor, which may be sparse, nested or a subclass."""
    if tensor.layout is not torch.strided:
        return Place((tensor.shape, tensor.dtype, None, owner))
    if tensor.is_nested:  # it has no sizes
        return Place((torch.Size(()), tensor.dtype, None, owner))
    return Place((tensor.shape, tensor.dtype, tensor.stride(), owner))


def offsets_of(tensor: Tensor) -> Tensor | None:
    """What tells the lengths of a nested tensor from those of all others; None: there
    is nothing."""
    if tensor.layout is not torch.jagged:
        return None
    # Of the class that all jagged tensors have; torch's stubs know plain ones alone.
    found: Tensor = tensor.offsets()  # type: ignore[attr-defined]
    return found


class PlaceHandle(Handle):
    """A saved tensor of a region call that is no record: too small, or a row of a
    table."""

    __slots__ = (
        "call",
        "counter",
        "num_bytes",
        "tensor",
        "version",
        "written_late",
    )

    def __init__(self, call: "RegionCall", tensor: Tensor, num_bytes: int) -> None:
        self.call = call
        # Shares the version counter: see [Note: in-place changes].
        self.tensor: Tensor | None = tensor.detach()
        """While the forward runs, and from a re-run to the use."""
        self.version = tensor._version
        self.counter: Tensor | None = None
        """Of a wrapper, and from the end of the forward on; it holds no memory."""
        self.written_late = tensor.grad_fn is None
        """Whether its operator may have filled it after autograd saved it."""
        self.num_bytes = num_bytes
        """Bytes that the ledger counts for it while its tensor is here."""
        self.number = -1
        self.epsilon = None
        self.seal = None

    @property
    def source(self) -> FromRegion:  # type: ignore[override]
        """No recipe reads it."""
        return FromRegion(self.call)

    @property
    def name(self) -> str:
        """For errors."""
        return f"a tensor saved in {self.call.region.path}"

    def stayed(self) -> Tensor:
        """The tensor, in a forked child.

        Raises:
            ForkedError: its region would have to run again.
        """
        if self.tensor is None:
            raise ForkedError(
                f"{self.name} is made again by the process that forked this one; run "
                "backward where forward ran, or fork before forward."
            )
        return self.tensor

    def get(self) -> Tensor:
        """The tensor, made again if it must be.

        Raises:
            InPlaceError: it was changed after it was saved.
            RegionError: the re-run did not make it.
        """
        call, counter = self.call, self.counter
        if counter is None and not call.drops:
            counter = self.tensor
        if counter is not None and counter._version != self.version:
            check_version(counter, self.version, self.name)
        if self.written_late and call.drops:
            check_late_writer(self)
        tensor = self.tensor
        if tensor is None:
            tensor = call.made_for(self)
        if call.drops:
            self.tensor = None
            if self.num_bytes:
                call.handed_over(self.num_bytes)
        return tensor

    def drop(self, nothing: Tensor) -> None:
        """Its region's forward has ended: keep no more than a probe of its version.

        Args:
            nothing: an empty tensor on the device.
        """
        tensor, self.tensor = self.tensor, None
        if self.counter is None and tensor is not None:
            tensor.data = nothing
            self.counter = tensor


def is_bare(tensor: Tensor) -> bool:
    """Whether it is plain bytes that an operator made: no leaf, no part of one."""
    if not is_plain(tensor) or tensor.grad_fn is None:
        return False
    base = tensor._base
    return base is None or (type(base) is Tensor and not base.is_leaf)


class Input(NamedTuple):
    """A tensor among the arguments."""

    handle: Any
    requires_grad: bool
    is_parameter: bool
    is_part: bool
    """Whether it is a view of a parameter: what is saved of it has no place."""


class RegionCall:
    """One call of a region's forward."""

    def __init__(
        self,
        regions: "Regions",
        region: Region,
        number: int,
        forward: Any,
        lane: Lane,
        seen: Seen,
    ) -> None:
        self.region = region
        self.number = number
        """Of the region calls of its lane."""
        self.lane = lane
        self.records = Known()
        """Those that its re-run makes again."""
        self.drops = False
        """Whether the forward has ended, and what it saved can be made again."""
        self.is_pinned = False
        """Whether what was made again stays: its weights are about to change."""
        self.by_index = False
        """Whether its tensors are in `saved`, and not among the places."""
        self.saved = SavedTensors()
        """See [Note: saved by index]."""
        self.parameter_bytes = 0
        """Of parameters that it saved by index."""
        self.sealed = -1
        """Index of the tensor that `verify` looks at next."""
        self.special: set[int] = set()
        """That one, and those that its plan stores."""
        self.part: RegionPart | None = None
        """What its plan says of its tensors."""
        self.run: Any = None
        """The lane that follows that plan."""
        self.lost_weights = False
        """Whether an optimizer has written to the shards of its weights since."""
        self._regions = regions
        self._cache = regions.cache
        self._forward = forward
        self._places: list[Place] = []
        self._copies: dict[int, torch.dtype] = {}
        """Dtypes of narrow copies, by the place of what they are copies of."""
        self._copied: tuple[weakref.ref[Record], torch.dtype] | None = None
        """The copy that was made for the next place."""
        self._attention = StoredAttention(self._cache, region.attention, region.path)
        self._unpack: Callable[[Any], Tensor] = regions.unpack
        self._leaves: list[Any] = []
        self._arguments = Arguments(0, (), [])
        self._task: int | None = None
        self.dropped_bytes = 0
        self.holding = Holding(lane)
        device = self._cache.device.torch_device
        self._device = device
        self._conditions = Conditions.now(device)
        self._before = Before(region.path, seen)
        self._slow = region.watch.slow()
        """Random states that nobody draws from, while the forward runs."""
        self._weights = Weights(seen.tensors, seen.placed)
        self._inputs: list[tuple[Tensor, int]] = []
        self._contents: list[Tensor | None] = []
        """Digests of the inputs, in a call that is not trusted yet."""
        self._makes_lengths = False
        """Whether it saves a nested tensor of lengths that no argument has."""
        self._booked: set[tuple[Stamp, int]] | None = None
        """Storages whose bytes are booked, by version; None before the first one."""
        self._held_bytes = 0
        """Booked for handles that are no records."""
        self._random = RandomState.now(device)
        self._random_end: RandomState | None = None
        """Where the generators stood behind the forward, if it draws."""

    # -- forward ------------------------------------------------------------------

    def store(self, leaves: list[Any], arguments: Arguments, pack: Any) -> None:
        """Store the arguments."""
        self._arguments = arguments
        keeps = self._cache.keeps_inputs(self)
        stored: dict[int, Input] = {}
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._leaves.append(leaf)
                continue
            key = id(leaf)
            if key in stored:  # code may ask whether `key is value`
                self._leaves.append(stored[key])
                continue
            self._inputs.append((leaf, leaf._version))
            # Torch asks in Python whether something is a parameter.
            is_parameter = type(leaf) is not Tensor and isinstance(leaf, nn.Parameter)
            handle = self._kept(leaf) if keeps and is_bare(leaf) else pack(leaf)
            is_part = not is_parameter and views_parameter(leaf)
            own = Input(handle, leaf.requires_grad, is_parameter, is_part)
            stored[key] = own
            self._leaves.append(own)
            if self._cache.course.observer.listens:
                self._tell_of_input(handle)
        if not self.region.watch.is_trusted and not self._cache.captures.is_forward:
            self._contents = [self._digest(leaf) for leaf, _ in self._inputs]

    def _digest(self, leaf: Tensor) -> Tensor | None:
        """Of an input's bytes: a kernel may write to it past its version."""
        if not is_plain(leaf) or leaf.device != self._device:
            return None
        if isinstance(leaf, nn.Parameter):
            return None
        with torch.no_grad():
            return self._regions.digests.of(leaf.detach(), word_bytes(leaf))

    def _kept(self, tensor: Tensor) -> KeptHandle:
        """The handle of an argument that stays, and of which nobody wants a record."""
        key = stamp_of(tensor), tensor._version
        if key not in self.lane.inputs:
            self.lane.inputs.add(key)
            base = tensor._base
            num_bytes = (tensor if base is None else base).nbytes
            self.holding.live_bytes += num_bytes
            self._cache.ledger.live(num_bytes)
            self._cache.ledger.counters.add_all(
                {Count.SAVED: num_bytes, Count.KEPT: num_bytes}
            )
        return KeptHandle((tensor.detach(), tensor._version))

    def _tell_of_input(self, handle: Any) -> None:
        course = self._cache.course
        item = item_of(handle)
        if item >= 0:
            course.observer.reads(course.of(self.lane).number, self.number, item)

    def save(self, tensor: Tensor) -> Any:
        """The handle of a tensor that is saved by index, or of one that is none of
        these: a parameter, or what a backward inside the forward saves."""
        if may_meddle():
            with without_modes():
                return self.save(tensor)
        if torch._C._current_graph_task_id() != -1 or is_parameter(tensor):
            return self._cache.pack(tensor)
        return self.handle_of(self._add_saved(tensor), tensor)

    def _add_saved(self, tensor: Tensor) -> int:
        saved = self.saved
        saved.versions.append(tensor._version)
        saved.tensors.append(tensor)
        return len(saved.tensors) - 1

    def handle_of(self, index: int, tensor: Tensor) -> Any:
        """The handle of a tensor that the plan stores, or that `verify` looks at."""
        part, run = self.part, self.lane.run
        if part is not None and run is not None:
            row, handle = part.marking.get(index), None
            if row is not None:
                run.mark_in_region(row)
            elif index in part.stored:
                handle = run.store_in_region(*part.stored[index], tensor)
            if handle is not None:
                self._attention.stored(index, handle)
                self.saved.stored.add(index)
                if index == self.sealed:  # nothing makes it again: the next one
                    self.seal_at(index + 1)
                return handle
        if index != self.sealed:
            return SavedIndex((self, index))
        sealed, verifier = SealedIndex(SavedIndex((self, index))), self._cache.verifier
        verifier.left = 0
        verifier.seal(sealed, tensor)
        self.seal_at(index + 1 + verifier.left)
        return sealed

    def seal_at(self, index: int) -> None:
        """Let `verify` look at the tensor of this index, if there will be one."""
        self.sealed = index
        self.special.add(index)

    def stored(self, tensor: Tensor, handle: Handle) -> Handle:
        """The next place; its tensor went the general way."""
        if self.by_index:  # a re-run saves it as well, and nobody asks for that one
            self._add_saved(tensor)
            return handle
        source = part_of(handle).source
        owner = None
        if isinstance(source, RecordView) and source.record.region is self:
            owner = weakref.ref(source.record)
        elif isinstance(source, RebuiltView) and self._copied is not None:
            owner, self._copies[len(self._places)] = self._copied
        self._copied = None
        self._attention.packed(len(self._places), tensor, handle)
        self._note_lengths(tensor)
        self._places.append(place_of(tensor, owner))
        return handle

    def _note_lengths(self, tensor: Tensor) -> None:
        """A nested tensor that a re-run makes has lengths of its own, which equal no
        other's; those of an argument are the argument's again."""
        if not tensor.is_nested:
            return
        offsets = offsets_of(tensor)
        own = (offsets_of(leaf) for leaf, _ in self._inputs if leaf.is_nested)
        if offsets is None or all(offsets is not each for each in own):
            self._makes_lengths = True

    def makes(self, entry: Entry) -> bool:
        """Whether its re-run makes a new saved tensor again."""
        if entry.held:
            return False
        if entry.order is None:
            return True
        # What a recipe stores under a plan goes where its own order says.
        is_recipes = self._cache.course.serving != OUTSIDE_PLAN
        return entry.order.placement is Placement.RERUN and not is_recipes

    def add(self, record: Record, dtype: torch.dtype) -> None:
        """Make a record again, which `makes` has said.

        Args:
            dtype: of its tensor.
        """
        record.region = self
        self.records.add(record.key, record)
        # A recipe's: see [Note: narrow copies in regions].
        if self._cache.course.serving != OUTSIDE_PLAN:
            self._copied = weakref.ref(record), dtype

    def hold(self, tensor: Tensor) -> Handle:
        """The next place, for plain bytes or a wrapper of such; nobody but its handle
        knows of it."""
        part = bytes_of(tensor)
        num_bytes = self._new_bytes(part) if is_plain(part) else 0
        handle = PlaceHandle(self, tensor, num_bytes)
        if not is_plain(tensor):
            handle.counter = counter_of(tensor)
            self._note_lengths(tensor)
        self._places.append(place_of(tensor, weakref.ref(handle)))
        return handle

    def hold_small(self, tensor: Tensor, keep: Callable[[Tensor], Handle]) -> Handle:
        """The next place, for plain bytes below `min_bytes`: no plan counts them.

        Args:
            keep: makes a handle under which the tensor stays. Statistics of an
                attention do, where the plan stores its output; in the observed step
                all do, since a norm's recipe reads its own.
        """
        number = len(self._places)
        course = self._cache.course
        storing = course.of(self.lane).storing
        if self.number in storing and self._attention.expects(number):
            return self.stored(tensor, keep(tensor))
        if course.observer.listens:
            self._attention.small(number)
            self._places.append(place_of(tensor, None))
            return keep(tensor)
        return self.hold(tensor)

    @property
    def num_places(self) -> int:
        """Tensors saved so far that are no parameters."""
        return len(self.saved.versions) or len(self._places)

    def _new_bytes(self, tensor: Tensor) -> int:
        """Book what it adds to the tensors that are alive."""
        booked = self._booked
        if booked is None:
            inputs = (each for each in self._inputs if is_plain(each[0]))
            booked = {(stamp_of(leaf), version) for leaf, version in inputs}
            self._booked = booked
        key = stamp_of(tensor), tensor._version
        if key in booked:
            return 0
        booked.add(key)
        num_bytes = (tensor if tensor._base is None else tensor._base).nbytes
        self._held_bytes += num_bytes
        self.holding.live_bytes += num_bytes
        self._cache.ledger.live(num_bytes)
        return num_bytes

    def end(self) -> None:
        """The forward has ended: let go of what it saved, if it can run again."""
        if self.by_index:
            self._look_at_saved()
        reason = self._obstacle()
        if reason is not None:
            self._regions.refuse(self.region, reason)
        else:
            self.drops = True
        behind = RandomState.now(self._device)
        if not self._random.is_same(behind):
            self._random_end = behind
        self._slow.clear()
        if not self.drops:
            self._before.forget()
        self._inputs.clear()
        self._settle()

    def _look_at_saved(self) -> None:
        saved, region = self.saved, self.region
        self._cache.verifier.left = max(0, self.sealed - len(saved.tensors))
        for tensor in saved.tensors:
            self._note_lengths(tensor)
        arguments = [leaf for leaf, _ in self._inputs]
        region.layout = saved.look(region.layout, arguments)
        if self.part is not None:
            self.run.leave_region(self.part, saved.layout.looks)
        self._held_bytes = num_bytes = saved.layout.num_bytes
        self.holding.live_bytes += num_bytes
        self._cache.ledger.live(num_bytes)

    def abort(self) -> None:
        """The forward raised: what it saved is stored, and goes with its graph."""
        self.saved.keep()
        self._slow.clear()
        self._before.forget()
        self._inputs.clear()

    def _obstacle(self) -> str | None:
        change = self.region.watch.change(self._before.seen, self._slow)
        if change is not None:
            return change
        if any(tensor._version != version for tensor, version in self._inputs):
            return "it changes one of its inputs in place"
        for (leaf, _), before in zip(self._inputs, self._contents, strict=False):
            if before is not None and not torch.equal(self._digest(leaf), before):  # type: ignore[arg-type]
                # For good: a call that is trusted is not looked at so closely.
                self.region.refusal = "it writes to an input, past its version"
                return self.region.refusal
        if not self._weights.unwritten():
            return "it writes to one of its parameters"
        if self._makes_lengths:
            return "it makes a nested tensor, whose lengths would be others"
        return None

    def _settle(self) -> None:
        for record in self.records.values():
            if self.drops:
                self.dropped_bytes += record.num_bytes
                record.drop()
            else:
                record.region = None
                self._cache.place_again(record)
        nothing = self._cache.nothing
        for _, _, _, owned in self._places if self.drops else ():
            owner = None if owned is None else owned()
            if type(owner) is PlaceHandle:
                owner.drop(nothing)
        if self.by_index:
            self._settle_saved()
        self._booked = None
        booked = {Count.SAVED: self._held_bytes}
        if not self.drops:
            booked[Count.KEPT] = self._held_bytes
        self._cache.ledger.counters.add_all(booked)
        if self.drops:
            self.dropped_bytes += self._held_bytes
            self.holding.live_bytes -= self._held_bytes
            self._cache.ledger.live(-self._held_bytes)

    def _settle_saved(self) -> None:
        cache, saved = self._cache, self.saved
        if self.part is None:  # else its table tells them
            cache.ledger.counters.add(Count.PARAMETERS, self.parameter_bytes)
        if not self.drops:
            saved.keep()
            return
        for tensor in saved.drop(cache.nothing):
            if tensor.numel():
                cache.offloader.fall_back(Fallback.KEPT_UNSUPPORTED)

    # -- backward -----------------------------------------------------------------

    def made_for(self, handle: PlaceHandle) -> Tensor:
        """The tensor of one of its handles, made again.

        Raises:
            InPlaceError, RegionError: as `run_again`.
        """
        # One lock for all: another thread's backward may ask for the same tensors.
        with self._cache.lock:
            if handle.tensor is None:
                self.run_again()
            tensor = handle.tensor
        if tensor is None:
            raise RegionError(f"{handle.name}: its forward, run again, did not save it")
        return tensor

    def use(self, index: int) -> Tensor:
        """A tensor that was saved by index, made again if it must be.

        Raises:
            InPlaceError: it was changed after it was saved.
            RegionError: the re-run did not make it.
        """
        row = None if self.part is None else self.part.using.get(index)
        if row is None:
            return self._use(index)
        at = self.run.begin_use(row)
        tensor = self._use(index)
        self.run.end_use(at)
        return tensor

    def _use(self, index: int) -> Tensor:
        saved = self.saved
        probes = saved.probes
        if not probes:
            tensor = saved.tensors[index]
            check_version(tensor, saved.versions[index], self._name_of_saved)
            return tensor.detach()
        if probes[index]._version != saved.versions[index]:
            check_version(probes[index], saved.versions[index], self._name_of_saved)
        made = saved.made[index]
        if made is None:
            with self._cache.lock:
                made = saved.made[index]
                if made is None:
                    self.run_again()
                    made = saved.made[index]
        if made is None:
            raise RegionError(
                f"{self._name_of_saved}: its forward, run again, did not save it"
            )
        if self.drops:
            if saved.leaves[index]:
                check_late_writer(SavedIndex((self, index)))
            saved.made[index] = None
            num_bytes = saved.layout.own_bytes[index]
            if num_bytes:  # its operator frees it before the next one asks
                self.holding.live_bytes -= num_bytes
                self._cache.ledger.live(-num_bytes)
        return made

    @property
    def _name_of_saved(self) -> str:
        return f"a tensor saved in {self.region.path}"

    def run_again(self) -> None:
        """Make everything that was saved again, and hand it to its handles.

        Raises:
            RegionError: the forward did not do the same again.
            InPlaceError: an input, a weight or a buffer was changed meanwhile.
        """
        with self._cache.lock:
            self._cache.enter_backward(self.lane)
            self._check()
            with self._cache.course.inside_use():  # its inputs' uses are no marks
                found = self._collected()
            self._hand_out(found)
            self._forget_later()

    def _collected(self) -> list[Tensor]:
        for _ in range(MAX_DRAWS + 1):
            found = self._collect()
            if found is not None:
                return found
        raise RegionError(
            f"{self.region.path} draws random numbers, and another thread draws from "
            "the same generator, so its masks cannot be drawn again. Give that thread "
            "a torch.Generator of its own, or set recompute='off'."
        )

    def _weights_stand(self) -> bool:
        return self._weights.stand()

    def _check(self) -> None:
        if self.lost_weights or not self._weights_stand():
            raise InPlaceError(
                f"a parameter or buffer of {self.region.path} was changed between "
                "its forward and its backward, and its forward would run again "
                "with the new values. Change it behind backward, or set "
                "recompute='off'."
            )

    def _collect(self) -> list[Tensor] | None:
        """What the forward saves; None if somebody else drew meanwhile."""
        found: list[Tensor] = []
        args, kwargs = self._arguments.of(self._values())
        attention = self._attention.watched(self.num_places)
        course = self._cache.course
        course.observer.runs_again()
        clock = self._cache.ledger.clock
        take: Any = attention.hears
        if not self.by_index:
            take = partial(self._take, found, attention.hears)
        collector = Collector(take, self.num_places, may_stop=self._may_stop)
        # Also where nothing is known to be drawn: `torch.random.fork_rng()` hides it.
        before = RandomState.now(self._device)
        self._random.restore(self._device)
        try:
            place = self.lane.kind, REGION, self.number
            # An optimizer's step may run under a mode.
            with (
                without_modes(),
                self._before.restored(self.region.watch.hooks),
                self._conditions.restored(),
                clock.measure(REGION, place, 0),
                attention.standing(),
            ):
                collector.run(self._forward, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise self._regions.shortage(self, error) from error
        finally:
            drawn = None if self._random_end is None else RandomState.now(self._device)
            before.restore(self._device)
        course.observer.ran_again(course.of(self.lane).number, self.number)
        if self._random_end is not None and drawn is not None:
            if not self._random_end.is_same(drawn):
                return None
        if collector.num_taken != self.num_places:
            raise RegionError(
                f"{self.region.path} saved {self.num_places} tensors in its forward "
                f"and {collector.num_taken} when it ran again: it does not do the same "
                "twice. Set regions to leave it out, or recompute='off'."
            )
        if self.by_index:
            found = collector.found
            self._compare(found)
        for reason in attention.reasons:
            self._regions.computes(self.region, reason)
        lane = course.of(self.lane).number
        self._attention.learn(attention, lane, self.number, len(self._places))
        return None if self._attention.is_lost(attention) else found

    def _compare(self, found: list[Tensor]) -> None:
        """Compare what the re-run saved with what the forward did, by its looks."""
        looks, made = self.saved.layout.looks, looks_of(found)
        if looks != made:
            pairs = enumerate(zip(looks, made, strict=True))
            number = next(n for n, (look, again) in pairs if look != again)
            raise self._other(number, looks[number], made[number])

    def _other(self, number: int, look: Any, made: Any) -> RegionError:
        return RegionError(
            f"{self.region.path}: the saved tensor {number} was {look} in its forward "
            f"and is {made} now that it ran again. Set regions to leave it out, or "
            "recompute='off'."
        )

    def _values(self) -> list[Any]:
        """Of its arguments; what was one tensor is one again."""
        made: dict[int, Tensor] = {}
        values = list(self._leaves)
        for at, leaf in enumerate(values):
            if type(leaf) is not Input:
                continue
            key = id(leaf)
            if key not in made:
                kept = type(leaf.handle) is KeptHandle
                tensor = leaf.handle.get() if kept else self._unpack(leaf.handle)
                if not leaf.is_parameter:
                    tensor = tensor.detach()
                    if leaf.is_part:
                        tensor = as_part(tensor, leaf.requires_grad)
                    else:
                        tensor.requires_grad_(leaf.requires_grad)
                made[key] = tensor
            values[at] = made[key]
        return values

    def _may_stop(self) -> bool:
        """Whether nothing is left to be put back by what is behind the last tensor of
        a re-run; and a forward that draws must run to its end."""
        return self._random_end is None and self._before.is_untouched()

    def _take(
        self,
        found: list[Tensor],
        placed: Callable[[int, Tensor], None] | None,
        number: int,
        tensor: Tensor,
    ) -> None:
        """Keep of a tensor until all are there: no part of the graph."""
        if placed is not None:
            placed(number, tensor)
        place = self._places[number]
        shape, dtype, stride, owned = place
        if tensor.layout is not torch.strided or tensor.is_nested:
            made = place_of(tensor, None)[:3]
        else:
            made = tensor.shape, tensor.dtype, tensor.stride()
        if made != (shape, dtype, stride):
            raise self._other(number, place[:3], made)
        owner = None if owned is None else owned()
        if owner is None:
            found.append(self._cache.nothing)
        elif type(owner) is PlaceHandle:
            found.append(tensor.detach())
        elif number in self._copies:
            part = as_made(bytes_of(tensor), tensor)
            found.append((part if part._base is None else part._base).detach())
        else:
            part = bytes_of(tensor)
            key, _ = identify(part)
            found.append(raw_bytes(part, key))

    def _hand_out(self, found: list[Tensor]) -> None:
        made_bytes = 0
        if self.by_index:
            own_bytes = self.saved.layout.own_bytes
            for index, before in enumerate(self.saved.made):
                if before is None and index not in self.saved.stored:
                    self.saved.made[index] = found[index]
                    made_bytes += own_bytes[index]
            found = []
        for number, (_, _, _, owned) in enumerate(self._places):
            tensor, found[number] = found[number], self._cache.nothing
            owner = None if owned is None else owned()
            if type(owner) is PlaceHandle:
                if owner.tensor is None:
                    owner.tensor = tensor
                    made_bytes += owner.num_bytes
            elif owner is not None and owner.state is RecordState.DROPPED:
                if number in self._copies:
                    with without_modes():
                        tensor = narrow(tensor, self._copies[number])
                    tensor = raw_bytes(tensor, identify(tensor)[0])
                owner.made_again(tensor)
        if made_bytes:
            self.holding.live_bytes += made_bytes
            self._cache.ledger.live(made_bytes)

    def handed_over(self, num_bytes: int) -> None:
        """Autograd alone holds so many bytes of a handle."""
        if num_bytes:
            self.holding.live_bytes -= num_bytes
            self._cache.ledger.hand_over(num_bytes)

    def _forget_later(self) -> None:
        """What this backward does not ask for goes when it ends."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task == self._task or self.is_pinned:
            return
        self._task = task
        own = weakref.ref(self)

        def forget() -> None:
            call = own()
            if call is not None:
                call.forget()

        Variable._execution_engine.queue_callback(forget)

    def forget(self) -> None:
        """Let go of what was made again and not used."""
        with self._cache.lock:
            if self.is_pinned:
                return
            for record in self.records.values():
                record.drop_again()
            saved = self.saved
            for index, made in enumerate(saved.made):
                if made is not None:
                    saved.made[index] = None
                    self.handed_over(saved.layout.own_bytes[index])
            for _, _, _, owned in self._places:
                owner = None if owned is None else owned()
                if type(owner) is PlaceHandle and owner.tensor is not None:
                    owner.tensor = None
                    self.handed_over(owner.num_bytes)
            self._cache.collect()

    def reads(self, written: set[int]) -> bool:
        """Whether its re-run reads one of these tensors, by `id`."""
        return any(id(each) in written for each in self._weights.tensors)

    def reads_shards(self, written: set[int]) -> bool:
        """Whether these are what its weights are gathered from, by `id`: outside of its
        forward FSDP2's modules have their shards as parameters."""
        own = self.region.module.parameters()
        return any(id(parameter) in written for parameter in own)

    def pin(self) -> None:
        """Make everything again and keep it: the weights are about to change.

        Where they have changed already nothing can: a backward would raise.
        """
        if not self.drops or self.is_pinned or not self._weights_stand():
            return
        with self._cache.lock:
            self.is_pinned = True
            try:
                self.run_again()
            except BaseException:
                self.is_pinned = False
                raise
            self.drops = False
            for record in self.records.values():
                record.pin()


class Regions:
    """The region calls of one cache."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.choice = Choice.NONE
        self.current: RegionCall | None = None
        self.pack: Any = None
        """The hooks of the forward that runs."""
        self.unpack: Any = None
        self._hooks: ForwardHooks | None = None
        self._inner: ForwardHooks | None = None
        """Those of the region's call that runs, if it has its own."""
        self.reasons: dict[str, str] = {}
        """Why modules are no regions, by path."""
        self._alive = Living[RegionCall]()
        self._digests: Digests | None = None
        self._looked_at: set[Region] = set()

    @property
    def digests(self) -> Digests:
        """Made when the first region is looked at."""
        if self._digests is None:
            self._digests = Digests(self.cache.device.torch_device)
        return self._digests

    def hooks_are(self, hooks: ForwardHooks) -> None:
        """A forward of the model is about to run under these hooks."""
        self.pack, self.unpack = hooks.pack_hook, hooks.unpack_hook
        self._hooks = hooks

    def forward_ends(self) -> None:
        """It is over; the hooks may go with the graph."""
        self.pack = self.unpack = self._hooks = self.current = None

    def begin(
        self, region: Region, forward: Any, args: Any, kwargs: Any
    ) -> RegionCall | Around | None:
        """A call of a region's forward begins.

        Returns:
            The call, if it will run again; else what is to be around it, if anything.
        """
        if self.choice is Choice.NONE or self.current is not None:
            return None
        if self.cache.owner.is_elsewhere:
            return None
        lane = self.cache.lanes.current
        if not lane.kind or not torch.is_grad_enabled():
            return None
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None or top[0] is not self.pack:
            return None  # a user's checkpoint runs it again
        if torch._C._current_graph_task_id() != -1:
            return None
        number, lane.num_regions = lane.num_regions, lane.num_regions + 1
        if not self._is_chosen(lane, number):
            return self._around(lane, number, (*args, *kwargs.values()))
        meter = self.cache.meter
        since_ns = 0 if meter is None else meter.outside_ns()
        leaves, arguments = flatten(args, kwargs)
        reason = self._refusal(region, leaves)
        if reason is None:
            seen = region.watch.look()
            reason = seen.refusal
        if reason is not None:
            self.refuse(region, reason)
            return None
        with self.cache.lock:
            course = self.cache.course
            course.observer.region(course.of(lane).number, number, region.path)
            call = RegionCall(self, region, number, forward, lane, seen)
            course.storing = number
            try:
                call.store(leaves, arguments, self.pack)
            finally:
                course.storing = OUTSIDE_PLAN
            self._alive.add(call)
            self.cache.retired.watch(call, call.holding)
            lane.num_live += 1
            self.current = call
            self.cache.course.region = number
            self._save_by_index(call)
        if meter is not None:
            meter.region_began(since_ns)
        return call

    def _around(
        self, lane: Lane, number: int, arguments: Iterable[Any]
    ) -> Around | None:
        """See [Note: quiet calls]."""
        found: Around | None = None
        if lane.run is not None and self._hooks is not None:
            found = lane.run.quietly(number, self._hooks, arguments)
        elif lane.binding is not None:
            found = lane.binding.watched(arguments)
        return found

    def end(self, call: RegionCall) -> None:
        """Its forward has ended."""
        if self.cache.owner.is_elsewhere:  # forked inside of it: nothing is dropped
            return
        meter = self.cache.meter
        since_ns = 0 if meter is None else meter.outside_ns()
        with self.cache.lock:
            self._leave()
            call.end()
            if call.drops and call.dropped_bytes:
                counters = self.cache.ledger.counters
                counters.rebuilt(REGION, call.dropped_bytes)
            if not call.drops:
                self.cache.course.observer.refused()
        if meter is not None:
            meter.region_ended(since_ns)

    def abort(self, call: RegionCall) -> None:
        """Its forward raised."""
        self._leave()
        call.abort()

    def shortage(
        self, call: RegionCall, error: torch.OutOfMemoryError
    ) -> torch.OutOfMemoryError:
        """Not even one region fits: where, what is alive, and what would help."""
        saved_bytes = self.cache.ledger.live_bytes
        memory = self.cache.device.memory()
        others = ""
        if memory is not None:
            rest = max(0, memory.allocated_bytes - saved_bytes)
            others = f" and {rest / 1e6:.1f} MB of weights, gradients and all else"
        told = (
            f"{error}\nThis was asked for in {call.region.path}. "
            f"{saved_bytes / 1e6:.1f} MB of saved tensors{others} are in device memory."
        )
        if self.choice is not Choice.ALL:
            return torch.OutOfMemoryError(
                f"{told} Set memory_budget, or recompute='regions'."
            )
        return torch.OutOfMemoryError(
            f"{told} All regions run again already, and no plan needs less. Take a "
            "smaller micro-batch or shorter sequences, shard or offload weights and "
            "optimizer states, or train adapters (LoRA)."
        )

    def _save_by_index(self, call: RegionCall) -> None:
        """Put hooks of the call's own on top, if nobody asks for more than an index.
        See [Note: saved by index]."""
        if not self.cache.needs_no_record(call):
            return
        if call.lane.run is not None:
            call.part = call.lane.run.enter_region(call.number)
            if call.part is None:
                return
            call.run = call.lane.run
            call.special.update(call.part.stored, call.part.marking)
        call.by_index = True
        call.seal_at(self.cache.verifier.left)
        pack, unpack = hooks_of(call, self.unpack)
        if not self.cache.is_left_alone():
            pack, unpack = untraced(pack), untraced(unpack)
        setattr(pack, OWNER, self.cache)
        hooks = ForwardHooks(pack, unpack)
        hooks.__enter__()
        self._inner = hooks

    def take_off(self) -> None:
        """Take the hooks of the region's call off, if it has some."""
        hooks, self._inner = self._inner, None
        if hooks is not None:
            hooks.__exit__()

    def _leave(self) -> None:
        self.take_off()
        self.current = None
        self.cache.course.region = OUTSIDE_PLAN

    def _is_chosen(self, lane: Lane, number: int) -> bool:
        course = self.cache.course.of(lane)
        if self.choice is Choice.PLANNED or course.orders is not None:
            return course.runs_all or number in course.chosen
        return True

    def _refusal(self, region: Region, leaves: Iterable[Any]) -> str | None:
        if region.refusal is not None:
            return region.refusal
        if region not in self._looked_at:
            self._looked_at.add(region)
            region.refusal = region.watch.standing_refusal()
            if region.refusal is not None:
                return region.refusal
        if modes_stand():
            return "a function or dispatch mode would not see its re-run"
        if forward_ad._current_level >= 0:
            return "a re-run in backward has no tangents of forward-mode AD"
        if caches_parametrizations():
            return (
                "parametrize.cached() holds what its weights are, and not in backward"
            )
        for leaf in leaves:
            if may_change(leaf):
                if isinstance(leaf, Tensor):
                    return "attributes of its argument are not stored with it"
                return (
                    f"its argument of type {type(leaf).__name__} may change (a KV "
                    "cache? set use_cache=False)"
                )
        return None

    def refuse_compiled(self, region: Region) -> None:
        """Its frames are compiled for a caller, and a re-run would be eager."""
        told = "the whole model is compiled; compile its layers one by one"
        region.refusal = self.reasons[region.path] = told
        if self.choice is not Choice.NONE:
            self.cache.offloader.fall_back(Fallback.NO_REGION)

    def refuse(self, region: Region, reason: str) -> None:
        """A call does not run again; counted, and told once. A plan that has chosen it
        does not fit its lane."""
        region.strike(reason)
        lane, course = self.cache.lanes.current, self.cache.course
        if lane.run is None:  # a table is left by its rows
            course.leave(course.of(lane))
        if region.path not in self.reasons:
            logger.info("ssdtrain: %s does not run again: %s", region.path, reason)
        self.reasons[region.path] = reason
        self.cache.offloader.fall_back(Fallback.NO_REGION)

    def computes(self, region: Region, reason: str) -> None:
        """A stored result of attention was not taken; counted."""
        logger.info(
            "ssdtrain: attention in %s is computed again: %s", region.path, reason
        )
        self.cache.offloader.fall_back(Fallback.ATTENTION_COMPUTED)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to write to weights that a re-run would read."""
        if self.cache.owner.is_elsewhere:
            return
        groups = (group["params"] for group in optimizer.param_groups)
        written = {id(parameter) for group in groups for parameter in group}
        for call in self._alive:
            if call.reads(written):
                call.pin()
            elif call.reads_shards(written):
                call.lost_weights = True  # no forward can gather the old ones again
            else:
                continue
            self._alive.discard(call)
