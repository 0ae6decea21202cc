"""The search for a plan, in a process of its own.

    python -m ssdtrain.plan.search REQUEST ANSWER...

A search takes seconds, and a thread of the training process would take the interpreter
from the hooks again and again. So the profile is written to a file, another process
reads it, searches, and writes answers: one that it finds quickly, and the best that it
finds. It imports no torch.

[Note: the training thread's part]
All that depends on how long a step is happens in that process: prices are corrected,
plans are searched for, and compared with the plan in force. Profiles and plans have
thousands of parts, so they are written and read over several steps: `Search.advance`
handles some of them in each, until its turn is over.

[Note: searched for smaller batches]
A search of one size may miss what that of a larger one has found: of two sizes of a
recorded step that are 4 % apart the smaller one was given a plan that costs 6 %, and
the larger one a plan that costs 2 %. So the largest size comes first, and what it was
given is a candidate for those below, as is the plan in force. A size for which the next
larger one's plan is the best has none of its own: each one more is another table.
(tests/ssdtrain/plan/test_search.py)
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.forks import Owner
from ssdtrain.jsonfile import Natural, Positive, decode, extend, in_parts, joined
from ssdtrain.plan.calibrate import Corrections, corrected
from ssdtrain.plan.choose import QUICK_MARKS, SEARCH_MARKS, choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.outcomes import Outcomes
from ssdtrain.plan.plan import Order, Plan, Prediction
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.scaled import Growth, as_observed, scaled
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline

GAIN = 0.01
"""A new plan must be better by this fraction."""
NICENESS = 10
"""The training process goes first."""
PART = 128
"""Items, marks or orders that are written or read at once: about a millisecond."""
OF_ORDERS = '[["plan", "orders", '
"""How the lines of an answer begin that hold orders."""
TURN_S = 0.0045
"""The training thread begins no other part in a step after this time."""
TURN_SHARE = 0.005
"""Or after this share of the step, if that is longer: a plan comes no more steps late
where they are long."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is searched for."""

    profile: Profile
    """As it was observed."""
    goal: Goal
    corrections: Corrections = field(default_factory=Corrections)
    """To be made to the profile."""
    ratio: Positive = 1.0
    """Size of the batches to plan for, over the observed one's."""
    growth: Growth = field(default_factory=Growth)
    plan: Plan | None = None
    """In force, if it fits the profile: another one must be clearly better."""
    efforts: tuple[Natural, ...] = (QUICK_MARKS, SEARCH_MARKS)
    """How long to search for each answer, as `choose` says."""
    smaller: tuple[Positive, ...] = ()
    """Further sizes, the largest first; for each one answer. `plan` is for batches that
    are larger still."""
    smaller_effort: Natural = QUICK_MARKS
    """How long to search for each of these."""

    @property
    def num_answers(self) -> int:
        """How many there will be."""
        return len(self.efforts) + len(self.smaller)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found."""

    plan: Plan | None = None
    stays: bool = False
    """Whether `plan` is the one in force, with a new prediction and no orders."""
    error: str = ""
    """Why no plan that reaches the goal was found; there is none."""


def answers(request: Request) -> Iterator[Answer]:
    """Search, once with each effort. Each answer takes the plan that the one before
    leaves for the one in force. Then for smaller batches."""
    observed = corrected(request.profile, request.corrections)
    if request.efforts:
        yield from _answers(request, observed)
    yield from _smaller_answers(request, observed)


def _smaller_answers(request: Request, observed: Profile) -> Iterator[Answer]:
    """See [Note: searched for smaller batches]."""
    larger = [] if request.plan is None else [request.plan]
    for ratio in request.smaller:
        profile = scaled(observed, ratio, request.growth)
        outcomes = Outcomes(Timeline(profile))
        try:
            own = choose(profile, request.goal, request.smaller_effort, outcomes)
        except ConfigError as error:
            yield Answer(error=str(error))
            continue
        own = as_observed(own, observed)
        best = _best_for(profile, request.goal, [*larger, own])
        if larger and best is larger[-1]:
            yield Answer()  # they follow it anyway
            continue
        larger.append(best)
        yield Answer(plan=best)


def _best_for(profile: Profile, goal: Goal, plans: Sequence[Plan]) -> Plan:
    """Return the plan under which this step takes the least time, or of those that take
    hardly more the one that moves least: what copies cost is predicted, that there are
    some is sure. Of equal plans the first one counts."""
    limits = goal.most_bytes(profile), goal.easy_bytes(profile)
    most_bytes = min((each for each in limits if each is not None), default=math.inf)
    found = [as_observed(plan, profile).prediction for plan in plans]
    priced = [
        (plan, prediction)
        for plan, prediction in zip(plans, found, strict=True)
        if prediction is not None
        and prediction.peak_bytes <= most_bytes
        and goal.allows(prediction.links["ssd_write"].num_bytes, prediction.step_ms)
    ]
    least_ms = min((each.step_ms for _, each in priced), default=0.0)
    good = [(p, each) for p, each in priced if each.step_ms <= (1 + GAIN) * least_ms]
    best, _ = min(good, key=lambda each: _moved_bytes(each[1]), default=(plans[-1], 0))
    return best


def _moved_bytes(prediction: Prediction) -> int:
    return sum(prediction.links[way].num_bytes for way in ("d2h", "ssd_write"))


def _answers(request: Request, observed: Profile) -> Iterator[Answer]:
    profile = observed
    if request.ratio != 1.0:
        profile = scaled(observed, request.ratio, request.growth)
    outcomes = Outcomes(Timeline(profile))
    now = request.plan
    for effort in request.efforts:
        try:
            found = choose(profile, request.goal, effort, outcomes)
        except ConfigError as error:
            yield Answer(error=str(error))
            continue
        stays = now is not None and _keeps(profile, request.goal, now, found)
        if not stays or now is None:
            now = found
        told = now if profile is observed else as_observed(now, observed)
        if stays:
            prediction = simulate(Timeline(observed), now.orders)
            told = Plan(orders={}, policy=now.policy, prediction=prediction)
        yield Answer(plan=told, stays=stays)


def _keeps(profile: Profile, goal: Goal, old: Plan, new: Plan) -> bool:
    """Whether the old plan is as good as the new one, both priced on this profile."""
    priced = simulate(Timeline(profile), old.orders)
    if not goal.allows(priced.links["ssd_write"].num_bytes, priced.step_ms):
        return False
    fitting = goal.fitting_bytes(profile)
    if fitting is not None and priced.peak_bytes > fitting:
        return False
    if new.prediction is None:
        return False
    easy = goal.easy_bytes(profile)
    if easy is not None and priced.peak_bytes > easy:
        if new.prediction.peak_bytes < (1 - GAIN) * priced.peak_bytes:
            return False
    budget = goal.most_bytes(profile)
    limit = (1 + goal.max_overhead) * priced.keep_ms if budget is None else budget
    return not is_better(new.prediction, priced, budget is not None, limit)


def is_better(new: Prediction, old: Prediction, by_memory: bool, limit: float) -> bool:
    """Return whether a new plan should replace the one in force, both priced on one
    profile.

    Args:
        by_memory: the goal is least time within `limit` bytes; else least peak within
            `limit` ms.
    """
    if by_memory:
        if old.peak_bytes > limit:
            return True
        return new.step_ms < old.step_ms * (1 - GAIN)
    if old.step_ms > limit * (1 + GAIN):
        return True
    return new.peak_bytes < old.peak_bytes * (1 - GAIN)


def turn_of(profile: Profile) -> float:
    """Return the time that the training thread gives to a search in each step."""
    return max(TURN_S, TURN_SHARE * profile.compute_ms / 1e3)


class Reading:
    """Reads an answer over several steps, for a turn in each."""

    def __init__(
        self,
        text: str,
        clock: Callable[[], float] = time.perf_counter,
        turn_s: float = TURN_S,
    ) -> None:
        self.text = text
        self._clock = clock
        self._turn_s = turn_s
        first, *lines = text.splitlines()
        whole = json.loads(first)
        self._left: list[str] = []
        for line in reversed(lines):
            if line.startswith(OF_ORDERS):
                self._left.append(line)
            else:  # of the prediction: short
                extend(whole, *json.loads(line))
        self._answer: Answer = decode(Answer, whole)
        plan = self._answer.plan
        self._orders: dict[str, Any] = {} if plan is None else dict(plan.orders)

    def advance(self) -> Answer | None:
        """Read orders until the turn is over; the answer, once it is whole."""
        end = self._clock() + self._turn_s
        while self._left:
            (*_, kind), orders = json.loads(self._left.pop())
            self._orders[kind] += decode(tuple[Order, ...], orders)
            if self._clock() >= end:
                break
        if self._left:
            return None
        answer = self._answer
        if answer.plan is None:
            return answer
        return replace(answer, plan=replace(answer.plan, orders=self._orders))


class Search:
    """One search that runs beside training. `advance` it at step boundaries, and when
    it is over `clear` it."""

    def __init__(
        self, request: Request, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._turn_s = turn_of(request.profile)
        self._directory = tempfile.TemporaryDirectory(prefix="ssdtrain-")  # mode 0700
        self.folder = Path(self._directory.name)
        """Private to the user; gone when the search is over."""
        self._unsent: Iterator[str] | None = in_parts(request, PART)
        self._request = self.folder / "request.json"
        self._unread = [self.folder / f"{n}.json" for n in range(request.num_answers)]
        self.has_answered = False
        """Whether an answer has been read."""
        self._reading: Reading | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = Owner()
        self.text = ""
        """The last answer, for other ranks."""
        self.error = ""
        """Why there are fewer answers than there should be, once it is over."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return not self._unread and self._reading is None

    @property
    def is_sending(self) -> bool:
        """Whether parts of the request are left; its process does not run yet."""
        return self._unsent is not None

    def advance(self) -> Answer | None:
        """Do this step's part of the work: [Note: the training thread's part].

        Returns:
            An answer, when its last part has been read.
        """
        if self._unsent is not None:
            self._send(self._unsent)
        elif self._reading is not None or self._opens():
            return self._read()
        return None

    def _send(self, unsent: Iterator[str]) -> None:
        end = self._clock() + self._turn_s
        with self._request.open("a", encoding="utf-8") as file:
            for line in unsent:
                print(line, file=file)
                if self._clock() >= end:
                    return
        self._unsent = None
        self._start()

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        files = (self._request, *self._unread)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *map(str, files)],
            cwd=self.folder,  # `-m` puts it before all other paths
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )

    def _opens(self) -> bool:
        """Whether there is another answer. The process may have written two by now."""
        process = self._process
        if process is None or not self._unread:
            return False
        has_ended = process.poll() is not None
        next_one, *rest = self._unread
        if next_one.exists():
            text = next_one.read_text("utf-8")
            self._reading = Reading(text, self._clock, self._turn_s)
            self._unread = rest
            return True
        if has_ended:
            self._end(process)
        return False

    def _read(self) -> Answer | None:
        reading = self._reading
        answer = None if reading is None else reading.advance()
        if reading is not None and answer is not None:
            self._reading, self.text = None, reading.text
            self.has_answered = True
        return answer

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """It wrote less than it should have."""
        _, told = process.communicate()
        lines = told.decode(errors="replace").strip().splitlines()
        self.error = lines[-1] if lines else f"exit {process.returncode}"
        self._unread, self._process = [], None

    def stop(self) -> None:
        """Give the search up. Waits for nothing. Idempotent."""
        if self._owner.is_elsewhere:  # a fork of the process that searches
            return
        self._unsent, self._unread, self._reading = None, [], None
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def clear(self, *, wait: bool = False) -> bool:
        """Remove what a search that is over has left: a process that ends takes longer
        than a step may.

        Returns:
            Whether nothing is left; False while its process ends, unless `wait`.
        """
        if self._owner.is_elsewhere:
            return True
        process = self._process
        if process is not None:
            if not wait and process.poll() is None:
                return False
            process.communicate()
            self._process = None
        self._directory.cleanup()
        return True


def main(arguments: list[str]) -> int:
    """Read a request, write the answers."""
    os.nice(NICENESS)
    request, *files = map(Path, arguments)
    lines = request.read_text("utf-8").splitlines()
    asked: Request = decode(Request, joined(lines))
    found = answers(asked)
    for answer, file in zip(found, files, strict=True):
        draft = file.with_suffix(".draft")
        draft.write_text("\n".join(in_parts(answer, PART)), encoding="utf-8")
        draft.replace(file)  # whoever reads it sees all of it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
