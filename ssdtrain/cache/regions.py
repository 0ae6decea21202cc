"""The region calls of one cache: which modules run again, and when their calls begin
and end.

See [Note: regions] in regioncall.py.
"""

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ssdtrain.cache.context import CacheContext
from ssdtrain.cache.cursor import OUTSIDE_PLAN
from ssdtrain.cache.digest import Digests, word_bytes
from ssdtrain.cache.identity import is_plain
from ssdtrain.cache.living import Living
from ssdtrain.cache.quiet import Around, ForwardHooks
from ssdtrain.cache.record import Lane
from ssdtrain.cache.regioncall import REGION, RegionCall
from ssdtrain.cache.savedindex import hooks_of
from ssdtrain.cache.scope import OWNER
from ssdtrain.cache.traced import untraced
from ssdtrain.counters import Fallback
from ssdtrain.errors import RegionError
from ssdtrain.rebuild.modes import ASKED
from ssdtrain.regions.arguments import Arguments, flatten, may_change
from ssdtrain.regions.before import Seen
from ssdtrain.regions.conditions import modes_stand
from ssdtrain.regions.deep import PLAIN
from ssdtrain.regions.find import Region
from ssdtrain.regions.kvcaches import EmptyCaches, Slots, with_given, with_own
from ssdtrain.regions.updated import storages, storages_of
from ssdtrain.regions.weights import has_place

logger = logging.getLogger(__name__)


class Choice(Enum):
    """Which regions run again."""

    NONE = auto()
    ALL = auto()
    PLANNED = auto()
    """Those of the lane's plan."""


