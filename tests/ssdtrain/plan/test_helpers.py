"""Helpers change when a search is over, and never what it finds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssdtrain.plan import helpers
from ssdtrain.plan.helpers import Helpers
from tests.ranks import LONGEST_S

ROOT = Path(__file__).resolve().parents[3]

SEARCHES = """
from dataclasses import replace
from pathlib import Path
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.outcomes import Outcomes
from ssdtrain.plan.profile import PROFILE_FILE
from ssdtrain.plan.timeline import Timeline

profile = PROFILE_FILE.read(
    Path("tests/ssdtrain/plan/recorded/h200_qwen3_4b_12_layers.json")
)
again = replace(profile, notes={**profile.notes, "recompute": "regions"})
for case, goal in (
    (profile, Goal()),
    (profile, Goal(max_overhead=0.1)),
    (profile, Goal(memory_budget_bytes=5 * 10**9)),
    (again, Goal(max_overhead=0.4)),
):
    marks = 125_000, 180_000
    alone = [choose(case, goal, each) for each in marks]
    for count in (0, 2):
        outcomes = Outcomes(Timeline(case), count)
        assert [choose(case, goal, each, outcomes) for each in marks] == alone
"""


def test_the_same_plans_with_any_number_of_them() -> None:
    """And where several searches of one profile share what they simulated. In a process
    of its own, as it has to have one thread."""
    subprocess.run([sys.executable, "-c", SEARCHES], check=True, cwd=ROOT)


def run(code: str) -> str:
    head = "import os, time\nfrom ssdtrain.plan.helpers import Helpers\n"
    told = subprocess.run(
        [sys.executable, "-c", head + code],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert not told.stderr
    return told.stdout


def test_what_one_works_on_is_waited_for_and_nothing_else() -> None:
    code = """
found = []
with Helpers(lambda task: (task, os.getpid()), found.append, 2) as helpers:
    helpers.ask(range(4))
    helpers.ask([])
    for task in range(4):
        helpers.settle(task)
    assert sorted(task for task, _ in found) == [0, 1, 2, 3], found
    assert os.getpid() not in {pid for _, pid in found}
    helpers.settle(4)  # nobody works on it: it is done here
    helpers.ask([4, 5])
    helpers.settle(5)
    assert sorted(task for task, _ in found) == [0, 1, 2, 3, 5]
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child is left")
"""
    assert run(code) == "no child is left\n"


def test_one_that_dies_is_done_without() -> None:
    code = """
found = []
with Helpers(lambda task: os._exit(1) if task == 1 else task, found.append, 2) as them:
    them.ask(range(6))
    for task in range(6):
        them.settle(task)
    assert 1 not in found and len(set(found)) == len(found)
    them.ask([7])
    them.settle(7)
    assert found[-1] == 7
with Helpers(lambda task: 1 / task, found.append, 1) as them:
    them.ask([0])
    them.settle(0)
    them.ask([1])
    them.settle(1)
"""
    assert run(code) == ""


@pytest.mark.parametrize("num_forks", [0, 1])
def test_as_many_as_may_be_had(num_forks: int) -> None:
    """A limit of processes ends no search."""
    code = f"""
fork, left = os.fork, [None] * {num_forks}
def limited():
    if not left:
        raise BlockingIOError(11, "no more processes")
    left.pop()
    return fork()
os.fork = limited
num_files = len(os.listdir("/proc/self/fd"))
found = []
with Helpers(lambda task: task, found.append, 3) as them:
    assert them.num_tasks == 2 * {num_forks}
    them.ask(range(3))
    for task in range(3):
        them.settle(task)
assert len(os.listdir("/proc/self/fd")) == num_files
"""
    assert run(code) == ""


def test_they_end_with_a_parent_that_is_killed() -> None:
    code = """
import sys
with Helpers(lambda task: os.getpid(), lambda pid: print(pid, flush=True), 3) as them:
    them.ask(range(6))
    for task in range(6):
        them.settle(task)
    print("all", flush=True)
    sys.stdin.read()
"""
    head = "import os\nfrom ssdtrain.plan.helpers import Helpers\n"
    parent = subprocess.Popen(
        [sys.executable, "-c", head + code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = {int(line) for line in iter(parent.stdout.readline, "all\n")}
    assert len(pids) == 3
    parent.send_signal(signal.SIGKILL)
    # Whoever waits for its standard error does not wait for them.
    parent.communicate(timeout=LONGEST_S)
    end = time.monotonic() + LONGEST_S
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_training_keeps_most_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 0), (2, 0), (5, 0), (6, 1), (16, 4), (64, 6)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert helpers.num_helpers() == expected


def test_none_are_asked_nothing() -> None:
    with Helpers(lambda task: task, lambda _: None, 0) as none:
        none.ask([1])
        none.settle(1)
        assert none.num_tasks == 0
