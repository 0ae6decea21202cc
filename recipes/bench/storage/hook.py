"""The malloc hook in training: the same steps with it and without, in turns.

Sides of one allocator start together (imports and the first steps overlap) and are then
timed one at a time: each waits on its stdin while another trains, so all see the same
clocks. The caching allocator has two processes a side: what two processes *without* the
hook differ by is written beside the ratio, since no smaller difference means anything.
"""

import json
import selectors
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipes.bench.harness.cells import Cells
from recipes.bench.harness.processes import child_environment, command_of
from ssdtrain.storage import malloc_hook

ALLOCATORS = {
    "caching": "expandable_segments:False",
    "async": "backend:cudaMallocAsync",
    "expandable": "expandable_segments:True",
}
REST = ("async", "expandable")
STEPS_A_TURN = 6
"""The first of them is not counted: the GPU comes from another process."""
START_S = 45
CLOSE_S = 2
SAID = (
    "calls_in_timed_steps",
    "segments",
    "counters",
    "coverage",
    "allocated_bytes",
    "moved_bytes",
)


class SideFailed(Exception):
    """A training process ended, or did not answer in time; the text has its words."""


class Side:
    """One training process.

    Args:
        name: `with` or `without`, and a number.
        environment: of the process.
        log: its stderr.
    """

    def __init__(self, name: str, environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.losses: list[str] = []
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command_of("storage.hook_train"),
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    @property
    def hooked(self) -> bool:
        """Whether the hook was preloaded."""
        return self.name.startswith("with ")

    def ready(self, timeout_s: float) -> None:
        """Wait for the warm-up's answer."""
        self.losses += self._answer(timeout_s)["losses"]

    def turn(self, timeout_s: float) -> float:
        """Median ms of a step of one turn."""
        said = self._ask(f"steps {STEPS_A_TURN}", timeout_s)
        self.losses += said["losses"]
        return statistics.median(said["ms"][1:])

    def end(self, timeout_s: float) -> dict[str, Any]:
        """What it counted."""
        return self._ask("end", timeout_s)

    def stop(self) -> None:
        """Idempotent; no process is left."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def _ask(self, line: str, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideFailed(self._words("is gone")) from None
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, timeout_s)):
                raise SideFailed(self._words(f"said nothing for {timeout_s:.0f} s"))
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(self._words("ended"))
        return dict(json.loads(line))

    def _words(self, what: str) -> str:
        return f"{self.name} {what}: {self._log.read_text()[-1200:]}"


def environment_of(hook: Path | None, allocator: str) -> dict[str, str]:
    """Of a side; `hook` None: without it."""
    environment = {
        **child_environment(),
        "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator],
        "PYTORCH_ALLOC_CONF": ALLOCATORS[allocator],
        "SSDTRAIN_HOOK_MIN_BYTES": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "2",
    }
    return environment if hook is None else malloc_hook.preload(environment, hook)


class Match:
    """Both sides under one allocator."""

    def __init__(self, hook: Path, allocator: str, num_each: int, place: Path) -> None:
        self.allocator = allocator
        self.turns: list[dict[str, float]] = []
        self.ends: dict[str, dict[str, Any]] = {}
        self.error: str | None = None
        self.sides: list[Side] = []
        for number in range(num_each):
            for what, preloaded in (("without", None), ("with", hook)):
                name = f"{what} {number}"
                log = place / f"{allocator} {name}.log"
                side = Side(name, environment_of(preloaded, allocator), log)
                self.sides.append(side)

    def begin(self, timeout_s: float) -> None:
        """Wait until every side has warmed up."""
        end = time.monotonic() + timeout_s
        try:
            for side in self.sides:
                side.ready(end - time.monotonic())
        except SideFailed as failed:
            self.error = str(failed)

    def run(
        self, num_turns: int, left_s: Callable[[], float], save: Callable[[], None]
    ) -> None:
        """Turns while there is time; what fails is this match's result."""
        if self.error is not None:
            return
        try:
            for _ in range(num_turns):
                if left_s() < CLOSE_S:
                    break
                even = len(self.turns) % 2 == 0
                order = self.sides if even else self.sides[::-1]
                self.turns.append({side.name: side.turn(START_S) for side in order})
                save()
            for side in self.sides:
                self.ends[side.name] = side.end(START_S)
        except SideFailed as failed:
            self.error = str(failed)
        finally:
            self.stop()

    def stop(self) -> None:
        """No process is left."""
        for side in self.sides:
            side.stop()

    def cell(self) -> dict[str, Any]:
        """All that is known so far."""
        known = min(len(side.losses) for side in self.sides)
        first = self.sides[0].losses[:known]
        cell: dict[str, Any] = {
            "what": "hook",
            "allocator": self.allocator,
            "num_losses": known,
            "losses_equal": known > 0
            and all(side.losses[:known] == first for side in self.sides),
            "turns": len(self.turns),
        }
        if self.turns:
            cell |= self._times()
        hooked = [
            self.ends[s.name] for s in self.sides if s.hooked and s.name in self.ends
        ]
        if hooked:
            cell |= {key: hooked[-1][key] for key in SAID}
        if self.error is not None:
            cell["error"] = self.error
        return cell

    def _times(self) -> dict[str, Any]:
        """Ratios turn by turn, so that clocks that drift cancel."""
        groups: dict[bool, list[str]] = {False: [], True: []}
        for side in self.sides:
            groups[side.hooked].append(side.name)
        without, hooked = groups[False], groups[True]

        def ratio(above: list[str], below: list[str]) -> float:
            mean = statistics.fmean
            found = [
                mean(t[name] for name in above) / mean(t[name] for name in below)
                for t in self.turns
            ]
            return round(statistics.median(found), 4)

        times: dict[str, Any] = {
            "step_ratio": ratio(hooked, without),
            "step_ms": {
                side.name: round(statistics.median(t[side.name] for t in self.turns), 3)
                for side in self.sides
            },
        }
        if len(without) > 1:
            times["ratio_without_hook"] = ratio(without[1:], without[:1])
        return times


def hook_part(record: Cells, hook: Path, place: Path, num_turns: int) -> None:
    """The caching allocator alone, then the two others; saved after every turn."""
    for names, reserve_s in ((("caching",), 0.4 * record.left_s()), (REST, 0.0)):
        if record.left_s() < 2 * CLOSE_S:
            break
        matches: list[Match] = []

        def left_s(reserve_s: float = reserve_s) -> float:
            return record.left_s() - reserve_s

        try:
            for name in names:
                num_each = 2 if name == "caching" else 1
                matches.append(Match(hook, name, num_each, place))
            for match in matches:
                match.begin(min(START_S, record.left_s()))
            for match in matches:
                turns = num_turns if len(match.sides) > 2 else num_turns // 2

                def save(match: Match = match) -> None:
                    record.fact("unfinished", match.cell())

                match.run(turns, left_s, save)
                record.add(**match.cell())
                record.fact("unfinished", None)
        finally:
            for match in matches:
                match.stop()
