"""One call of a region's forward: saved tensors that the forward makes again.

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
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from ssdtrain.cache.attention import StoredAttention
from ssdtrain.cache.context import CacheContext
from ssdtrain.cache.digest import Digests
from ssdtrain.cache.identity import check_late_writer, check_version
from ssdtrain.cache.inputs import Inputs
from ssdtrain.cache.record import Handle, Holding, Lane
from ssdtrain.cache.savedindex import (
    SavedIndex,
    SavedTensors,
    SealedIndex,
    alike_to,
    are_alike,
    looks_of,
)
from ssdtrain.cache.savedplaces import PlaceHandle, SavedPlaces
from ssdtrain.cache.table import RegionPart
from ssdtrain.collectives import num_collectives
from ssdtrain.counters import Count, Fallback
from ssdtrain.errors import InPlaceError, RegionError
from ssdtrain.plan.placement import Placement
from ssdtrain.rebuild.modes import (
    is_batched,
    may_meddle,
    unbatched,
    without_modes,
)
from ssdtrain.regions.arguments import Arguments
from ssdtrain.regions.attention import RerunAttention
from ssdtrain.regions.before import Before, Seen
from ssdtrain.regions.conditions import (
    Conditions,
    RandomState,
    without_collector,
)
from ssdtrain.regions.find import Region
from ssdtrain.regions.rerun import Collector, is_parameter
from ssdtrain.regions.updated import UnwrittenDigests
from ssdtrain.regions.weights import RegionWeights

REGION = "region"
MAX_DRAWS = 3
"""Re-runs of a forward that draws, while others draw from the same generator."""


class CallOwner(Protocol):
    """What a call asks of the cache's `Regions`."""

    cache: CacheContext
    unpack: Any

    @property
    def digests(self) -> Digests: ...
    def computes(self, region: Region, reason: str) -> None: ...
    def digest(self, tensor: Tensor) -> Tensor | None: ...
    def refuse(self, region: Region, reason: str) -> None: ...
    def shortage(
        self, call: "RegionCall", error: torch.OutOfMemoryError
    ) -> torch.OutOfMemoryError: ...


