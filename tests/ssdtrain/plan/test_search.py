"""The search beside training finds what a search on the thread finds."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.plan.choose import QUICK_MARKS, choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.profile import PROFILE_FILE, Profile
from ssdtrain.plan.search import Search
from tests.ranks import LONGEST_S

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


def recorded() -> Profile:
    for path in RECORDED:
        try:
            return PROFILE_FILE.read(path)
        except ValueError:
            continue
    raise AssertionError("no recorded profile")


def test_the_same_plan_as_here() -> None:
    profile, goal = recorded(), Goal(max_overhead=0.05)
    search = Search(profile, goal)
    assert search.take() == choose(profile, goal)


def test_a_plan_that_is_found_quickly_comes_first() -> None:
    profile, goal = recorded(), Goal(max_overhead=0.05)
    search = Search(profile, goal)
    quick = None
    while quick is None and search.is_running:
        quick = search.take_quick()
        time.sleep(0.01)
    assert (quick or search.take_quick()) == choose(profile, goal, QUICK_MARKS)
    assert search.take_quick() is None
    search.stop()


def test_why_there_is_no_plan() -> None:
    search = Search(recorded(), Goal(memory_budget_bytes=1))
    assert search.take() is None
    assert search.is_impossible
    assert "memory_budget_bytes=1 cannot be reached" in search.error


def test_a_search_can_be_given_up() -> None:
    search = Search(recorded(), Goal())
    folder = search.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    search.stop()
    search.stop()
    assert not folder.exists() and not search.is_running


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
    profile = PROFILE_FILE.read(
        Path(__file__).parent / "recorded" / "h200_qwen3_4b_12_layers.json"
    )
    marks = tuple(replace(mark, host_ms=mark.host_ms / 2) for mark in profile.marks)
    found = choose(replace(profile, marks=marks), Goal(max_overhead=0.1), QUICK_MARKS)
    assert found.prediction is not None
    assert found.prediction.step_ms <= 1.1 * found.prediction.keep_ms
    assert found.prediction.peak_bytes < 0.4 * found.prediction.keep_peak_bytes
