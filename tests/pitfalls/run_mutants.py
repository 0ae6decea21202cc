"""Puts each mutant into a copy of the packages and requires its named tests to fail.

The mutants are in `mutants.toml`: each is a known bug, brought back by text that takes
the place of an anchor.

    [reload_races_its_copy]
    pitfall = "reload races its own copy out (Megatron#7398)"
    killed_by = ["tests/pitfalls/test_order.py::test_a_load_waits_for_its_own_copy_out"]
    file = "ssdtrain/transfer/offloader.py"
    anchor = "after: list[Event] = [transfer.copied, *load.after]"
    replacement = "after: list[Event] = [*load.after]"

    python -m tests.pitfalls.run_mutants [NAME ...]

Every run is a fork of one process that has torch and pytest loaded: about a second
each. First the named tests must pass on the packages as they are.
"""

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest's own

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).with_name("mutants.toml")
COPIED = (
    "ssdtrain",
    "pydirect",
    "hector",
    "recipes/bench/harness",
    "recipes/bench/safety",
    "tests/pitfalls",
    "tests/ssdtrain",
    "tests/pydirect",
    "tests/hector",
    "tests/compilers.py",
    "tests/ranks.py",
    "pyproject.toml",
)
TIME_LIMIT_S = 240
COMPILER = "test_compile.py"
PRELOADED = (
    "hypothesis",
    "numpy",
    "psutil",
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
)


@dataclass(frozen=True)
class Change:
    """A place in a file, and the text that takes its place."""

    file: str
    anchor: str
    replacement: str


@dataclass(frozen=True)
class Mutant:
    """One bug that must not come back."""

    name: str
    pitfall: str
    killed_by: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """All that it changes."""
        return tuple(dict.fromkeys(change.file for change in self.changes))

    def text_of(self, file: str, text: str) -> str:
        """Return the file's text with the bug.

        Raises:
            Survived: an anchor does not stand exactly once in it, or two overlap.
        """
        places = []
        for change in self.changes:
            if change.file == file:
                if (count := text.count(change.anchor)) != 1:
                    told = f"{self.name}: the anchor stands {count} times in {file}"
                    raise Survived(f"{told}:\n{change.anchor}")
                places.append((text.index(change.anchor), change))
        end = len(text)
        for start, change in sorted(places, key=lambda place: -place[0]):
            if start + len(change.anchor) > end:
                raise Survived(f"{self.name}: two anchors overlap in {file}")
            end = start
            behind = text[start + len(change.anchor) :]
            text = text[:start] + change.replacement + behind
        return text


class Survived(Exception):
    """A mutant passed its tests, or a test failed without one."""


def load(name: str, fields: dict[str, Any]) -> Mutant:
    """Read an entry of the table."""
    changes = tuple(
        Change(each["file"], each["anchor"], each["replacement"])
        for each in (fields, *fields.get("also", ()))
    )
    return Mutant(name, fields["pitfall"], tuple(fields["killed_by"]), changes)


def all_mutants() -> list[Mutant]:
    """Every entry of the table, in its order."""
    with MUTANTS.open("rb") as file:
        return [load(name, fields) for name, fields in tomllib.load(file).items()]


def copy_to(place: Path) -> None:
    """The packages, with what Python has compiled of them, and the tests."""
    skip = shutil.ignore_patterns("*-pytest-*.pyc")
    for name in COPIED:
        source, target = ROOT / name, place / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=skip)
        else:
            shutil.copy(source, target)


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy that is gone at the end."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "tree"
        place.mkdir()
        copy_to(place)
        yield place


@contextlib.contextmanager
def changed(mutant: Mutant, place: Path) -> Iterator[None]:
    """Have the bug in the copy, which is as it was at the end."""
    before = {place / file: (place / file).read_bytes() for file in mutant.files}
    after = {
        path: mutant.text_of(file, before[path].decode())
        for file, path in zip(mutant.files, before, strict=True)
    }
    try:
        for path, text in after.items():
            _write(path, text.encode())
        yield
    finally:
        for path, whole in before.items():
            _write(path, whole)


def _write(path: Path, whole: bytes) -> None:
    """Write a file. Its bytecode goes, which Python knows by size and second alone."""
    path.write_bytes(whole)
    if path.suffix == ".py":
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(place: Path, tests: tuple[str, ...], log: Path) -> int:
    """pytest's exit code in a fork that imports from `place`; -1 out of time."""
    if any(COMPILER in test for test in tests):
        return run_alone(place, tests, log)
    child = os.fork()
    if child == 0:
        code = 70
        with contextlib.suppress(BaseException):
            code = _child(place, tests, log)
        os._exit(code)
    deadline = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def run_alone(place: Path, tests: tuple[str, ...], log: Path) -> int:
    """The same in a process of its own: torch's compiler does not survive a fork."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    environment.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)
    with log.open("wb") as out:
        try:
            done = subprocess.run(
                [*command, *tests],
                cwd=place,
                env=environment,
                stdout=out,
                stderr=out,
                timeout=TIME_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1
    return done.returncode


def _child(place: Path, tests: tuple[str, ...], log: Path) -> int:
    import pytest

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(place)
    sys.path[:] = [str(place), *(p for p in sys.path if p not in ("", str(ROOT)))]
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    arguments += ["--rootdir", str(place)]
    code = int(pytest.main([*arguments, *tests]))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def check(mutant: Mutant, place: Path) -> float:
    """Seconds that it took to kill it, in this copy.

    Raises:
        Survived: its tests passed, or none of them ran.
    """
    start, log = time.monotonic(), place.parent / "log"
    log.unlink(missing_ok=True)
    with changed(mutant, place):
        code = run_tests(place, mutant.killed_by, log)
        # 1: tests ran and failed; -1: a mutant that hangs is noticed by anybody.
        if code not in (1, -1):
            said = log.read_text()[-2000:] if log.exists() else ""
            raise Survived(f"{mutant.name}: pytest ended with {code}\n{said}")
    return time.monotonic() - start


def check_sound(mutants: list[Mutant], place: Path) -> None:
    """All named tests pass without a mutant.

    Raises:
        Survived: one does not.
    """
    tests = tuple(dict.fromkeys(test for m in mutants for test in m.killed_by))
    # Those of the compiler apart, and each package: where pydirect is loaded, autograd
    # has threads, and no fork may run backward.
    parts: dict[str, tuple[str, ...]] = {}
    for test in tests:
        part = COMPILER if COMPILER in test else test.split("/")[1]
        parts[part] = (*parts.get(part, ()), test)
    log = place.parent / "log"
    for part in parts.values():
        if run_tests(place, part, log) != 0:
            raise Survived(f"without a mutant:\n{log.read_text()[-3000:]}")


def preload() -> None:
    """What every fork needs and no mutant changes. Starts no thread."""
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def main(names: list[str]) -> int:
    """Kill the mutants named, or all; 1 if one survives."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    preload()
    mutants = [m for m in all_mutants() if not names or m.name in names]
    survivors = []
    with copied() as place:
        try:
            check_sound(mutants, place)
        except Survived as error:
            print(error)
            return 1
        for mutant in mutants:
            try:
                seconds = check(mutant, place)
                print(f"killed  {mutant.name:32} {mutant.pitfall} ({seconds:.1f} s)")
            except Survived as error:
                survivors.append(mutant.name)
                print(f"ALIVE   {mutant.name:32} {error}")
            sys.stdout.flush()
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
