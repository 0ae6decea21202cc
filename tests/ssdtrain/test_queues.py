"""A rank's queues: order, gaps, opposite directions, copies beside compute."""

import pytest

from ssdtrain.curves import Curve, Links
from ssdtrain.queues import Queue, Rank

WIRE = Curve.straight(0.0, 1e9)


def rank(gap: float = 0.0, **slowdowns: float) -> Rank:
    return Rank(Links(d2h=WIRE, h2d=WIRE, **slowdowns), gap)  # type: ignore[arg-type]


def test_a_queue_serves_in_order_with_its_gap() -> None:
    queue = Queue(gap=1.0)
    assert queue.serve(5.0, 10.0, 3) == 15.0
    assert queue.serve(0.0, 2.0, 4) == 18.0  # ready long ago, behind the gap
    assert (queue.busy, queue.alone, queue.num_bytes) == (12.0, 12.0, 7)
    assert queue.hold(10.0) == 0.0
    assert queue.hold(25.0) == 6.0
    assert queue.serve(0.0, 1.0) == 26.0


def test_the_direction_that_comes_second_pays() -> None:
    queues = rank(duplex_slowdown=0.5)
    assert queues.out.serve(0.0, 10.0) == 10.0
    assert queues.into.serve(4.0, 8.0) == 4.0 + 8.0 + 0.5 * 6.0
    assert queues.into.alone == 8.0
    assert queues.ssd_read.serve(0.0, 8.0) == 8.0  # another wire


def test_copies_slow_compute_while_they_last() -> None:
    queues = rank(copy_slowdown=0.1)
    queues.out.serve(0.0, 30.0)
    assert queues.run(0.0, 20.0) == pytest.approx(22.0)
    assert queues.run(0.0, 20.0) == pytest.approx(22.0 + 20.0 + 0.1 * 8.0)
    assert Rank().run(3.0, 20.0) == 23.0


def test_a_direct_drive_is_the_way_out_and_back() -> None:
    queues = rank(ssd_direct=True)
    assert queues.out is queues.ssd_write and queues.into is queues.ssd_read


def test_compute_waits_for_the_host() -> None:
    queues = rank()
    queues.run(0.0, 4.0)
    queues.host = 3.0
    assert queues.wait_for_host() == 0.0
    queues.host = 9.0
    assert queues.wait_for_host() == 5.0
    assert queues.run(0.0, 1.0) == 10.0


def test_collectives_slow_compute_while_they_last() -> None:
    queues = Rank(collective_slowdown=0.5)
    assert queues.collective(0.0, 10.0) == 10.0
    assert queues.run(0.0, 20.0) == pytest.approx(20.0 + 0.5 * 10.0)
    assert queues.run(0.0, 20.0) == pytest.approx(45.0)
    # What is on its way already pays as well: 15 of the 30 run beside it.
    assert queues.collective(30.0, 30.0) == 60.0
    assert queues.run(0.0, 1.0) == pytest.approx(45.0 + 7.5 + 1.0 + 0.5 * 1.0)