class Regions:
    """The region calls of one cache."""

    def __init__(self, cache: CacheContext) -> None:
        self.cache = cache
        self.choice = Choice.NONE
        self.staying: frozenset[str] = frozenset()
        """See `run_again`."""
        self.current: RegionCall | None = None
        self.pack: Any = None
        """The hooks of the forward that runs."""
        self.unpack: Any = None
        self._hooks: ForwardHooks | None = None
        self._inner: ForwardHooks | None = None
        """Those of the region's call that runs, if it has its own."""
        self.reasons: dict[str, str] = {}
        """Why modules are no regions, by path."""
        self._gives_caches = False
        """Whether the caller of the forward that runs wants the model's KV cache."""
        self._inner_asks: bool | None = None
        """Whether the caller of the model inside of it that runs does; None: none."""
        self._empty_caches = EmptyCaches()
        self._withheld: dict[Region, weakref.WeakSet[Any]] = {}
        """The KV caches that layers were called with, and did not fill."""
        self._slots: dict[Region, Slots] = {}
        """What they have used of those in the forward that runs."""
        self._alive = Living[RegionCall]()
        self._digests: Digests | None = None
        self._looked_at: set[Region] = set()
        self._begun: set[Region] = set()
        """Of these: that had a call which runs again."""
        self.normalizations: list[nn.Module] = []
        """Of the model: they update statistics, and count no version."""

    def run_again(self, choice: Choice, staying: frozenset[str] = frozenset()) -> None:
        """Which regions do, from now on.

        Args:
            staying: paths of those that do not where all others do.
        """
        self.choice, self.staying = choice, staying

    @property
    def met(self) -> dict[str, type]:
        """Classes of those that had a call which runs again, and may still, by path."""
        able = (region for region in self._begun if region.refusal is None)
        return {region.path: type(region.module) for region in able}

    @property
    def digests(self) -> Digests:
        """Made when the first region is looked at."""
        if self._digests is None:
            self._digests = Digests(self.cache.device.torch_device)
        return self._digests

    def digest(self, tensor: Tensor) -> Tensor | None:
        """Of a tensor's bytes, on its device; None: it is none of bytes there."""
        if not is_plain(tensor) or tensor.device != self.cache.device.torch_device:
            return None
        return self.digests.of(tensor.detach(), word_bytes(tensor))

    def updates(self, tensor: Tensor) -> bool:
        """Whether it is a buffer that the region which runs updates, or a view of one:
        a re-run counts it no more than a parameter."""
        call = self.current
        return call is not None and call.updated.holds(tensor)

    def hooks_are(self, hooks: ForwardHooks, *, gives_caches: bool) -> None:
        """A forward of the model is about to run under these hooks."""
        self._gives_caches, self._inner_asks = gives_caches, None
        self._slots.clear()
        self.pack, self.unpack = hooks.pack_hook, hooks.unpack_hook
        self._hooks = hooks

    @contextmanager
    def asked(self, for_cache: bool) -> Iterator[None]:
        """Around a model inside of the one whose forward runs. What that passes to a
        part of its own is no caller's wish."""
        before = self._inner_asks
        self._inner_asks = for_cache if before is None else before
        try:
            yield
        finally:
            self._inner_asks = before

    def without_caches(
        self, region: Region, forward: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """A region's forward and the arguments of a call of it, in every forward under
        hooks: see [Note: KV caches] in kvcaches.py.

        Raises:
            RegionError: an empty cache comes back.
        """
        caches = self._empty_caches.of(region.module, args, kwargs)
        withheld = self._withheld.get(region, ())
        for cache in caches.values():
            if region not in self._slots and cache.original() in withheld:
                raise RegionError(
                    f"{region.path} is given a KV cache that stayed empty when it ran "
                    "before. Call the model with use_cache=True where you use its "
                    "cache, and with use_cache=False elsewhere."
                )
        asked = self._gives_caches or self._inner_asks
        if not caches or asked or not torch.is_grad_enabled():
            return forward, args, kwargs
        if not self._withheld:
            logger.warning(
                "ssdtrain: layers fill no KV cache in training, as under their own "
                "checkpointing; set use_cache=False in the model's configuration"
            )
        withheld = self._withheld.setdefault(region, weakref.WeakSet())
        for cache in caches.values():
            withheld.add(cache.original())
        args, kwargs = with_given(args, kwargs, dict.fromkeys(caches))
        slots = self._slots.setdefault(region, Slots())
        end = partial(slots.use, region.path, caches)
        return with_own(forward, caches, end), args, kwargs

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
        if self.choice is Choice.NONE or self.current is not None or self.pack is None:
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
        if not self._is_chosen(lane, number, region):
            return self._around(lane, number, (*args, *kwargs.values()))
        meter = self.cache.meter
        since_ns = 0 if meter is None else meter.outside_ns()
        leaves, arguments = flatten(args, kwargs)
        seen = self._seen(region, leaves)
        if isinstance(seen, str):
            self.refuse(region, seen)
            return None
        call = self._call(region, number, forward, seen, leaves, arguments)
        if meter is not None:
            meter.region_began(since_ns)
        return call

    def _seen(self, region: Region, leaves: list[Any]) -> Seen | str:
        """How a call finds the region; text: why it does not run again."""
        reason = self._refusal(region, leaves)
        if reason is not None:
            return reason
        try:
            seen = region.watch.look()
        except Exception as error:  # an object of the user's does not like that
            told = f"{type(error).__name__}: {error}"
            return f"what its forward reads cannot be looked at ({told})"
        return seen.refusal or seen

    def _call(
        self,
        region: Region,
        number: int,
        forward: Any,
        seen: Seen,
        leaves: list[Any],
        arguments: Arguments,
    ) -> RegionCall:
        """A call that has its arguments stored, and is given what its forward saves."""
        cache, lane = self.cache, self.cache.lanes.current
        with cache.lock:  # another thread's re-run has set what a call notes of here
            call = RegionCall(self, region, number, forward, lane, seen)
            cursor = cache.cursor
            if cursor.observer.listens:
                told = cursor.of(lane).number, number, call.region.path
                cursor.observer.region(*told)
            cursor.storing = number
            try:
                call.store(leaves, arguments, self.pack)
            finally:
                cursor.storing = OUTSIDE_PLAN
            self._begun.add(region)
            self._alive.add(call)
            cache.retired.watch(call, call.holding)
            lane.num_live += 1
            self.current = call
            cursor.region = number
            if cache.needs_no_record(call):  # a lane may have left its table just now
                self._save_by_index(call)
            if lane.run is not None and call.part is None:
                lane.run.without_rows()
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
                self.cache.cursor.observer.refused()
        if meter is not None:
            meter.region_ended(since_ns)

    def abort(self, call: RegionCall) -> None:
        """Its forward raised."""
        self._leave()
        call.abort()

    def _leave(self) -> None:
        self.take_off()
        call, self.current = self.current, None
        if call is not None and call.part is None and call.lane.run is not None:
            call.lane.run.with_rows()
        self.cache.cursor.region = OUTSIDE_PLAN

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
        """Put hooks of the call's own on top: nobody asks for more than an index. See
        [Note: saved by index]."""
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

    def _is_chosen(self, lane: Lane, number: int, region: Region) -> bool:
        cursor = lane.cursor or self.cache.cursor.of(lane)
        if self.choice is Choice.PLANNED or cursor.orders is not None:
            return cursor.runs_again(number)
        return region.path not in self.staying

    def _refusal(self, region: Region, leaves: Iterable[Any]) -> str | None:
        if region.refusal is not None:
            return region.refusal
        if region not in self._looked_at:
            self._looked_at.add(region)
            region.refusal = region.watch.standing_refusal()
            if region.refusal is not None:
                return region.refusal
        dispatching, overriding, _ = ASKED
        if (dispatching() or overriding()) and modes_stand():
            return "a function or dispatch mode would not see its re-run"
        if forward_ad._current_level >= 0:
            return "a re-run in backward has no tangents of forward-mode AD"
        if parametrize._cache_enabled:
            return (
                "parametrize.cached() holds what its weights are, and not in backward"
            )
        if self.normalizations and any(map(self._is_statistic, leaves)):
            return "its argument is a statistic that a normalization updates"
        return _changing(leaves)

    def _is_statistic(self, leaf: Any) -> bool:
        if type(leaf) is not Tensor or leaf.requires_grad or not has_place(leaf):
            return False
        return not storages_of(self.normalizations).isdisjoint(storages([leaf]))

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
        lane, cursor = self.cache.lanes.current, self.cache.cursor
        if lane.run is None:  # a table is left by its rows
            cursor.leave(cursor.of(lane))
        if region.path not in self.reasons:
            level = logging.INFO if self.reasons else logging.WARNING
            told = "ssdtrain: %s does not run again: %s"
            logger.log(level, told, region.path, reason)
        self.reasons[region.path] = reason
        self.cache.offloader.fall_back(Fallback.NO_REGION)

    def computes(self, region: Region, reason: str) -> None:
        """A stored result of attention was not taken; counted."""
        logger.info(
            "ssdtrain: attention in %s is computed again: %s", region.path, reason
        )
        self.cache.offloader.fall_back(Fallback.ATTENTION_COMPUTED)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to write to weights that a re-run would read.

        Behind a backward others may hold a graph for a while: a thread of a collective
        does. Other ranks do not at that moment, and would not meet a re-run's
        collectives."""
        if self.cache.owner.is_elsewhere:
            return
        in_backward = torch._C._current_graph_task_id() != -1
        groups = (group["params"] for group in optimizer.param_groups)
        written = {id(parameter) for group in groups for parameter in group}
        for call in self._alive:
            reads = call.reads(written)
            if reads and (in_backward or not call.region.communicates):
                call.pin()
            elif reads or call.reads_shards(written):
                call.lost_weights = True  # no forward can gather the old ones again
            else:
                continue
            self._alive.discard(call)


def _changing(leaves: Iterable[Any]) -> str | None:
    """Why an argument could be another when its call runs again; None: none could."""
    for leaf in leaves:
        kind = type(leaf)
        if kind in PLAIN or (kind is Tensor and not leaf.__dict__):
            continue
        if may_change(leaf):
            if isinstance(leaf, Tensor):
                return "attributes of its argument are not stored with it"
            return (
                f"its argument of type {kind.__name__} may change (a KV cache? set "
                "use_cache=False)"
            )
    return None
