"""Multiprocessors for fetching follow what training waits, on a clock of the test."""

from collections.abc import Callable

import pytest

from pydirect.budget import SmBudget


class Clock:
    """The training stream's time; events are over as soon as they are recorded, or as
    ``late`` batches have followed."""

    def __init__(self, late: int = 0) -> None:
        self.now = 0.0
        self.late = late
        self.recorded = 0

    def new_timer(self) -> "Mark":
        return Mark(self)


class Mark:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def record(self) -> None:
        self.at = self._clock.now
        self._clock.recorded += 1
        self.number = self._clock.recorded

    def query(self) -> bool:
        return self._clock.recorded >= self.number + 2 * self._clock.late

    def elapsed_time(self, end: "Mark") -> float:
        assert end.at >= self.at
        return end.at - self.at


def run(
    wait_of: Callable[[int], float], batches: int = 200, late: int = 0
) -> list[int]:
    """Budgets batch by batch, where training takes 10 ms a batch and waits as long as
    ``wait_of`` the budget says."""
    clock = Clock(late)
    budget = SmBudget(clock.new_timer)
    seen = []
    for _ in range(batches):
        before = budget.waiting()
        clock.now += wait_of(budget.sms)
        budget.waited(before)
        seen.append(budget.sms)
        clock.now += 10.0
    return seen


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize(
    ("wait_of", "settles"),
    [
        (lambda sms: 0.0, 4),
        (lambda sms: 9.0, 32),
        (lambda sms: 0.0 if sms >= 8 else 5.0, 8),
        (lambda sms: 0.0 if sms >= 32 else 5.0, 32),
        (lambda sms: 0.5, 16),  # neither much nor nothing: as it is
        (lambda sms: 0.09, 4),
        (lambda sms: 0.12, 16),
        (lambda sms: 0.86, 16),
        (lambda sms: 0.88, 32),
    ],
)
def test_it_settles(wait_of: Callable[[int], float], settles: int, late: int) -> None:
    seen = run(wait_of, late=late)
    assert seen[0] == 16
    assert set(seen[100:]) == {settles}


def test_batches_of_the_budget_before_do_not_count() -> None:
    """A slow stretch behind each change is the old budget's."""
    since = {"sms": 16, "batches": 9}

    def wait_of(sms: int) -> float:
        if since["sms"] != sms:
            since.update(sms=sms, batches=0)
        since["batches"] += 1
        return 50.0 if since["batches"] <= 2 else 0.0

    assert run(wait_of)[-1] == 4
