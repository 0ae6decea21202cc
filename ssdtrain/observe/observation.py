"""The observed step, from what it is run under to the profile that is made of it.

Everything that can move does, and waits where it must, so that it fits wherever full
offloading fits; links, the drive and what copies cost compute are probed after it.

[Note: calls with side effects]
A region whose calls change something is one until its third such call. A step in which
that was found out shows a region that no plan may count on: the next one is observed
in its place. A lane that follows a plan with such a region leaves it
(`Regions.refuse`), so a region that is refused later is observed anew as well.
(tests/ssdtrain/regions/test_planned.py)

(tests/ssdtrain/observe/test_planner.py, test_observation.py)
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.cursor import Unobserved
from ssdtrain.counters import Trace
from ssdtrain.curves import DUPLEX_SLOWDOWN
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.links import fitted_drive, fitted_links, probe
from ssdtrain.observe.modules import ModuleNames
from ssdtrain.observe.observer import Recording
from ssdtrain.observe.room import Room
from ssdtrain.plan.profile import Profile
from ssdtrain.transfer.direct import DirectOffloader

NUM_PROBE_THREADS = 4
"""Writers of a drive that the observed step used too little (as `io_threads`)."""
COLD_BYTES = 1 << 30
"""A step that had to pin more than this waited for it, and its small operators were
measured with the time of their launch: it is observed again."""


class Observation:
    """Records one step at a time."""

    def __init__(
        self,
        cache: TensorCache,
        prices: HostPrices,
        room: Room,
        trace: Trace,
        roots: Sequence[nn.Module],
        notes: Mapping[str, str],
    ) -> None:
        self.saved_bytes = 0
        """Saved in it."""
        self.torn_bytes = self.cached_bytes = 0
        """The same of the allocator: [Note: torn blocks], [Note: retries]."""
        self.needed_bytes = 0
        """What it needed at most beyond what was in use before."""
        self.peak_module = ""
        """In which module."""
        self._cache = cache
        self._prices = prices
        self._room = room
        self._trace = trace
        self._wants_trace = trace.enabled
        self._names = ModuleNames(roots)
        self._notes = notes
        self._recording: Recording | None = None
        self._pause: tuple[Any, Any] = (None, None)
        """From the end of the step before the observed one to the observed one."""
        self._pinned_bytes = 0
        self._num_spans = 0

    @property
    def is_under_way(self) -> bool:
        """Whether the running step is recorded."""
        return self._recording is not None

    @property
    def module(self) -> str:
        """The module that runs, or whose tensor backward asked for last; "": none."""
        return "" if self._recording is None else self._recording.module

    def begin(self) -> None:
        """Record the next step."""
        cache = self._cache
        if gc.isenabled():
            # What garbage the step would free looks like room that it does not need.
            gc.collect()
        self._pause = (cache.ledger.closed, cache.ledger.clock.now())
        self._room.trim()  # see [Note: torn blocks]
        meter = self._prices.listen()
        cache.ledger.clock.keep_spans = True
        self._pinned_bytes = cache.offloader.pool.total_bytes
        self._num_spans = len(self._trace.spans())
        self._trace.enabled = True
        cache.device.watch_copies()
        if not cache.is_compiled:
            self._names.start()
        self._recording = Recording(
            cache.device,
            cache.ledger,
            lambda: self._names.now,
            lambda: cache.moves.lingering_bytes,
            meter,
        )
        cache.cursor.observer = self._recording

    def stop(self) -> None:
        """Remove what an unfinished observation left. Idempotent."""
        self._names.stop()
        self._prices.take()
        self._trace.enabled = self._wants_trace
        self._cache.ledger.clock.keep_spans = False
        self._cache.cursor.observer = Unobserved()
        self._recording = None  # it may hold tensors of a step that was not ended

    def end(
        self, *, is_first: bool, is_last: bool = False, is_cold: bool = False
    ) -> Profile | None:
        """Return the profile of the step that has ended; None: it shows too little.
        Waits for the device.

        Args:
            is_first: nobody has observed a step like it; if it had to pin its memory
                the next one finds the memory there.
            is_last: no other step will be observed in its place.
            is_cold: a profile of the memory is enough.
        """
        cache = self._cache
        recording, self._recording = self._recording, None
        self.saved_bytes = cache.ledger.saved_bytes
        if recording is not None:
            recording.stop()  # before what follows, which waits for the device
            recording.waited_ms = self._waited_ms()
        cache.cursor.observer = Unobserved()
        meter = self._prices.take()
        self._names.stop()
        cache.offloader.wait_io()  # the drive is measured, and idle for its probe
        self._trace.enabled = self._wants_trace
        clock = cache.ledger.clock
        clock.keep_spans = False
        copies = cache.device.watched_copies()
        grown_bytes = cache.offloader.pool.total_bytes - self._pinned_bytes
        if grown_bytes > COLD_BYTES and is_first and not is_cold:
            return None
        if recording is not None and recording.has_refused:
            if not (is_last or is_cold):  # see [Note: calls with side effects]
                return None
        copying_ms = sum(copy.ms for copy in copies)
        if len({copy.outwards for copy in copies}) < 2:
            copies += probe(cache.device, cache.offloader.pool)
        if recording is None:
            return None
        spans = self._trace.spans()[self._num_spans :]
        drive = fitted_drive(cache.offloader.storage, spans, NUM_PROBE_THREADS)
        if drive is not None:
            direct = isinstance(cache.offloader, DirectOffloader)
            drive = drive._replace(direct=direct)
        duplex = DUPLEX_SLOWDOWN if self._prices.is_on_gpu else 0.0
        links = fitted_links(copies, drive, duplex)
        profile = recording.profile(
            clock.last_spans(),
            links,
            cache.offloader.pool.cap_bytes,
            copying_ms,
            self._notes,
        )
        self.torn_bytes = recording.torn_bytes
        self.cached_bytes = recording.cached_bytes
        self.needed_bytes = recording.needed_bytes
        self.peak_module = recording.peak_module
        if profile is None or meter is None or not self._prices.is_on_gpu or is_cold:
            return profile
        return replace(profile, host_costs=self._prices.probe())

    def _waited_ms(self) -> float:
        """By how much more than usual passed since the observed step's end.

        The first stage of a pipeline plans before it sends anything, so that the others
        wait between their observed step and the next for it, and only then.
        """
        clock, (end, start) = self._cache.ledger.clock, self._pause
        if end is None:
            return 0.0
        usual = clock.ms_between(end, start)
        now = clock.ms_between(self._cache.ledger.closed, clock.now())
        return max(0.0, now - usual)
