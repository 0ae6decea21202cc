"""The tensor cache: pack and unpack, and what happens in between.

This is the general path; under a plan most tensors are served by a table (run.py).
Out: pack > identity > placement > record joins the lane > the offloader copies.
Back: unpack > fetch > resident: return; leaving: forward; away: load > view rebuilt.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ssdtrain.cache import forked
from ssdtrain.cache.bypass import Bypass, Unhooked
from ssdtrain.cache.captured import Captures
from ssdtrain.cache.collector import GarbageCollector
from ssdtrain.cache.context import Meter
from ssdtrain.cache.cursor import OUTSIDE_PLAN, Cursor, Entry
from ssdtrain.cache.departures import Departures
from ssdtrain.cache.executor import Executor
from ssdtrain.cache.identity import (
    Key,
    Probe,
    Stamp,
    View,
    identify,
    is_dual,
    is_plain,
    parameter_of,
    raw_bytes,
    stamp_of,
)
from ssdtrain.cache.lanes import Lanes
from ssdtrain.cache.ledger import Ledger
from ssdtrain.cache.living import Living
from ssdtrain.cache.quiet import ForwardHooks
from ssdtrain.cache.recipes import Recipes
from ssdtrain.cache.record import (
    Handle,
    Kept,
    Lane,
    ParameterView,
    Rebuilt,
    RebuiltView,
    Record,
    RecordView,
    Retired,
    handle_of,
)
from ssdtrain.cache.regioncall import RegionCall
from ssdtrain.cache.regions import Regions
from ssdtrain.cache.savedplaces import TINY_BYTES
from ssdtrain.cache.scope import owned
from ssdtrain.cache.sizes import MOST
from ssdtrain.cache.state import Known, RecordState
from ssdtrain.cache.tables import Tables
from ssdtrain.cache.traced import leave_alone, untraced
from ssdtrain.cache.verify import Verifier
from ssdtrain.cache.window import CacheLimits, ReleaseWindow
from ssdtrain.cache.wrapped import (
    FlattenedHandle,
    Unwrapped,
    WrappedHandle,
    as_made,
    flattened,
    unwrapped,
)
from ssdtrain.counters import Count, Counters, Fallback
from ssdtrain.forks import Owner
from ssdtrain.plan.rule import Rule
from ssdtrain.rebuild.modes import may_meddle, unseen, without_modes
from ssdtrain.transfer.copies import PinnedCopy, copies_of, discard
from ssdtrain.transfer.direct import DirectOffloader
from ssdtrain.transfer.offloader import Offloader


class TensorCache:
    """Holds what autograd saved. One per session; any thread may call it."""

    def __init__(
        self,
        offloader: Offloader,
        rule: Rule,
        limits: CacheLimits,
        counters: Counters,
        *,
        loads_in_pieces: bool = False,
    ) -> None:
        """loads_in_pieces: as `copies_of` says."""
        self.offloader = offloader
        self.limits = limits
        self.device = offloader.device
        self._torch_device = self.device.torch_device
        self.ledger = Ledger(self.device, counters)
        self.lanes = Lanes(lambda: counters.of(Count.SAVED))
        self.recipes = Recipes()
        self.cursor = Cursor(rule, lambda reason: self.offloader.fall_back(reason))
        self.verifier = Verifier()
        self._counters = counters
        self._records = Known()
        self.retired = Retired()
        self.window = ReleaseWindow(offloader)
        self._resident = Living[Stamp]()
        self.nothing = torch.empty(
            0, dtype=torch.float32, device=self.device.torch_device
        )
        """For probes of versions."""
        self.copies = copies_of(
            self.device, offloader.fall_back, loads_in_pieces=loads_in_pieces
        )
        self.tables = Tables()
        self.bypass: Bypass | Unhooked | None = None
        """While a step runs without hooks."""
        self.timer: Bypass | None = None
        """While the forwards of a step with hooks are timed."""
        self.meter: Meter | None = None
        """While a step's hooks are timed on the host."""
        self.regions = Regions(self)
        self.captures = Captures(self)
        self.moves = Executor(
            offloader,
            self.window,
            self.cursor,
            limits,
            counters,
            self.captures,
            self.copies,
            self._time_loads,
        )
        self.departures = Departures(self.moves, self.cursor, counters)
        self.collector = GarbageCollector()
        self.is_compiled = False
        """Whether the model's forward runs under a compiler."""
        self._left_alone = False
        self.lock = threading.RLock()
        """Held by whatever changes a record, a lane or the cursor."""
        self.owner = Owner()
        """Asked before any lock: see [Note: after a fork]."""

    # -- the door -----------------------------------------------------------------

    def hooks(self, *, gives_caches: bool = False) -> AbstractContextManager[None]:
        """Saved-tensor hooks for one forward.

        Args:
            gives_caches: whether its caller wants the KV cache.
        """
        hold = self.collector.hold()
        pack, unpack = self.verifier.around(self.pack, self.unpack)
        if not self.verifier.checks_all:
            lane = self.lanes.current
            sized = self.cursor.plan_of(lane)
            pack, unpack = self.tables.hooks_of(self, lane, sized, (pack, unpack))
        else:  # its digests, too, are ours
            pack, unpack = unseen(pack), unseen(unpack)
        if self.meter is not None:
            pack, unpack = self.meter.around(pack, unpack)
        if self.lanes.current.run is None or not self.is_left_alone():
            pack, unpack = untraced(pack), untraced(unpack)
        pack = owned(pack, self, hold)
        hooks = ForwardHooks(pack, unpack)
        self.regions.hooks_are(hooks, gives_caches=gives_caches)
        return hooks

    def forward_ends(self) -> None:
        """End the forward that ran. Where an interrupt has left our hooks on torch's
        stack, they are taken off as well."""
        pack = self.regions.pack
        self.regions.take_off()
        if pack is not None:
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if top is not None and top[0] is pack:
                torch._C._autograd._pop_saved_tensors_default_hooks()
            self.regions.forward_ends()
        if not self.owner.is_elsewhere:  # forked inside this forward
            self._lane_ends()
            self.lanes.finish()

    def _lane_ends(self) -> None:
        lane = self.lanes.current
        if lane.waiting:
            with self.lock:
                self.departures.lane_ends(lane)

    def timed(self) -> AbstractContextManager[None]:
        """Around one forward with hooks."""
        return nullcontext() if self.timer is None else self.timer.forward()

    def is_left_alone(self) -> bool:
        """Whether Dynamo does not trace what a table's hooks run."""
        if not self._left_alone:
            rooms = ("cache", "observe", "transfer", "counters", "regions")
            self._left_alone = leave_alone(*(f"ssdtrain.{room}" for room in rooms))
        return self._left_alone or "torch._dynamo" not in sys.modules

    def keep_storage_of(self, tensor: Tensor) -> None:
        """Never move this storage: a buffer of the model, or one that its framework
        empties and fills again by itself."""
        self._resident.add(stamp_of(tensor))

    def pack(self, tensor: Tensor, *, stays: bool = False) -> Handle:
        """Take over a tensor that autograd saves. Called by autograd.

        stays: it stays where it is; see scope.py.
        """
        if may_meddle():
            with without_modes():
                return self.pack(tensor, stays=stays)
        if self.owner.is_elsewhere:
            return forked.handle_in_child(tensor)
        with self.lock:
            self.collect()
            parameter = parameter_of(tensor)
            if parameter is not None:
                return self._pack_parameter(tensor, parameter)
            if self.regions.updates(tensor):
                return self._keep(tensor)
            call = self.regions.current
            if call is not None and not self._has_place:
                call = None
            if stays:  # a re-run counts it all the same
                handle = self._keep(tensor)
                return handle if call is None else call.stored(tensor, handle)
            if call is not None and not call.by_index:
                return self._pack_in_region(tensor, call)
            if not is_plain(tensor) or tensor.device != self.device.torch_device:
                return self._pack_wrapper(tensor)
            return self._pack_plain(tensor, tensor)

    def pack_staying(self, tensor: Tensor) -> Handle:
        """Take over a tensor that stays where it is. See scope.py."""
        return self.pack(tensor, stays=True)

    def unpack(self, handle: Handle) -> Tensor:
        """Bring a saved tensor back. Called by autograd.

        Raises:
            InPlaceError: it was changed after it was saved.
            ActivationLostError: its bytes could not be read back.
            SessionClosedError: the session was closed before this backward.
            ForkedError: its bytes were moved by a process that this is a fork of.
        """
        if may_meddle():
            with without_modes():
                return self.unpack(handle)
        if self.owner.is_elsewhere:
            return forked.unpack_in_child(handle)
        found = _at_hand(handle)
        if isinstance(found, Tensor):
            return found
        if isinstance(found, RebuiltView):
            with self.lock:
                tensor = self.use_rebuilt(found)
        else:
            tensor = self._unpack_record(found)
        return self.cursor.given(handle, tensor)

    def use_rebuilt(self, source: RebuiltView) -> Tensor:
        """A mark: backward asks for what a recipe makes. The lock is held."""
        rebuilt, cursor = source.rebuilt, self.cursor
        if self.ledger.handed_bytes or self.retired.queue or self.window.lingering:
            self.collect()
        lane = rebuilt.lane
        if not lane.in_backward:
            self.enter_backward(lane)
        at = cursor.begin_use(lane, rebuilt.item)
        try:
            if cursor.mark >= self.window.next_due:
                self.moves.release_due()
            tensor = self.recipes.use(source)
            if at is not None:
                own = lane.cursor or cursor.of(lane)
                reads_ahead = self.offloader.storage is not None
                if own.orders is not None and (at in own.loads or reads_ahead):
                    self.moves.load_at(own, at)
            return tensor
        finally:
            cursor.end_use(at)

    def read(self, handle: Handle) -> Tensor:
        """As `unpack`, for a recipe that runs: no mark. The lock is held."""
        found = _at_hand(handle)
        if isinstance(found, Tensor):
            return found
        if isinstance(found, RebuiltView):
            self.enter_backward(found.rebuilt.lane)
            return self.recipes.use(found)
        found.check()
        record = found.record
        self.enter_backward(record.lane)
        tensor = found.view.rebuild(self.moves.fetch(record))
        self.moves.was_used(record, None)
        return tensor

    # -- pack ---------------------------------------------------------------------

    def _keep(self, tensor: Tensor, reason: Fallback | None = None) -> Handle:
        if reason is not None and tensor.numel() > 0:
            self.offloader.fall_back(reason)
        return Handle(Kept(tensor.detach(), tensor._version))

    def _pack_parameter(self, tensor: Tensor, parameter: nn.Parameter) -> Handle:
        self._counters.add(Count.PARAMETERS, tensor.nbytes)
        view = ParameterView.of(tensor, parameter)
        if view is not None:
            return Handle(view)
        found = unwrapped(tensor)
        if found is None:
            return self._keep(tensor, Fallback.KEPT_UNSUPPORTED)
        inner = self._keep(found.local)  # an alias of what the parameter holds
        return WrappedHandle(tensor, found.shell, inner, self.unpack)

    @property
    def _has_place(self) -> bool:
        """Whether autograd packs it in forward: no recipe stores it for itself, and no
        backward inside the forward."""
        of_recipe = self.cursor.serving != OUTSIDE_PLAN
        return not of_recipe and torch._C._current_graph_task_id() == -1

    def _pack_in_region(self, tensor: Tensor, call: RegionCall) -> Handle:
        """Every one has a place, whatever becomes of it. See [Note: regions]."""
        if is_plain(tensor):
            return self._pack_bytes_in_region(Unwrapped(tensor, None), tensor, call)
        found = unwrapped(tensor)
        if found is not None:
            return self._pack_bytes_in_region(found, tensor, call)
        if is_traceable_wrapper_subclass(tensor):
            return call.places.hold(tensor)
        # Its version has no counter that holds none of its bytes.
        return call.stored(tensor, self._keep(tensor, Fallback.KEPT_UNSUPPORTED))

    def _pack_bytes_in_region(
        self, found: Unwrapped, tensor: Tensor, call: RegionCall
    ) -> Handle:
        """As records and items, the same ones as outside of a region: a plan may choose
        that the region does not run again.

        Args:
            found: the tensor, or the part that it wraps.
        """
        part = found.local

        def around(handle: Handle) -> Handle:
            if part is tensor:
                return handle
            return WrappedHandle(tensor, found.shell, handle, self.unpack)

        def keep(_: Tensor) -> Handle:
            return around(self._keep(part))

        if part.device != self.device.torch_device:
            return call.places.hold(tensor)
        least_bytes = self.limits.least_bytes
        key, view = identify(part)
        key = key._replace(version=tensor._version)  # see [Note: wrappers]
        num_bytes = key.end_byte - key.start_byte
        record = call.places.records.get(key) or self._record_of(key)
        node = tensor.grad_fn
        is_item = record is not None or self._is_item(part, key, node)
        if key.stamp in self._resident or (
            not is_item and num_bytes < min(TINY_BYTES, least_bytes)
        ):
            return call.stored(tensor, keep(tensor))
        if not is_item:
            return call.places.hold_small(tensor, keep)
        handle = self._pack_bytes(part, key, view, record, tensor)
        return call.stored(tensor, around(handle))

    def _pack_wrapper(self, tensor: Tensor) -> Handle:
        """See [Note: wrappers]."""
        found = unwrapped(tensor)
        if found is None:
            return self._pack_flattened(tensor)
        if found.local.device != self.device.torch_device:
            return self._keep(tensor, Fallback.KEPT_UNSUPPORTED)
        inner = self._pack_plain(found.local, tensor)
        return WrappedHandle(tensor, found.shell, inner, self.unpack)

    def _pack_flattened(self, tensor: Tensor) -> Handle:
        """See [Note: flattened]."""
        apart = flattened(tensor)
        if apart is None or tensor.device != self.device.torch_device:
            return self._keep(tensor, Fallback.KEPT_UNSUPPORTED)
        inners = [
            self._pack_plain(each, tensor)
            if is_plain(each) and each.device == self.device.torch_device
            else self._pack_wrapper(each)
            for each in apart[0]
        ]
        handle = FlattenedHandle(tensor, apart[1], inners, self.unpack)
        return self._keep(tensor) if handle.is_kept else handle

    def _pack_plain(self, tensor: Tensor, saved: Tensor) -> Handle:
        """saved: by autograd: the tensor, or what it is the part of."""
        least_bytes = self.limits.least_bytes
        planned = self.cursor.plan_of(self.lanes.current).plan is not None
        if planned or self.cursor.observer.listens:
            # What it is at another size counts: see [Note: sizes].
            least_bytes //= MOST * MOST
        if tensor.untyped_storage().nbytes() < max(1, least_bytes):
            return self._keep(tensor)
        if torch._C._current_graph_task_id() != -1:
            return self._keep(tensor, Fallback.KEPT_IN_BACKWARD)
        return self._pack_record(tensor, saved)

    def _pack_record(self, tensor: Tensor, saved: Tensor) -> Handle:
        key, view = identify(tensor)
        version, node = saved._version, saved.grad_fn
        if version != key.version:
            key = key._replace(version=version)
        record = self._record_of(key)
        if key.stamp in self._resident:
            return self._keep(tensor)
        if record is None and not self._is_item(tensor, key, node):
            return self._keep(tensor)
        return self._pack_bytes(tensor, key, view, record, saved)

    def _record_of(self, key: Key) -> Record | None:
        """The record of these bytes, unless backward has brought it back already."""
        record: Record | None = self._records.get(key)
        if record is None or record.state in (RecordState.RETURNING, RecordState.BACK):
            return None
        return record

    def _is_item(self, tensor: Tensor, key: Key, node: Any) -> bool:
        """Whether a tensor without a record is large enough for a plan or its rule."""
        num_bytes, least_bytes = key.end_byte - key.start_byte, self.limits.least_bytes
        if self.recipes.knows(key):
            return True
        if not num_bytes:
            return False
        name = self.cursor.name_of(node, tensor.shape)
        return self.cursor.counts(self.lanes.current, name, num_bytes, least_bytes)

    def _pack_bytes(
        self, tensor: Tensor, key: Key, view: View, record: Record | None, saved: Tensor
    ) -> Handle:
        """One more handle of the record or recipe of these bytes, or of a new one.

        Args:
            saved: by autograd: the tensor, or what it is the part of.
        """
        if record is not None:
            self.saved_again(record, tensor)
            handle = handle_of(record, view, self.probe_of(tensor))
            self._tell_of_another(record)
        else:
            again = self.recipes.again(as_made(tensor, saved), key, view)
            if again is not None and isinstance(again.source, RebuiltView):
                self._tell_of_another(again.source.rebuilt)
            handle = again or self._pack_new(tensor, key, view, saved)
        if self.cursor.storing < 0:
            # Else a region asks, which the plan may choose to be none: autograd does
            # not save it, and no recipe may count on it.
            self.recipes.note(tensor, handle)
        return handle

    def probe_of(self, tensor: Tensor) -> Probe:
        """A probe of a plain tensor on the device."""
        return Probe.of(tensor, self.nothing)

    def _pack_new(self, tensor: Tensor, key: Key, view: View, saved: Tensor) -> Handle:
        """The first handle of a record or of a recipe."""
        name = self.cursor.name_of(saved.grad_fn, tensor.shape)
        entry = self.cursor.enter(self.lanes.current, tensor, key, name)
        self.moves.release_due()
        handle: Handle | None = None
        if self._may_be_rebuilt(entry):
            before, self.cursor.serving = self.cursor.serving, entry.number
            try:
                handle = self.recipes.offer(as_made(tensor, saved), key, view)
            finally:
                self.cursor.serving = before
        if handle is None:
            record = self._open_record(tensor, key, entry)
            handle = handle_of(record, view, self.probe_of(tensor))
        elif isinstance(handle.source, RebuiltView):
            handle.source.rebuilt.item = entry.number
            self.cursor.rebuilds(handle.source.rebuilt)
        self.cursor.observer.seal()
        return handle

    def saved_again(self, record: Record, tensor: Tensor) -> None:
        """Another tensor on the bytes of a record: [Note: the last save]."""
        if record.region is None:
            data = record.data
            if data is None:
                data = raw_bytes(tensor, record.key)
            self.departures.saved_again(record, data, self.lanes.current)

    def needs_no_record(self, call: RegionCall) -> bool:
        """Whether nobody asks what a region saves: no plan counts it, nobody observes
        or verifies it, and the region is known to run again."""
        cursor = self.cursor
        return (
            call.region.watch.is_trusted
            and not cursor.observer.listens
            and not self.verifier.checks_all
            and (call.lane.run is not None or cursor.of(call.lane).orders is None)
        )

    def looks_for_no_recipe(self) -> bool:
        """Whether what runs now is in a region that runs again, in a backward, or in a
        forward without hooks, and nobody asks how it is made."""
        if torch._C._current_graph_task_id() != -1:
            return True
        if self.bypass is not None and self.regions.pack is None:
            return True
        return self.regions.current is not None and not self.cursor.observer.listens

    def _may_be_rebuilt(self, entry: Entry) -> bool:
        """Inside a region recipes are looked for only to learn of them. What one recipe
        stores for itself is not asked about."""
        cursor, in_region = self.cursor, self.regions.current is not None
        if entry.order is not None:
            return entry.may_be_rebuilt
        may = cursor.rule.rebuilds and not in_region
        return may or cursor.observer.listens

    def _tell_of_another(self, owner: Record | Rebuilt) -> None:
        """Tell the observer that autograd saves an item once more: it would do so
        without regions, too."""
        cursor = self.cursor
        if cursor.observer.listens and cursor.storing < 0:
            lane = owner.lane
            cursor.observer_of(lane).saved_again(cursor.of(lane).number, owner.item)

    def _open_record(self, tensor: Tensor, key: Key, entry: Entry) -> Record:
        bytes_before = self.lanes.current.total_bytes
        record = self._new_record(key, entry.name, entry.number)
        call = self.regions.current
        if call is not None and not call.by_index and call.places.makes(entry):
            call.places.add(record, tensor.dtype)
            record.open(raw_bytes(tensor, key))
            self._counters.add_all({Count.RECORDS: 1, Count.SAVED: record.num_bytes})
            return record
        self._records.add(key, record)
        record.open(raw_bytes(tensor, key))
        leaves = self.departures.opened(record, entry, bytes_before)
        if entry.held and not leaves:
            record.hold()
        self.book(record, leaves=leaves)
        return record

    def _new_record(self, key: Key, name: str, item: int) -> Record:
        lane = self.lanes.current
        record = Record(key, lane, name, self.retired, self.ledger)
        record.item = item
        self.cursor.of(lane).records[item] = weakref.ref(record)
        return record

    def book(self, record: Record, *, leaves: bool) -> None:
        """Count a new record, and what becomes of it."""
        num_bytes = record.num_bytes
        fate = Count.OFFLOADED if leaves else Count.KEPT
        self._counters.add_all(
            {Count.RECORDS: 1, Count.SAVED: num_bytes, fate: num_bytes}
        )

    def is_movable(self, tensor: Tensor) -> bool:
        """Whether a planned move may take this tensor: plain bytes on the device, no
        parameter or view of one, and not saved inside backward."""
        base = tensor._base  # torch asks in Python whether something is a parameter
        return (
            type(tensor) is Tensor
            and tensor.device == self._torch_device
            and (
                base is None
                or type(base) is Tensor
                or not isinstance(base, nn.Parameter)
            )
            # `is_plain`, without a call of Python.
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_quantized)
            and not tensor._is_zerotensor()
            and (forward_ad._current_level < 0 or not is_dual(tensor))
            and torch._C._current_graph_task_id() == -1
        )

    def open_planned(self, tensor: Tensor, key: Key, name: str, item: int) -> Record:
        """Open the record of a table's item; to be booked with what becomes of it."""
        record = self._new_record(key, name, item)
        self._records.add(key, record)
        record.open(raw_bytes(tensor, key))
        return record

    @property
    def moves_to_host(self) -> bool:
        """Whether planned moves end in pinned host memory, by copies of the device."""
        return not isinstance(self.offloader, DirectOffloader)

    def _time_loads(self, start: Callable[[Any], None], batch: Any) -> None:
        """Start loads that the plan wants by now."""
        if self.meter is None:
            start(batch)
        else:
            self.meter.load(start, batch)

    def place_again(self, record: Record) -> None:
        """A record that its region cannot make again goes where the rule says."""
        before = record.lane.total_bytes - record.num_bytes
        leaves = self.moves.send_by_rule(record, before, held=False)
        fate = Count.OFFLOADED if leaves else Count.KEPT
        self._counters.add(fate, record.num_bytes)

    # -- unpack -------------------------------------------------------------------

    def _unpack_record(self, source: RecordView) -> Tensor:
        with self.lock:
            record, lane = source.record, source.record.lane
            source.check()
            self.collect()
            self.enter_backward(lane)
            at = self.cursor.begin_use(lane, record.item)
            try:
                self.moves.release_due()
                tensor = source.view.rebuild(self.moves.fetch(record))
                self.moves.was_used(record, at)
                return tensor
            finally:
                self.cursor.end_use(at)

    def enter_backward(self, lane: Lane) -> None:
        if not lane.in_backward:
            if lane.is_captured:
                self.captures.backward_starts()
            else:
                self.ledger.backward_starts()
            self.lanes.start_backward(lane)

    def prefetch(self, lane: Lane) -> None:
        """Start loading what the lane's backward will ask for first."""
        if self.owner.is_elsewhere:
            return
        with without_modes(), self.lock:
            self.collect()
            self.enter_backward(lane)
            self.moves.load_first(lane)

    # -- life ---------------------------------------------------------------------

    def collect(self) -> None:
        """Give back what dead records held."""
        if self.ledger.handed_bytes:
            self.ledger.settle()
        if self.retired.queue:
            self._bury()
        if self.window.lingering:
            self.window.let_go()

    def _bury(self) -> None:
        if self.captures.must_wait:
            return
        # An interrupt may end this anywhere: then it is done again from the start.
        queue = self.retired.queue
        while queue:
            retired = queue[0].holding
            if retired.known is not None:
                known, key = retired.known
                known.forget(key)
            if retired.load is not None:
                # Loaded and never used: the copy must end before its memory is reused.
                retired.load.settle(self.device)
            transfer = retired.transfer
            if transfer is not None:
                self.window.linger(transfer)
                if type(transfer) is PinnedCopy:
                    retired.transfer = None  # no place may be free twice
                discard(self.offloader, transfer)
                retired.transfer = None
            live_bytes, retired.live_bytes = retired.live_bytes, 0
            held_bytes, retired.held_bytes = retired.held_bytes, 0
            if live_bytes or held_bytes:
                self.ledger.died(live_bytes, held_bytes)
            if self.lanes.left(retired.lane):
                self._lane_is_over(retired.lane)
            self.retired.forget_oldest()
        if not self.retired.num_alive:
            self.ledger.nothing_lives()
            self.lanes.nothing_lives()

    def _lane_is_over(self, lane: Lane) -> None:
        self.tables.left(lane)
        if self.lanes.is_idle:
            self.ledger.backward_ends()
            self.window.let_go_in_order()

    def give_up_spent(self) -> None:
        """The weights have changed: see [Note: spent lanes] in engines/hints.py."""
        if self.owner.is_elsewhere:
            return
        with self.lock:
            self.collect()
            for lane in self.lanes.give_up_spent():
                self._lane_is_over(lane)

    def collect_now(self) -> None:
        """`collect`, for callers outside the hooks."""
        if self.owner.is_elsewhere:
            return
        with self.lock:
            self.collect()

    @property
    def is_idle(self) -> bool:
        """Whether no saved tensor is alive; False in a forked child."""
        if self.owner.is_elsewhere:
            return False
        with self.lock:
            self.collect()
            return self.lanes.is_idle

    def close(self) -> None:
        """Bring nothing more away or back. Idempotent."""
        if self.owner.is_elsewhere:
            return  # all that could be closed is its parent's
        with self.lock:
            if self.moves.is_closed:
                return
            self.collect()
            self.moves.close()
            self.tables.close(self.offloader.pool)
        self.collector.let_go()
        self.offloader.close()
        self.recipes.close()


def _at_hand(handle: Any) -> Tensor | RebuiltView | RecordView:
    """The tensor of a handle that stays or is a table's; else where to find it."""
    if type(handle) is not Handle:  # a table's, each of which has `get`
        tensor: Tensor = handle.get()
        return tensor
    source = handle.source
    return source.rebuild() if isinstance(source, Kept | ParameterView) else source
