"""The search for a plan: who searches, who takes what, and when."""

import time
from typing import Any

import pytest

from ssdtrain.observe import searching
from ssdtrain.observe.searching import Searching
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.choose import QUICK_MARKS
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.search import Answer, Request, Search
from tests.ranks import LONGEST_S
from tests.ssdtrain.observe.parts import Device
from tests.ssdtrain.plan.profiles import MB, chain

PROFILE = chain(12)
REQUEST = Request(profile=PROFILE, goal=Goal(memory_budget_bytes=8 * MB))


class Ranks(Peers):
    """What one rank offers, the other takes."""

    is_alone = leads = False

    def __init__(self, told: list[str], *, leads: bool) -> None:
        self.leads = leads
        self._told = told
        self._num_taken = 0

    def offer(self, answer: str) -> None:
        self._told.append(answer)

    def offered(self) -> str | None:
        if self._num_taken == len(self._told):
            return None
        self._num_taken += 1
        return self._told[self._num_taken - 1]


def on(peers: Any = None, *, beside: bool = True) -> Searching:
    device: Any = Device(runs_beside=beside)
    return Searching(device, peers or Peers())


def answered(own: Searching, *, has_plan: bool = False) -> Answer:
    """The next answer; the search's process takes as long as it takes."""
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        answer = own.answer(has_plan=has_plan)
        if answer is not None:
            return answer
        time.sleep(0.002)
    raise AssertionError("no answer")


class Failing(Search):
    """Its process never says anything."""

    def answer(self) -> Answer | None:
        self.stop()
        self.error = "it failed"
        return None


@pytest.mark.parametrize("has_plan", [False, True])
def test_a_search_that_fails_is_made_up_for_where_there_is_no_plan(
    monkeypatch: pytest.MonkeyPatch, has_plan: bool
) -> None:
    monkeypatch.setattr(searching, "Search", Failing)
    efforts: list[tuple[int, ...]] = []
    answers = searching.answers

    def asked(request: Request) -> Any:
        efforts.append(request.efforts)
        return answers(request)

    monkeypatch.setattr(searching, "answers", asked)
    told: list[str] = []
    own, other = on(Ranks(told, leads=True)), on(Ranks(told, leads=False))
    own.begin(REQUEST, QUICK_MARKS)
    other.begin(REQUEST, QUICK_MARKS)
    assert other.answer(has_plan=has_plan) is None and other.is_under_way
    answer = own.answer(has_plan=has_plan)
    assert answer is not None and not own.is_under_way
    assert len(efforts) == (0 if has_plan else 1) and len(told) == 1
    assert answered(other) == answer and not other.is_under_way
    assert has_plan == bool(answer.error) == (answer.plan is None)
    own.clear()
