"""The search for a plan, in a process of its own.

    python -m ssdtrain.plan.search REQUEST ANSWER...

A search takes seconds, and a thread of the training process would take the interpreter
from the hooks again and again. So the profile is written to a file, another process
reads it, searches, and writes answers: one that it finds quickly, and the best that it
finds. It imports no torch.

All that depends on how long a step is happens in that process: prices are corrected,
plans are searched for, and compared with the plan in force. The request is written, and
an answer read, at once: some 50 ms of one step each, where a plan is worth more in
every step after it.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ssdtrain.errors import ConfigError
from ssdtrain.forks import Owner
from ssdtrain.jsonfile import Natural, Positive, decode, dumps
from ssdtrain.plan.calibrate import Corrections, corrected
from ssdtrain.plan.choose import QUICK_MARKS, SEARCH_MARKS, choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.outcomes import Outcomes
from ssdtrain.plan.plan import Plan, Prediction
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.scaled import Growth, as_observed, scaled
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline

GAIN = 0.01
"""A new plan must be better by this fraction."""
NICENESS = 10
"""The training process goes first."""


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


def answer_of(text: str) -> Answer:
    """Return an answer that was written as JSON."""
    found: Answer = decode(Answer, json.loads(text))
    return found


class Search:
    """One search that runs during training. Ask it at step boundaries, and when it is
    over `clear` it."""

    def __init__(self, request: Request) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ssdtrain-")  # mode 0700
        self.folder = Path(self._directory.name)
        """Private to the user; gone when the search is over."""
        self._unread = [self.folder / f"{n}.json" for n in range(request.num_answers)]
        self._owner = Owner()
        self.text = ""
        """The last answer, for other ranks."""
        self.error = ""
        """Why there are fewer answers than there should be, once it is over."""
        written = self.folder / "request.json"
        written.write_text(dumps(request), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = self._start(written)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return not self._unread

    def answer(self) -> Answer | None:
        """Return the next answer, if it is there."""
        process = self._process
        if process is None or not self._unread:
            return None
        has_ended = process.poll() is not None
        next_one, *rest = self._unread
        if next_one.exists():
            self.text, self._unread = next_one.read_text("utf-8"), rest
            return answer_of(self.text)
        if has_ended:
            self._end(process)
        return None

    def _start(self, request: Path) -> "subprocess.Popen[bytes]":
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        files = (request, *self._unread)
        return subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *map(str, files)],
            cwd=self.folder,  # `-m` puts it before all other paths
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )

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
        self._unread = []
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
    asked: Request = decode(Request, json.loads(request.read_text("utf-8")))
    found = answers(asked)
    for answer, file in zip(found, files, strict=True):
        draft = file.with_suffix(".draft")
        draft.write_text(dumps(answer), encoding="utf-8")
        draft.replace(file)  # whoever reads it sees all of it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