class RegionCall:
    """One call of a region's forward."""

    def __init__(
        self,
        regions: CallOwner,
        region: Region,
        number: int,
        forward: Callable[..., Any],
        lane: Lane,
        seen: Seen,
    ) -> None:
        self.region = region
        self.number = number
        """Of the region calls of its lane."""
        self.lane = lane
        self.drops = False
        """Whether the forward has ended, and what it saved can be made again."""
        self.is_pinned = False
        """Whether what was made again stays: its weights are about to change."""
        self.by_index = False
        """Whether its tensors are in `saved`, and not among the places."""
        self.saved = SavedTensors()
        """See [Note: saved by index]."""
        self._unwritten: UnwrittenDigests | None = None
        """Of a call that is not trusted yet; its inputs have digests as well."""
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
        self._attention: StoredAttention | None = None
        """Made when something of it may be stored."""
        self._unpack: Callable[[Any], Tensor] = regions.unpack
        self._task: int | None = None
        self.dropped_bytes = 0
        self.holding = Holding(lane)
        self.inputs = Inputs(
            self._cache.cursor, self._cache.ledger, lane, number, self.holding
        )
        self._places: SavedPlaces | None = None
        """Made for the first tensor that is not saved by index."""
        device = self._cache.device.torch_device
        self._device = device
        self._conditions = Conditions.now(device)
        self._before = Before(region.path, seen)
        self.updated = seen.updated
        self._slow = region.watch.slow() if region.watch.is_thorough else []
        """Random states that nobody draws from, while the forward runs."""
        self._weights = RegionWeights(seen.tensors, seen.placed)
        self._is_first = not region.watch.is_trusted
        self._num_collectives = num_collectives() if self._is_first else 0
        self._random = RandomState.now(device)
        self._random_end: RandomState | None = None
        """Where the generators stood after the forward, if it draws."""

    # -- forward ------------------------------------------------------------------

    def store(self, leaves: list[Any], arguments: Arguments, pack: Any) -> None:
        """Store the arguments."""
        cache = self._cache
        looks = not self.region.watch.is_trusted and not cache.captures.is_forward
        digests = self._regions.digests if looks else None
        if looks:
            read = self._before.seen.unwritten()
            self._unwritten = UnwrittenDigests(read, self._regions.digest)
        keeps = cache.cursor.rule.placement is Placement.KEEP and self.lane.run is None
        keeps = keeps and cache.needs_no_record(self)
        self.inputs.store(leaves, arguments, pack, digests, keeps=keeps)

    def save(self, tensor: Tensor) -> Any:
        """The handle of a tensor that is saved by index, or of one that is none of
        these: a parameter, or what a backward inside the forward saves."""
        if may_meddle():
            with without_modes():
                return self.save(tensor)
        if torch._C._current_graph_task_id() != -1 or is_parameter(tensor):
            return self._cache.pack(tensor)
        if self.updated.ids and self.updated.holds(tensor):
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
                self.attention.stored(index, handle)
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
        """Its tensor went the general way."""
        if self.by_index:  # a re-run saves it as well, and nobody asks for that one
            self._add_saved(tensor)
            return handle
        return self.places.stored(tensor, handle)

    @property
    def places(self) -> SavedPlaces:
        """What is not saved by index."""
        if self._places is None:
            self._places = SavedPlaces(self, self._cache, self.inputs, self.attention)
        return self._places

    @property
    def attention(self) -> StoredAttention:
        """Its attention calls."""
        if self._attention is None:
            known, path = self.region.attention, self.region.path
            self._attention = StoredAttention(self._cache, known, path, self.lane)
        return self._attention

    @property
    def num_places(self) -> int:
        """Tensors saved so far that are no parameters."""
        places = self._places
        return len(self.saved.versions) or (0 if places is None else len(places))

    def end(self) -> None:
        """The forward has ended: let go of what it saved, if it can run again."""
        if self.by_index:
            self._look_at_saved()
        if self._is_first:
            self._note_collectives(self._num_collectives)
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
        self.inputs.forward_ended()
        self._settle()

    def _look_at_saved(self) -> None:
        saved, region = self.saved, self.region
        self._cache.verifier.left = max(0, self.sealed - len(saved.tensors))
        region.layout = layout = saved.look(region.layout, self.inputs)
        if not layout.kinds:  # some are more than bytes
            for tensor in saved.tensors:
                self.inputs.note_lengths(tensor)
        if self.part is not None:
            self.run.leave_region(self.part, layout.looks)
        self._book(layout.num_bytes)

    def abort(self) -> None:
        """The forward raised: what it saved is stored, and goes with its graph."""
        self.saved.keep()
        self._slow.clear()
        self._before.forget()
        self.inputs.forward_ended()

    def _obstacle(self) -> str | None:
        change = self.region.watch.change(self._before, self._slow)
        if change is not None:
            return change
        if not self.inputs.are_unchanged():
            return "it changes one of its inputs in place"
        if self._unwritten is not None:
            if not self.inputs.are_same_bytes(self._regions.digests):
                # For good: a call that is trusted is not looked at so closely.
                self.region.refusal = "it writes to an input, past its version"
                return self.region.refusal
            if not self._unwritten.are_same():
                told = "it writes to a parameter, buffer or attribute, past its version"
                self.region.refusal = told
                return self.region.refusal
        if not self._weights.unwritten():
            return "it writes to one of its parameters"
        if self.inputs.makes_lengths:
            return "it makes a nested tensor, whose lengths would be others"
        return None

    def _settle(self) -> None:
        held_bytes = 0
        if self._places is not None:
            self.dropped_bytes += self._places.settle(self._cache.nothing)
            held_bytes = self._places.held_bytes
        if self.by_index:
            self._settle_saved()
            held_bytes += self.saved.layout.num_bytes
        booked = {Count.SAVED: held_bytes}
        if self.by_index and self.part is None:  # else its table tells them
            booked[Count.PARAMETERS] = self.parameter_bytes
        if not self.drops:
            booked[Count.KEPT] = held_bytes
        self._cache.ledger.counters.add_all(booked)
        if self.drops:
            self.dropped_bytes += held_bytes
            self._book(-held_bytes)

    def _book(self, num_bytes: int) -> None:
        """Bytes of its tensors came alive on the device, or are gone."""
        self.holding.live_bytes += num_bytes
        self._cache.ledger.live(num_bytes)

    def _settle_saved(self) -> None:
        cache, saved = self._cache, self.saved
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

    def use_planned(self, index: int) -> Tensor:
        """A tensor that was saved by index, made again if it must be.

        Raises:
            InPlaceError: it was changed after it was saved.
            RegionError: the re-run did not make it.
        """
        row = None if self.part is None else self.part.using.get(index)
        if row is None:
            return self.use(index)
        at = self.run.mark_use(row)
        tensor = self.use(index)
        self.run.load_at(at)
        return tensor

    def use(self, index: int) -> Tensor:
        """As `use_planned`, where the plan has nothing to do."""
        saved = self.saved
        probes = saved.probes
        if not probes:
            tensor = saved.tensors[index]
            check_version(tensor, saved.versions[index], self._name_of_saved)
            return tensor.detach()
        probe = probes[index]
        if probe is not None and probe._version != saved.versions[index]:
            check_version(probe, saved.versions[index], self._name_of_saved)
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
            collected = self._collected
            if is_batched():
                collected = unbatched()(collected)
            # Its inputs' uses are no marks.
            found = self._cache.cursor.inside_use(collected)
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

    def _check(self) -> None:
        if self.lost_weights or not self._weights.stand():
            raise InPlaceError(
                f"a parameter or buffer of {self.region.path} was changed between "
                "its forward and its backward, and its forward would run again "
                "with the new values. Change it after backward, or set "
                "recompute='off'."
            )

    def _collect(self) -> list[Tensor] | None:
        """What the forward saves; None if somebody else drew meanwhile."""
        found: list[Tensor] = []
        args, kwargs = self.inputs.values(self._unpack)
        num_places = self.num_places
        watched: RerunAttention | None = None
        if self._attention is not None:
            watched = self._attention.watched(num_places)
            if watched.hears is None:
                watched = None
        take: Any = None if watched is None else watched.hears
        if not self.by_index:
            take = partial(self.places.take, found, take)
        collector = Collector(
            take, num_places, may_stop=self._may_stop, aside=self._before.copies
        )
        if not self._has_run(collector, args, kwargs, watched):
            return None
        num_taken = len(collector.found)
        if num_taken != num_places:
            raise RegionError(
                f"{self.region.path} saved {num_places} tensors in its forward "
                f"and {num_taken} when it ran again: it does not do the same "
                "twice. Set regions to leave it out, or recompute='off'."
            )
        if self.by_index:
            found = collector.found
            self._compare(found)
        if watched is not None and self._is_lost(watched):
            return None
        return found

    def _has_run(
        self,
        collector: Collector,
        args: Any,
        kwargs: Any,
        watched: RerunAttention | None,
    ) -> bool:
        """Run the forward again; whether it drew what it drew before."""
        cursor = self._cache.cursor
        observer = cursor.observer_of(self.lane)
        observer.runs_again()
        # Also where nothing is known to be drawn: `torch.random.fork_rng()` hides it.
        before, expected = RandomState.now(self._device), self._random_end
        num_before = num_collectives()
        self._random.restore(self._device)
        try:
            # An optimizer's step may run under a mode.
            around = [without_modes(), self._before.restored(self.region.watch.hooks)]
            around.append(without_collector())
            if watched is not None:
                around.append(watched.standing())
            # Most are none, and to enter one is a call of Python.
            around = [each for each in around if type(each) is not nullcontext]
            self._run_within(around, collector, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise self._regions.shortage(self, error) from error
        finally:
            drawn = None if expected is None else RandomState.now(self._device)
            before.restore(self._device)
        self._note_collectives(num_before)
        if observer.hears_reruns:
            observer.ran_again(cursor.of(self.lane).number, self.number)
        return expected is None or drawn is None or expected.is_same(drawn)

    def _note_collectives(self, before: int | None) -> None:
        # Where nobody counts them there may be some.
        communicates = before is None or num_collectives() != before
        self.region.ran(communicates=communicates)

    def _is_lost(self, watched: RerunAttention) -> bool:
        """Learn of its attention; whether the re-run must be done again without it."""
        attention, cursor = self.attention, self._cache.cursor
        for reason in watched.reasons:
            self._regions.computes(self.region, reason)
        if cursor.observer_of(self.lane).listens:
            lane = cursor.of(self.lane).number
            attention.learn(watched, lane, self.number, self.num_places)
        return attention.is_lost(watched)

    def _run_within(
        self,
        around: list[AbstractContextManager[None]],
        collector: Collector,
        args: Any,
        kwargs: Any,
    ) -> None:
        """Run the forward again within these contexts, and under its conditions."""
        if around:
            with around[0]:
                self._run_within(around[1:], collector, args, kwargs)
            return
        clock = self._cache.ledger.clock
        with self._conditions.restored():
            start = clock.begin()
            try:
                collector.run(self._forward, args, kwargs)
            finally:
                if start is not None:
                    clock.end(start, REGION, (self.lane.kind, REGION, self.number), 0)

    def _compare(self, found: list[Tensor]) -> None:
        """Compare what the re-run saved with what the forward did, by its looks."""
        looks, again = self.saved.layout.looks, self.region.again
        if (
            again is not None
            and again[0] is looks
            and are_alike(again[1], looks, found)
        ):
            return
        made = looks_of(found)
        if looks != made:
            pairs = enumerate(zip(looks, made, strict=True))
            number = next(n for n, (look, again) in pairs if look != again)
            raise self.other(number, looks[number], made[number])
        if self.saved.layout.alike is not None:
            self.region.made_again(looks, alike_to(found))

    def other(self, number: int, look: Any, made: Any) -> RegionError:
        """The error of a re-run that saved another tensor than the forward."""
        return RegionError(
            f"{self.region.path}: the saved tensor {number} was {look} in its forward "
            f"and is {made} now that it ran again. Set regions to leave it out, or "
            "recompute='off'."
        )

    def _may_stop(self) -> bool:
        """Whether nothing is left to be put back by what comes after the last tensor of
        a re-run; and a forward that draws must run to its end."""
        return self._random_end is None and self._before.is_untouched()

    def _hand_out(self, found: list[Tensor]) -> None:
        saved = self.saved
        made_bytes = saved.hand_out(found) if self.by_index else 0
        if self._places is not None:
            made_bytes += self._places.hand_out(found)
        if made_bytes:
            self._book(made_bytes)

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
            if self._places is not None:
                self._places.forget()
            self.handed_over(self.saved.forget())
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
        if not self.drops or self.is_pinned or not self._weights.stand():
            return
        with self._cache.lock:
            self.is_pinned = True
            try:
                self.run_again()
            except BaseException:
                self.is_pinned = False
                raise
            self.drops = False
            if self._places is not None:
                for record in self._places.records.values():
                    record.pin()
