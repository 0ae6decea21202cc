"""The search for a plan, in a process of its own.

    python -m ssdtrain.plan.search REQUEST QUICK ANSWER

A search takes seconds, and a thread of the training process would take the interpreter
from the hooks again and again. So the profile is written to a file, another process
reads it, searches, and writes two plans: one that it finds quickly, and the best that
it finds. It imports no torch.
(tests/ssdtrain/plan/test_search.py)
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ssdtrain.errors import ConfigError, DamagedFileError
from ssdtrain.jsonfile import Format
from ssdtrain.plan.choose import QUICK_MARKS, choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import PLAN_FILE, Plan
from ssdtrain.plan.profile import Profile

NICENESS = 10
"""The training process goes first."""
IMPOSSIBLE = 3
"""What the process ends with if no plan reaches the goal."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is searched for."""

    profile: Profile
    goal: Goal


REQUEST_FILE = Format(
    kind=Request,
    schema="ssdtrain-search",
    version=1,
    what="a search's request",
    remedy="observe again",
)


class Search:
    """One search that runs beside training. Poll it at step boundaries."""

    def __init__(self, profile: Profile, goal: Goal) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ssdtrain-")  # mode 0700
        self.folder = Path(self._directory.name)
        """Private to the user; gone when the search is over."""
        self._answer = self.folder / "plan.json"
        self._quick: Path | None = self.folder / "quick.json"
        request = self.folder / "request.json"
        REQUEST_FILE.write(request, Request(profile=profile, goal=goal))
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", __spec__.name),
                *map(str, (request, self._quick, self._answer)),
            ],
            cwd=self.folder,  # `-m` puts it before all other paths
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._pid = os.getpid()
        self.error = ""
        """Why there is no plan, once the search has ended without one."""
        self.is_impossible = False
        """Whether it ended without a plan because no plan reaches the goal."""

    @property
    def is_running(self) -> bool:
        """Whether it is still searching."""
        return self._process.poll() is None

    def take_quick(self) -> Plan | None:
        """Return the plan that was found quickly; None before, and after it was
        taken."""
        if self._quick is None or not self._quick.exists():
            return None
        found, self._quick = PLAN_FILE.read(self._quick), None
        return found

    def take(self) -> Plan | None:
        """Wait for the end; the plan, or None, and `error`, if it found none."""
        _, told = self._process.communicate()
        plan = None
        if self._process.returncode == 0:
            try:
                plan = PLAN_FILE.read(self._answer)
            except (OSError, DamagedFileError) as error:
                self.error = str(error)
        else:
            lines = told.decode(errors="replace").strip().splitlines()
            self.error = lines[-1] if lines else f"exit {self._process.returncode}"
            self.is_impossible = self._process.returncode == IMPOSSIBLE
        self._directory.cleanup()
        return plan

    def stop(self) -> None:
        """End the search and its process. Idempotent."""
        if self._process.stderr is None or self._process.stderr.closed:
            return
        if os.getpid() != self._pid:  # a fork of the process that searches
            return
        self._process.kill()
        self._process.communicate()
        self._directory.cleanup()


def main(arguments: list[str]) -> int:
    """Read a request, write the plans."""
    os.nice(NICENESS)
    request, quick, answer = arguments
    asked = REQUEST_FILE.read(request)
    with contextlib.suppress(ConfigError):
        PLAN_FILE.write(quick, choose(asked.profile, asked.goal, QUICK_MARKS))
    try:
        PLAN_FILE.write(answer, choose(asked.profile, asked.goal))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return IMPOSSIBLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
