"""How much time recipes may take, and which of them are worth it.

[Note: recipe budget]
A recipe buys bytes with time, at very different prices: a GELU costs half as much per
byte as a dropout mask, a flash attention six times as much. In its first steps a
session uses every admitted recipe and measures each on the device's own clock. Then
it keeps, cheapest per byte first, those that fit into `max_overhead` of the step;
the others are stored, and counted. Only GPUs have a budget: on a CPU the interpreter
is what would be measured.

[Note: before the peak]
What backward asks for first is alive at the start of backward either way: stored, or
rebuilt at once. As long as memory was lower than the step's peak until a rebuild, by
at least its bytes, storing it leaves the peak where it is, and its time is free for
another recipe. In a GPT that is the last block's GELU: the operator that asks for it
makes a gradient of its size while it holds it, and memory is highest then. Nothing of
ours runs at that moment, so the gradient's bytes are added when the rebuild ends.
(tests/ssdtrain/remat/test_budget.py)
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

# What is dropped is not measured again: a choice after one good step keeps its noise.
NUM_MEASURED_STEPS = 3
NUM_WATCHED_STEPS = 5
# The rest of the overhead is for the hooks, and for what rebuilt bytes do to caches: an
# H200 lost between 0.7 points less and 0.2 more than the recipes' own time.
MAX_OVERHEAD = 0.01
"""Of a step, where nobody says how much recipes may cost."""
RECIPE_SHARE = 0.92


class Span(NamedTuple):
    """One measured rebuild."""

    recipe: str
    place: Hashable
    """Where in a step: the lane's name and a number within it."""
    num_bytes: int
    ms: float
    high_bytes: int = 0
    """Most device memory in use in the step until then."""


class Budget(Protocol):
    """Decides whether a recipe may spend its time. Off is an object: `NoBudget`."""

    @property
    def is_watching(self) -> bool:
        """Whether it wants to observe the next step."""

    def allows(self, place: Hashable) -> bool:
        """Whether the recipe at this place is to be used."""

    def observe(self, step_ms: float, spans: Sequence[Span], high_bytes: int) -> None:
        """A finished step.

        Args:
            step_ms: from its first forward to that of the next.
            spans: its rebuilds in their order.
            high_bytes: most device memory in use in the step.
        """


class NoBudget:
    """Everything is allowed, nothing is measured for it."""

    is_watching = False

    def allows(self, place: Hashable) -> bool:
        """Always."""
        return True

    def observe(self, step_ms: float, spans: Sequence[Span], high_bytes: int) -> None:
        """No need."""


class OverheadBudget:
    """Recipes within a fraction of the step time. See the Notes above."""

    def __init__(self, max_overhead: float) -> None:
        self._max_overhead = max_overhead
        self._plain_ms = float("inf")
        self._costs_ms: dict[Hashable, float] = {}
        self._sizes: dict[Hashable, int] = {}
        self._num_observed = 0
        self._in_vain: frozenset[Hashable] = frozenset()
        self._skipped: frozenset[Hashable] = frozenset()

    def allows(self, place: Hashable) -> bool:
        """Whether it fits; what was never measured does."""
        return place not in self._skipped

    @property
    def is_watching(self) -> bool:
        """Whether it does not know enough."""
        return self._num_observed < NUM_WATCHED_STEPS

    def observe(self, step_ms: float, spans: Sequence[Span], high_bytes: int) -> None:
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
        if self._num_observed == NUM_MEASURED_STEPS:
            self._in_vain = before_peak(spans, high_bytes)
        if self._num_observed >= NUM_MEASURED_STEPS:
            self._skipped = self._in_vain | self._too_slow()

    def _too_slow(self) -> frozenset[Hashable]:
        left_ms = RECIPE_SHARE * self._max_overhead * self._plain_ms
        skipped = set()

        def price(place: Hashable) -> float:
            return self._costs_ms[place] / max(1, self._sizes[place])

        for place in sorted(self._costs_ms, key=price):
            cost_ms = self._costs_ms[place]
            if place in self._in_vain:
                continue
            if cost_ms > left_ms:
                skipped.add(place)
            else:
                left_ms -= cost_ms
        return frozenset(skipped)


def before_peak(spans: Sequence[Span], high_bytes: int) -> frozenset[Hashable]:
    """Places whose recipe does not lower the peak. See [Note: before the peak]."""
    stored_bytes = 0
    found: set[Hashable] = set()
    for span in spans:
        if span.high_bytes + stored_bytes + span.num_bytes > high_bytes:
            break
        stored_bytes += span.num_bytes
        found.add(span.place)
    return frozenset(found)
