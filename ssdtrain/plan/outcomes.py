"""What was simulated, by placements and style: a search asks for many twice."""

from itertools import chain
from typing import NamedTuple

from ssdtrain.plan.placement import Placement, Placements
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.simulate import Outcome, Run
from ssdtrain.plan.timeline import Timeline

CODES = {placement: number for number, placement in enumerate(Placement)}
PLACEMENTS = tuple(Placement)


class Placed(NamedTuple):
    """A candidate in few bytes."""

    codes: bytes
    """Number of the placement of every item, kind by kind."""
    style: Style


class Outcomes:
    """Simulates each candidate of a profile once, for all searches with it."""

    def __init__(self, timeline: Timeline, num_helpers: int = 0) -> None:
        """num_helpers: processes that simulate beside this one: see helpers.py."""
        self.timeline = timeline
        self.num_helpers = num_helpers
        self._known: dict[Placed, Outcome] = {}
        self._news: list[Placed] = []
        """What was simulated here since `news` was asked for."""

    def placed(self, placements: Placements, style: Style) -> Placed:
        """Return the candidate with these placements."""
        kinds = self.timeline.profile.kinds
        every = chain.from_iterable(placements[kind] for kind in kinds)
        return Placed(bytes(map(CODES.__getitem__, every)), style)

    def of(self, placements: Placements, style: Style) -> Outcome:
        """Return the outcome of a candidate. It says neither who waited for what nor
        what was alive at the peak."""
        return self._of(self.placed(placements, style), placements)

    def simulate(self, placed: Placed) -> None:
        """Know this candidate's outcome."""
        placements, at = {}, 0
        for kind, items in self.timeline.profile.kinds.items():
            codes = placed.codes[at : at + len(items)]
            placements[kind] = [PLACEMENTS[code] for code in codes]
            at += len(items)
        self._of(placed, placements)

    def _of(self, placed: Placed, placements: Placements) -> Outcome:
        found = self._known.get(placed)
        if found is None:
            orders = schedule(self.timeline, placements, placed.style)
            found = self._known[placed] = Run(self.timeline, orders).run()
            found.causes, found.live_at_peak = {}, frozenset()
            self._news.append(placed)
        return found

    def news(self) -> list[tuple[Placed, Outcome]]:
        """Return what was simulated since this was asked for last."""
        news, self._news = self._news, []
        return [(placed, self._known[placed]) for placed in news]

    def take(self, news: list[tuple[Placed, Outcome]]) -> None:
        """Know what was simulated elsewhere."""
        self._known.update(news)
