"""Which lane is being filled, and what each kind of lane taught."""

from collections.abc import Callable
from typing import NamedTuple

from ssdtrain.cache.record import Lane, LaneProfile


class LaneSize(NamedTuple):
    """How large a lane is: [Note: sizes]."""

    first_bytes: int = 0
    """Of its first item; 0: unknown."""
    num_bytes: int = 0
    """Of all that it saved."""
    num_elements: int = 0
    """Of the arguments of its forward: [Note: plans by size] in bysize.py."""

    def over(self, observed: "LaneSize") -> float:
        """Return the ratio of sizes. What is saved may have parts that do not grow, as
        the gradient of a head's weights, and others that grow with the square."""
        pairs = zip(self[:2], observed[:2], strict=True)
        return max((own / other for own, other in pairs if other), default=0.0)


def larger_of(one: LaneSize, other: LaneSize) -> LaneSize:
    """Return the larger one in either way."""
    return LaneSize(*map(max, one, other))


class Lanes:
    """Lanes in flight, and profiles by (chunk, number of lanes in flight at its start).

    The second half of the profile's key tells the micro-batches of a pipeline
    schedule apart without knowing the schedule: under 1F1B the last stage always
    starts with none in flight and its backward follows; the first stage's warm-up
    lanes start with fewer in flight than its steady ones.
    """

    def __init__(self, saved_bytes: Callable[[], int] = lambda: 0) -> None:
        """saved_bytes: saved for backward in this step so far."""
        self._saved_bytes = saved_bytes
        self._largest: dict[str, LaneSize] = {}
        self._begun_bytes = 0
        """Saved when the open lane began."""
        self._profiles: dict[tuple[str, int], LaneProfile] = {}
        self._in_flight: set[Lane] = set()
        self._latest: Lane | None = None
        self._open: Lane | None = None
        """Begun and not ended."""
        self.current = self._outside()

    def begin(self, chunk: str, micro_batch: int | None = None) -> Lane:
        """Open a lane; everything packed from now on joins it."""
        self.finish()
        kind = (chunk, len(self._in_flight))
        profile = self._profiles.setdefault(kind, LaneProfile())
        label = chunk if micro_batch is None else f"{chunk}[{micro_batch}]"
        lane = Lane(label, profile, f"{chunk}/{len(self._in_flight)}")
        self._open = self._latest = lane
        self.current = lane
        self._begun_bytes = self._saved_bytes()
        return lane

    def end(self, lane: Lane) -> None:
        """Close a lane; it is in flight until its last record dies."""
        lane.open = False
        self.current = self._outside()
        run, lane.run = lane.run, None
        if run is not None:
            run.end()
        first_bytes = 0 if lane.cursor is None else lane.cursor.first_bytes
        num_bytes = self._saved_bytes() - self._begun_bytes
        size = LaneSize(first_bytes, num_bytes, lane.num_elements)
        if lane.cursor is None or lane.cursor.orders is None:
            # Else a plan decides what is counted.
            before = self._largest.get(lane.kind, LaneSize())
            self._largest[lane.kind] = larger_of(before, size)
        if lane.num_live > 0:
            self._in_flight.add(lane)
        self._open = None

    def finish(self) -> None:
        """Close the lane that an interrupt kept from its end, if there is one."""
        if self._open is not None:
            self.end(self._open)

    def take_largest(self) -> dict[str, LaneSize]:
        """Size of the largest lane of each kind that followed no plan, or not to its
        end, since this was asked last."""
        taken, self._largest = self._largest, {}
        return taken

    def nothing_lives(self) -> None:
        """No record is alive: lanes that an interrupt left in flight have ended."""
        self._in_flight.clear()

    def start_backward(self, lane: Lane) -> None:
        """Backward has come to a lane."""
        lane.start_backward(follows=lane is self._latest)

    def left(self, lane: Lane) -> bool:
        """A record of the lane died; True if it was the last."""
        lane.num_live -= 1
        # Below 0: an interrupt came between a record and its lane.
        if lane.num_live > 0 or lane not in self._in_flight:
            return False
        self._in_flight.remove(lane)
        if lane.in_backward:
            lane.learn()
        return True

    def give_up_spent(self) -> list[Lane]:
        """Return the lanes in flight that backward has been through, and count them no
        more: see [Note: spent lanes] in engines/hints.py."""
        spent = [lane for lane in self._in_flight if lane.in_backward]
        self._in_flight.difference_update(spent)
        for lane in spent:
            lane.give_up()
        return spent

    @property
    def latest_name(self) -> str:
        """The lane opened last, as chunk[micro-batch]."""
        return "" if self._latest is None else self._latest.name

    @property
    def is_idle(self) -> bool:
        """Whether no lane is in flight."""
        return not self._in_flight

    def _outside(self) -> Lane:
        """For tensors packed outside any forward (a user's own context)."""
        return Lane("outside", LaneProfile())
