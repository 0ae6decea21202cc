"""What was simulated, by placements and style: a search asks for many twice."""

from itertools import chain
from typing import NamedTuple

from ssdtrain.plan.placement import Placement, Placements
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.simulate import Outcome, Simulation
from ssdtrain.plan.timeline import Timeline

CODES = {placement: number for number, placement in enumerate(Placement)}


class Placed(NamedTuple):
    """A candidate in few bytes."""

    codes: bytes
    """Number of the placement of every item, kind by kind."""
    style: Style


class Outcomes:
    """Simulates each candidate of a profile once, for all searches with it."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._known: dict[Placed, Outcome] = {}

    def placed(self, placements: Placements, style: Style) -> Placed:
        """Return the candidate with these placements."""
        kinds = self.timeline.profile.kinds
        every = chain.from_iterable(placements[kind] for kind in kinds)
        return Placed(bytes(map(CODES.__getitem__, every)), style)

    def of(self, placements: Placements, style: Style) -> Outcome:
        """Return the outcome of a candidate. It says neither who waited for what nor
        what was alive at the peak."""
        placed = self.placed(placements, style)
        found = self._known.get(placed)
        if found is None:
            orders = schedule(self.timeline, placements, style)
            found = self._known[placed] = Simulation(self.timeline, orders).run()
            found.causes, found.live_at_peak = {}, frozenset()
        return found
