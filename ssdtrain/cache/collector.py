"""Python's garbage collector, which is not to look for old garbage within a step.

[Note: held back]
A saved tensor is a few small objects from forward to backward. To the collector objects
that survive its generation 1 are there to stay: it counts them, their end does not take
them out of the count, and a quarter as many as there are old objects makes it walk all
of these, 0.2 s and more next to large libraries, every few steps. Without hooks
autograd has no such objects. So generation 1 waits while a forward's saved tensors are
alive. Young garbage, in generation 0, is freed as ever. The wait has an end: a loss
that is kept without its backward holds them as well, for as long as the program likes.

Where a collection of generation 1 is due, it comes before the next forward at the
latest. What a planner makes between two steps has gone by then: profiles and simulated
steps are thousands of objects that count as old ones once they have been looked at, and
a model of 340 saved tensors had the walk in the step after the first one of its plan.
Whatever the program sets meanwhile stays, and where it has switched the collector off
nothing happens. Nor does it where there is no generation 1: under the incremental
collector of Python 3.14.0 to 3.14.4, whose last threshold reads 0, and in free-threaded
builds, whose every collection is a full one.
(tests/ssdtrain/cache/test_collector.py)
"""

import gc
import sysconfig
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, starmap

PATIENT = 1_000
"""In collections of generation 0: more than the saved tensors of any step bring."""

HAS_GENERATIONS = not sysconfig.get_config_var("Py_GIL_DISABLED")


class Hold:
    """While it lives, generation 1 waits."""

    __slots__ = ("__weakref__",)


class GarbageCollector:
    """Holds the collector back for one session."""

    _thresholds = count(PATIENT)
    """Another one for each session, so that it knows its own again."""

    def __init__(self) -> None:
        self._raised = next(self._thresholds)
        self._found = 0
        """The threshold of generation 1 that was there before."""
        self._hold: weakref.ref[Hold] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block between two forwards that makes many objects: what it leaves is
        looked at after it."""
        hold = self.hold(collects=False)
        try:
            yield
        finally:
            del hold

    def hold(self, *, collects: bool = True) -> Hold | None:
        """Hold it back while what this gives lives; None: nothing is held back.

        Args:
            collects: whether what is due comes before.
        """
        hold = None if self._hold is None else self._hold()
        if hold is not None:
            return hold
        self.let_go()
        found = young, middle, old = gc.get_threshold()
        if not (HAS_GENERATIONS and gc.isenabled() and young and old):
            return None
        if not 0 < middle < PATIENT:
            return None  # another session's, or as patient already
        if collects and gc.get_count()[1] > middle:
            gc.collect(1)  # due, and nobody may give it time between steps
        held = young, self._raised, old
        hold, self._found = Hold(), middle
        # In C, for a graph may die anywhere: see [Note: destructors] in record.py. Each
        # `next` looks twice at what is set, and sets what belongs there instead: what
        # was found, or the same again where the program has set something else.
        now = iter(gc.get_threshold, None)
        restored = starmap(gc.set_threshold, map({held: found}.get, now, now))
        self._hold = weakref.ref(hold, partial(next, restored))
        gc.set_threshold(*held)
        return hold

    def let_go(self) -> None:
        """Hold nothing back any more. Idempotent."""
        self._hold = None
        young, middle, old = gc.get_threshold()
        if middle == self._raised:
            gc.set_threshold(young, self._found, old)
