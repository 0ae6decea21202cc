"""The search beside training finds what one on the thread finds, for less time."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.jsonfile import decode, dumps
from ssdtrain.plan.calibrate import Corrections, corrected
from ssdtrain.plan.choose import QUICK_MARKS, choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import PredictedStall, Prediction
from ssdtrain.plan.profile import PROFILE_FILE, HostCost, HostCosts, Profile
from ssdtrain.plan.scaled import Growth, as_observed, scaled
from ssdtrain.plan.search import Answer, Request, Search, answer_of, answers
from tests.ranks import LONGEST_S

LONG = Path(__file__).parent / "recorded" / "h200_qwen3_4b_12_layers.json"
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


def recorded() -> Profile:
    for path in RECORDED:
        try:
            return PROFILE_FILE.read(path)
        except ValueError:
            continue
    raise AssertionError("no recorded profile")


EFFORTS = 2_000, 20_000


def asked(goal: Goal) -> Request:
    return Request(profile=recorded(), goal=goal, efforts=EFFORTS)


def prediction(step_ms: float, peak_bytes: int) -> Prediction:
    return Prediction(
        step_ms=step_ms,
        peak_bytes=peak_bytes,
        stall_ms=0.0,
        recompute_ms=0.0,
        keep_ms=100.0,
        keep_peak_bytes=1000,
    )


def all_of(search: Search) -> list[Answer]:
    found = []
    end = time.monotonic() + LONGEST_S
    while not search.is_over:
        assert time.monotonic() < end
        answer = search.answer()
        if answer is not None:
            found.append(answer)
        else:
            time.sleep(0.01)
    assert search.clear(wait=True) and not search.folder.exists()
    return found


def test_the_same_plans_as_here() -> None:
    request = asked(Goal(max_overhead=0.05))
    search = Search(request)
    found = all_of(search)
    assert found == list(answers(request))
    assert found[0].plan == choose(request.profile, request.goal, EFFORTS[0])
    assert not search.error


def test_what_was_measured_since_counts() -> None:
    """Prices and sizes are corrected where there is time for it."""
    costs = HostCosts(keep=HostCost(pack_ms=1.0))
    corrections = Corrections(plain=(300.0, 110.0, 100.0, 1.0), host_costs=costs)
    profile = PROFILE_FILE.read(LONG)
    goal = Goal(memory_budget_bytes=8 << 30)
    request = Request(
        profile=profile, goal=goal, corrections=corrections, ratio=1.25, efforts=(5000,)
    )
    (found,) = answers(request)
    right = corrected(profile, corrections)
    larger = choose(scaled(right, 1.25), goal, 5_000)
    assert found.plan == as_observed(larger, right)
    assert right.host_costs == costs and right.notes["plain_step_ms"] == "300.000"


def test_plans_for_smaller_batches_come_behind_the_others() -> None:
    """Each for its own size, and in the observed one's; where none fits, the next one
    comes all the same."""
    goal = Goal(memory_budget_bytes=8 << 30)
    profile = PROFILE_FILE.read(LONG)
    growth = Growth(fixed=(profile.kinds["model/0"][0].name,))
    request = Request(
        profile=profile, goal=goal, growth=growth, efforts=(), smaller=(0.6, 9.0, 0.3)
    )
    search = Search(request)
    found = all_of(search)
    assert found == list(answers(request)) and len(found) == request.num_answers
    smaller, none, least = found
    own = choose(scaled(profile, 0.6, growth), goal, QUICK_MARKS)
    assert smaller.plan == as_observed(own, profile) and not smaller.plan.keeps_all
    assert none.error and none.plan is None
    assert least.plan is not None and least.plan.keeps_all


def test_a_plan_that_is_as_good_stays() -> None:
    request = asked(Goal(max_overhead=0.05))
    best = next(answers(request))  # the longer search finds none better here
    assert best.plan is not None and not best.stays
    search = Search(replace(request, plan=best.plan))
    for answer in all_of(search):
        assert answer.stays and answer.plan is not None
        assert not answer.plan.orders
        assert answer.plan.prediction == best.plan.prediction
    worse = choose(request.profile, Goal(max_overhead=0.0), 1)
    first, _ = answers(replace(request, plan=worse))
    assert not first.stays


def test_a_request_is_written_at_once() -> None:
    """All of it, before the process that reads it starts."""
    request = asked(Goal(max_overhead=0.05))
    search = Search(request)
    text = (search.folder / "request.json").read_text("utf-8")
    assert decode(Request, json.loads(text)) == request
    search.stop()
    assert search.clear(wait=True)


def test_an_answer_is_read_at_once() -> None:
    """When it is there, and in order; its text is for the other ranks."""
    request = asked(Goal(max_overhead=0.05))
    search = Search(request)
    texts = []
    end = time.monotonic() + LONGEST_S
    while not search.is_over:
        assert time.monotonic() < end
        there = [(search.folder / f"{n}.json").exists() for n in range(len(EFFORTS))]
        answer = search.answer()
        assert answer is not None or not there[len(texts)]
        if answer is None:
            time.sleep(0.002)
        else:
            assert answer_of(search.text) == answer
            texts.append(search.text)
    assert [answer_of(text) for text in texts] == list(answers(request))
    assert search.clear(wait=True)


def test_waits_are_read_with_the_orders() -> None:
    """A prediction has waits of its own, which are no orders."""
    (found,) = answers(replace(asked(Goal()), efforts=(50,)))
    assert found.plan is not None and found.plan.prediction is not None
    stalls = (
        PredictedStall(lane=0, item=3, ms=1.0),
        PredictedStall(lane=0, item=4, ms=0.5),
    )
    prediction = replace(found.plan.prediction, stalls=stalls, host_stalls=stalls[:1])
    answer = Answer(plan=replace(found.plan, prediction=prediction))
    assert answer_of(dumps(answer)) == answer


def test_why_there_is_no_plan() -> None:
    for answer in all_of(Search(asked(Goal(memory_budget_bytes=1)))):
        assert answer.plan is None
        assert "memory_budget=1 cannot be reached" in answer.error


def test_a_search_that_dies_says_so() -> None:
    """Its request cannot be read."""
    request = asked(Goal())
    search = Search(replace(request, efforts=("many",)))  # type: ignore[arg-type]
    assert all_of(search) == []
    assert search.is_over and "efforts" in search.error


def test_a_search_can_be_given_up() -> None:
    search = Search(asked(Goal()))
    folder = search.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    search.answer()
    search.stop()
    search.stop()
    assert search.is_over and search.answer() is None
    assert search.clear(wait=True) and search.clear() and not folder.exists()


def test_its_process_loads_no_torch() -> None:
    code = "import sys, ssdtrain.plan.search; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONGEST_S)


@pytest.mark.parametrize("overhead", [0.01, 0.1])
def test_a_quick_plan_keeps_the_goal(overhead: float) -> None:
    profile = recorded()
    quick = choose(profile, Goal(max_overhead=overhead), QUICK_MARKS).prediction
    best = choose(profile, Goal(max_overhead=overhead)).prediction
    assert quick is not None and best is not None
    assert quick.step_ms <= (1 + overhead) * quick.keep_ms
    assert best.peak_bytes <= quick.peak_bytes <= quick.keep_peak_bytes


def test_a_quick_search_of_a_long_step_looks_everywhere() -> None:
    """Twelve layers of a 4B model: recipes, regions and moves together. The profile is
    an H200's, but for its host, which it took for as late as the device."""
    profile = PROFILE_FILE.read(LONG)
    marks = tuple(replace(mark, host_ms=mark.host_ms / 2) for mark in profile.marks)
    found = choose(replace(profile, marks=marks), Goal(max_overhead=0.1), QUICK_MARKS)
    assert found.prediction is not None
    assert found.prediction.step_ms <= 1.1 * found.prediction.keep_ms
    assert found.prediction.peak_bytes < 0.4 * found.prediction.keep_peak_bytes
