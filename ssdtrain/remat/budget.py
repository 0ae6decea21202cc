"""How much time recipes may take, and which of them are worth it.

[Note: recipe budget]
A recipe buys bytes with time, at very different prices: a GELU costs half as much per
byte as a dropout mask, a flash attention six times as much. In its first steps a
session uses every admitted recipe and measures each on the device's own clock. Then
it keeps, cheapest per byte first, those that fit into `max_overhead` of the step;
the others are stored, and counted. Only GPUs have a budget: on a CPU the interpreter
is what would be measured.
(tests/ssdtrain/remat/test_budget.py)
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol

NUM_MEASURED_STEPS = 2
NUM_WATCHED_STEPS = 5
# The rest of the overhead is for the hooks, and for what rebuilt bytes do to caches.
RECIPE_SHARE = 0.85


class Span(NamedTuple):
    """One measured rebuild."""

    recipe: str
    place: Hashable
    """Where in a step: the lane's name and a number within it."""
    num_bytes: int
    ms: float


class Budget(Protocol):
    """Decides whether a recipe may spend its time. Off is an object: `NoBudget`."""

    def allows(self, place: Hashable) -> bool:
        """Whether the recipe at this place is to be used."""

    def observe(self, step_ms: float, spans: Iterable[Span]) -> bool:
        """A finished step.

        Returns:
            Whether more steps should be observed.
        """


class NoBudget:
    """Everything is allowed, nothing is measured for it."""

    def allows(self, place: Hashable) -> bool:
        """Always."""
        return True

    def observe(self, step_ms: float, spans: Iterable[Span]) -> bool:
        """No need."""
        return False


class OverheadBudget:
    """Recipes within a fraction of the step time. See [Note: recipe budget]."""

    def __init__(self, max_overhead: float) -> None:
        self._max_overhead = max_overhead
        self._plain_ms = float("inf")
        self._costs_ms: dict[Hashable, float] = {}
        self._sizes: dict[Hashable, int] = {}
        self._num_observed = 0
        self._skipped: frozenset[Hashable] = frozenset()

    def allows(self, place: Hashable) -> bool:
        """Whether it fits; what was never measured does."""
        return place not in self._skipped

    def observe(self, step_ms: float, spans: Iterable[Span]) -> bool:
        """Learn from a step. The least time seen counts: first runs are slow."""
        costs_ms: defaultdict[Hashable, float] = defaultdict(float)
        sizes: defaultdict[Hashable, int] = defaultdict(int)
        for span in spans:
            costs_ms[span.place] += span.ms
            sizes[span.place] += span.num_bytes
        for place, cost_ms in costs_ms.items():
            self._costs_ms[place] = min(cost_ms, self._costs_ms.get(place, cost_ms))
        self._sizes.update(sizes)
        plain_ms = step_ms - sum(costs_ms.values())
        self._plain_ms = min(self._plain_ms, plain_ms)
        self._num_observed += 1
        if self._num_observed >= NUM_MEASURED_STEPS:
            self._skipped = self._choose()
        return self._num_observed < NUM_WATCHED_STEPS

    def _choose(self) -> frozenset[Hashable]:
        left_ms = RECIPE_SHARE * self._max_overhead * self._plain_ms
        skipped = set()

        def price(place: Hashable) -> float:
            return self._costs_ms[place] / max(1, self._sizes[place])

        for place in sorted(self._costs_ms, key=price):
            cost_ms = self._costs_ms[place]
            if cost_ms > left_ms:
                skipped.add(place)
            else:
                left_ms -= cost_ms
        return frozenset(skipped)
