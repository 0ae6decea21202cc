"""What a policy tells the cache to do with a record that no plan has an order for.

[Note: policies beside plans]
A plan names releases and loads by marks, which takes an observed step. Before there is
one (the first steps, which must fit and may not wait for long), after a lane has left
its plan, and for what a recipe or a region stores outside of its order, somebody must
decide with what is known at that moment: bytes on their way out, and whether compute is
busy. So policies stay, and `plan="offload-all"`, which observes nothing, is one of
them. What they decide is carried out by the same records, window and offloader.
(tests/ssdtrain/cache/test_window.py)
"""

from ssdtrain.cache.record import Record
from ssdtrain.cache.window import Pace, ReleaseWindow
from ssdtrain.counters import Fallback
from ssdtrain.plan.placement import Placement
from ssdtrain.transfer.offloader import Offloader


class UnplannedMoves:
    """Carries out placements; the cache's lock is held."""

    def __init__(self, offloader: Offloader, window: ReleaseWindow) -> None:
        self._offloader = offloader
        self._window = window
        self._pace = Pace(offloader.device, window)

    def send(self, record: Record, placement: Placement, window_bytes: int) -> bool:
        """Start to move a new record away, if its placement says so and it can.

        Args:
            record: whose bytes are on the device.
            placement: where the policy wants it.
            window_bytes: the release window of its lane.
        """
        lane = record.lane
        if placement is Placement.KEEP_LAST:
            lane.kept_last_bytes += record.num_bytes
            self._window.release_down_to(max(0, window_bytes - lane.kept_last_bytes))
            return False
        if placement is Placement.KEEP or record.data is None:
            return False
        in_time = placement is Placement.OFFLOAD_IF_IN_TIME
        limit = window_bytes - record.num_bytes
        if in_time and not self._pace.make_room(limit):
            self._offloader.fall_back(Fallback.KEPT_BACK_PRESSURE)
            return False
        patient = self._pace.compute_is_busy if in_time else (lambda: True)
        parcel = self._offloader.store(
            record.data, record.name, patient, record.holding
        )
        if parcel is None:
            return False
        record.leave(parcel)
        self._window.add(record, record.data, parcel)
        self._window.release_down_to(max(limit, 0) + record.num_bytes)
        return True
