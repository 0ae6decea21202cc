"""Queues of one rank: when work on them starts and when it ends.

On the ground floor, because every simulated step runs on them: `plan/simulate.py`
drives one rank as the executor of a plan would, which decides as it goes;
`foresight/simulate.py` drives any number of ranks through tasks that are known
beforehand.

[Note: queues]
A rank has a host, a compute stream, a communication stream and links: copies out and
in, writes to the SSD and reads from it. Each serves in order, one piece of work at a
time: work starts when it is ready and the queue is free. Opposite directions of one
wire slow one another down for as long as both are busy, and copies and collectives
slow compute down meanwhile; the piece that starts later pays. Time has no unit here: a
driver uses one for all.
(tests/ssdtrain/plan/test_recorded_steps.py)
"""

from ssdtrain.curves import Links


class Queue:
    """A stream or a link. See [Note: queues]."""

    __slots__ = ("_duplex", "_gap", "alone", "busy", "free", "num_bytes", "other")

    def __init__(self, gap: float = 0.0, duplex_slowdown: float = 0.0) -> None:
        self._gap = gap
        self._duplex = duplex_slowdown
        self.other: Queue | None = None
        """The opposite direction of the same wire."""
        self.free = 0.0
        """When it can start the next piece."""
        self.busy = 0.0
        """Time of all pieces."""
        self.alone = 0.0
        """What they would take without the opposite direction."""
        self.num_bytes = 0

    def beside(self, start: float, length: float) -> float:
        """Return how much of the work that starts now runs next to this queue's."""
        left = self.free - start
        if left <= 0.0:
            return 0.0
        return left if left < length else length

    def serve(self, ready: float, length: float, num_bytes: int = 0) -> float:
        """Return when a piece that is ready at `ready` has ended."""
        start = ready if ready > self.free else self.free
        self.alone += length
        if self._duplex and self.other is not None:
            length += self._duplex * self.other.beside(start, length)
        end = start + length
        self.free = end + self._gap
        self.busy += length
        self.num_bytes += num_bytes
        return end

    def hold(self, until: float) -> float:
        """Start nothing before `until`; return by how much that is later."""
        wait = until - self.free
        if wait <= 0.0:
            return 0.0
        self.free = until
        return wait


class Rank:
    """A host, its device's streams and its links. See [Note: queues].

    Args:
        links: how transfers hinder one another and compute; None: not at all.
        gap: between two pieces of work on one queue that wait for nothing.
        collective_slowdown: fraction by which kernels are slower while a collective
        runs.
    """

    def __init__(
        self,
        links: Links | None = None,
        gap: float = 0.0,
        collective_slowdown: float = 0.0,
    ) -> None:
        wire = 0.0 if links is None else links.duplex_slowdown
        ssd = 0.0 if links is None else links.ssd_duplex_slowdown
        self._slowdown = 0.0 if links is None else links.copy_slowdown
        self._collective_slowdown = collective_slowdown
        self.host = 0.0
        """When the host has come to the work at hand."""
        self.compute, self.communication = Queue(gap), Queue(gap)
        self.d2h, self.h2d = Queue(gap, wire), Queue(gap, wire)
        self.d2h.other, self.h2d.other = self.h2d, self.d2h
        self.ssd_write, self.ssd_read = Queue(gap, ssd), Queue(gap, ssd)
        self.ssd_write.other, self.ssd_read.other = self.ssd_read, self.ssd_write
        direct = links is not None and links.ssd_direct
        # Without a copy to the host, and none back, the drive's queues are the way.
        self.out = self.ssd_write if direct else self.d2h
        """How bytes leave the device; `into` how they come back."""
        self.into = self.ssd_read if direct else self.h2d

    def run(self, ready: float, length: float) -> float:
        """Return when a kernel, or some, that are ready at `ready` have ended."""
        added = 0.0
        if self._slowdown:
            start = ready if ready > self.compute.free else self.compute.free
            out, into = self.out, self.into
            if out.free > start or into.free > start:
                beside = out.beside(start, length) + into.beside(start, length)
                added = self._slowdown * beside
        if self._collective_slowdown:
            start = ready if ready > self.compute.free else self.compute.free
            beside = self.communication.beside(start, length)
            added += self._collective_slowdown * beside
        return self.compute.serve(ready, length + added)

    def collective(self, ready: float, length: float) -> float:
        """Return when a collective that is ready at `ready` has ended. Kernels that are
        on their way already end later for it."""
        end = self.communication.serve(ready, length)
        if self._collective_slowdown:
            beside = self.compute.beside(end - length, length)
            self.compute.free += self._collective_slowdown * beside
        return end

    def wait_for_host(self) -> float:
        """Hold compute until the host is there; return how long that was."""
        return self.compute.hold(self.host)
