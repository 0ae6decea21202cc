"""Multiprocessors for fetching follow what training waits, on a clock of the test."""

from collections.abc import Callable

import pytest
import torch

from pydirect.budget import SmBudget
from pydirect.loader import BudgetedFetch


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


def measure(
    budget: SmBudget, clock: Clock, ns_of: Callable[[int], float], gathers: int = 14
) -> list[int]:
    """The budgets of the first gathers, of a thousand rows each."""
    seen = []
    for _ in range(gathers):
        sms = budget.gathering()
        before = budget.waiting()
        clock.now += ns_of(sms) * 1000 / 1e6
        budget.gathered(before, sms, 1000)
        seen.append(sms)
    return seen


def run(
    wait_of: Callable[[int], float], batches: int = 200, late: int = 0
) -> list[int]:
    """Budgets batch by batch, where training takes 10 ms a batch and waits as long as
    ``wait_of`` the budget says. Gathers were found to be faster the more
    multiprocessors they had."""
    clock = Clock()
    budget = SmBudget(clock.new_timer)
    measure(budget, clock, lambda sms: 100 / sms)
    assert (budget.tries, budget.sms) == (False, 32)
    clock.late = late
    budget.sms = 16
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


@pytest.mark.parametrize(
    ("ns_of", "fills"),
    [
        (lambda sms: 5.0, 4),
        (lambda sms: 80 / sms, 32),
        (lambda sms: max(5.0, 40 / sms), 8),
        (lambda sms: 5.0 if sms >= 16 else 5.2, 4),  # a twentieth is nothing
        (lambda sms: 5.0 if sms >= 16 else 5.3, 16),
        (lambda sms: 9.0 if sms > 8 else 5.0, 4),  # more may be slower
    ],
)
def test_the_first_gathers_are_measured(
    ns_of: Callable[[int], float], fills: int
) -> None:
    clock = Clock()
    budget = SmBudget(clock.new_timer)
    assert str(budget) == "max_sms 16 (first gathers)"
    seen = measure(budget, clock, ns_of)
    assert seen == [16, 16, *[32, 16, 8, 4] * 3]
    assert not budget.tries and budget.sms == fills
    assert budget.gathering() == fills
    for sms in (32, 16, 8, 4):
        assert budget.gather_ns[sms] == pytest.approx(ns_of(sms))
    before = budget.gather_ns
    measure(budget, clock, lambda sms: 1.0)
    assert budget.gather_ns is before
    told = str(budget).splitlines()
    assert told[0] == f"max_sms {fills} (measured)"
    assert told[1] == f"    4 multiprocessors: {ns_of(4):.2f} ns a row"


def test_setting_up_and_slow_samples_do_not_count() -> None:
    """The first two gathers, and all but the fastest of a budget."""
    clock = Clock()
    budget = SmBudget(clock.new_timer)
    calls = iter([900.0, 900.0, *[50.0] * 4, *[5.0] * 4, *[70.0] * 4])
    measure(budget, clock, lambda sms: next(calls))
    assert budget.sms == 4
    assert list(budget.gather_ns.values()) == pytest.approx([5.0] * 4)


def test_training_counts_from_then_on_and_never_takes_more() -> None:
    """What is waited while gathers are tried says nothing; what fills the link is the
    most that waiting may ask for."""
    clock = Clock()
    budget = SmBudget(clock.new_timer)

    def train(waits: float) -> None:
        for _ in range(40):
            before = budget.waiting()
            clock.now += waits
            budget.waited(before)
            clock.now += 10.0

    train(9.0)
    assert budget.sms == 16 and budget.waited_share == {}
    measure(budget, clock, lambda sms: 5.0 if sms >= 8 else 9.0)
    train(9.0)
    assert budget.sms == 8
    assert budget.waited_share == {8: pytest.approx(9 / 19)}
    assert (
        str(budget).splitlines()[-1] == "    8 multiprocessors: training waited 47.4%"
    )
    train(0.0)
    assert budget.sms == 4


def test_a_fetch_has_the_budget_of_its_gather() -> None:
    clock = Clock()
    budget = SmBudget(clock.new_timer)
    asked = []

    class Rows:
        uses_cpu, max_sms = False, None

        def rows(self, node_ids: torch.Tensor, slot: int) -> torch.Tensor:
            asked.append((self.max_sms, slot))
            clock.now += 40 / min(self.max_sms, 16)
            return node_ids + 1

    fetch = BudgetedFetch(Rows(), budget)
    assert not fetch.uses_cpu
    for slot in range(16):
        got = fetch.rows(torch.arange(5), slot)
        assert torch.equal(got, torch.arange(1, 6))
        assert fetch.max_sms == asked[-1][0]
    sms = [16, 16, *[32, 16, 8, 4] * 3, 16, 16]
    assert asked == list(zip(sms, range(16), strict=True))


def test_times_that_have_not_arrived_are_waited_for_by_nobody() -> None:
    clock = Clock(late=1000)
    budget = SmBudget(clock.new_timer)
    measure(budget, clock, lambda sms: 5.0, gathers=30)
    assert budget.tries and budget.sms == 16
    clock.late = 0
    measure(budget, clock, lambda sms: 5.0, gathers=1)
    assert not budget.tries and budget.sms == 4
