"""What the plan tells the cache to do at a mark: send, release, load."""

from collections.abc import Callable
from typing import Any

from ssdtrain.cache.course import Course
from ssdtrain.cache.record import Lane, LaneCourse, Record, RecordState
from ssdtrain.cache.window import ReleaseWindow
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order
from ssdtrain.transfer.offloader import Offloader

PLANNED = (Placement.KEEP, Placement.OFFLOAD, Placement.OFFLOAD_SSD)


class PlannedMoves:
    """Carries out orders; the cache's lock is held."""

    def __init__(
        self,
        offloader: Offloader,
        window: ReleaseWindow,
        course: Course,
    ) -> None:
        self._offloader = offloader
        self._window = window
        self._course = course
        self.num_acts = 0
        """Releases and loads so far."""

    @property
    def lingering_bytes(self) -> int:
        """See [Note: lingering] in window.py."""
        return self._window.lingering_bytes

    def send(self, record: Record, order: Order, due: int | None) -> bool:
        """Start to move a new record away, if there is room.

        Args:
            due: mark of its release; None: it stays.
        """
        if due is None or record.data is None:
            return False
        parcel = self._offloader.store(
            record.data, record.name, lambda: True, record.holding
        )
        if parcel is None:
            return False
        record.leave(parcel)
        self._window.add(record, record.data, parcel, due)
        if order.placement is Placement.OFFLOAD_SSD:
            self._offloader.send_on(parcel)
        return True

    def release_due(self) -> None:
        """Drop what the plan wants gone by this mark, behind its copy."""
        if self._window.num_due:
            self.num_acts += self._window.release_due(self._course.mark)

    def load_due(
        self, lane: Lane, at: int | None, start_loads: Callable[[list[Any]], None]
    ) -> None:
        """Start what the plan loads at this use, and read ahead from the SSD."""
        course = self._course.of(lane)
        if at is None or course.orders is None:
            return
        self.load_at(course, at, start_loads)

    def load_at(
        self, course: LaneCourse, at: int, start_loads: Callable[[list[Any]], None]
    ) -> None:
        """As `load_due`, for a lane that follows its plan."""
        for batch in course.loads.get(at, ()):
            away = []
            for item in batch:
                found = course.records.get(item)
                record = None if found is None else found()
                if record is not None and record.state is RecordState.AWAY:
                    away.append(record)
            if away:
                self.num_acts += len(away)
                start_loads(away)
        while course.reading and self._offloader.storage is not None:
            record = course.record(course.reading[-1])
            if (
                isinstance(record, Record)  # a `Moved` rests in host memory
                and record.state is RecordState.AWAY
                and record.parcel is not None
                and not self._offloader.recall(record.parcel)
            ):
                self.num_acts += 1  # it will be tried again at the next use
                return
            course.reading.pop()
            self.num_acts += 1
