"""What fits into device memory, and whether steps under a plan do."""

from types import SimpleNamespace
from typing import Any

from ssdtrain.observe.memorygoal import PLAIN_SHARE, MemoryGoal
from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.goal import DEVICE_RESERVE, Goal
from ssdtrain.transfer.device import MemoryLevel
from tests.ssdtrain.observe.parts import Cache
from tests.ssdtrain.plan.profiles import MB, chain

CAPACITY = 1000 * MB


class Memory:
    """A `MemoryGoal` and what it was made with."""

    def __init__(self, goal: Goal | None = None, peers: Any = None) -> None:
        self.cache: Any = Cache()
        self.cache.device.capacity = CAPACITY
        self.goal = Tightened(goal or Goal())
        self.room: Any = SimpleNamespace(
            stuck_bytes=0, unusable_bytes=0, segments="whole"
        )
        self.observed: Any = SimpleNamespace(torn_bytes=0, cached_bytes=0)
        self.memory = MemoryGoal(
            self.cache, self.goal, self.room, self.observed, peers or Peers()
        )

    def used(self, num_bytes: int) -> None:
        self.cache.ledger.start = MemoryLevel(num_bytes, 0, 0, 0)


def test_the_plain_step_fits_beside_what_is_in_use_and_stuck() -> None:
    own, profile = Memory(), chain(8)
    assert not own.memory.fits_plain(profile), "nobody knows what is in use"
    room = int(PLAIN_SHARE * CAPACITY) - 8 * MB
    own.used(room - MB)
    assert own.memory.fits_plain(profile)
    own.room.stuck_bytes = MB
    assert not own.memory.fits_plain(profile)
    own.room.stuck_bytes = 0
    assert not own.memory.fits_plain(chain(9)), "of another profile"
    own.cache.device.capacity = None
    assert not own.memory.fits_plain(profile)


def test_everything_fits_a_budget_up_to_its_end_and_a_limit_but_for_its_reserve() -> (
    None
):
    profile = chain(8)
    for goal, fits in (
        (Goal(memory_budget_bytes=8 * MB), True),
        (Goal(memory_budget_bytes=8 * MB - 1), False),
        (Goal(device_bytes=int(8 * MB / (1 - DEVICE_RESERVE)) + 1), True),
        (Goal(device_bytes=8 * MB), False),
        (Goal(device_bytes=9 * MB, torn_bytes=MB), False),
    ):
        assert Memory(goal).memory.fits_plain(profile) == fits


def test_plans_leave_what_is_torn_or_stuck_on_any_rank() -> None:
    told: list[tuple[tuple[float, ...], str, int]] = []

    class Others(Peers):
        def longest(self, own: Any, topic: str, step: int) -> tuple[float, ...]:
            told.append((own, topic, step))
            return -500.0 * MB, own[1]

    own = Memory(peers=Others())
    own.observed.torn_bytes, own.room.unusable_bytes = 3, 5
    own.memory.look_at_device(7)
    assert told == [((-float(CAPACITY), 5.0), "capacity", 7)]
    goal = own.goal.goal
    assert (goal.capacity_bytes, goal.torn_bytes) == (500 * MB, 5)
    own.cache.device.capacity = None
    own.memory.look_at_device(8)
    assert own.goal.goal == Goal() and len(told) == 1 and not own.goal.was


def test_of_several_ranks_none_plans_for_its_own_retries() -> None:
    class Others(Peers):
        is_alone = False

    own = Memory(Goal(memory_budget_bytes=MB), Others())
    own.memory.planned()
    for number in range(64):
        own.cache.device.level = MemoryLevel(0, 0, 0, 0, num_retries=number)
        assert not own.memory.is_short()
