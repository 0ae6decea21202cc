"""Applies each mutant to a copy of the package and requires its named tests to fail.

A mutant is `mutants/NAME.patch`: a header that git skips, then a patch to product code
that brings one known bug back.

    Pitfall: reload races its own copy (Megatron#7398)
    Killed-by: tests/pitfalls/test_order.py::test_a_load_waits_for_its_own_copy_out

    python -m tests.pitfalls.run_mutants [NAME ...]

Every run is a fork of one process that has torch and pytest loaded: about a second
each. First the named tests must pass on the package as it is.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).parent / "mutants"
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
class Mutant:
    """One bug that must not come back."""

    name: str
    pitfall: str
    tests: tuple[str, ...]
    patch: Path


class Survived(Exception):
    """A mutant passed its tests, or a test failed without one."""


def load(path: Path) -> Mutant:
    """Read a patch's header."""
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.startswith("diff "):
            break
        name, _, value = line.partition(": ")
        fields[name] = value.strip()
    tests = tuple(fields["Killed-by"].split(" "))
    return Mutant(path.stem, fields["Pitfall"], tests, path)


def all_mutants() -> list[Mutant]:
    """Every patch, by name."""
    return [load(path) for path in sorted(MUTANTS.glob("*.patch"))]


def copy_to(place: Path) -> None:
    """The package and the tests, without what Python compiled."""
    for name in COPIED:
        source, target = ROOT / name, place / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__", "*.patch")
            shutil.copytree(source, target, ignore=skip)
        else:
            shutil.copy(source, target)


def apply(mutant: Mutant, place: Path, *, check: bool = False) -> None:
    """Patch the copy; or only see whether that can be done."""
    command = ["git", "apply", "--recount", "-C1", str(mutant.patch)]
    if check:
        command.insert(2, "--check")
    # Not inside a repository: paths are those of the copy.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(place.parent)}
    done = subprocess.run(
        command,
        cwd=place,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Survived(f"{mutant.name} does not apply: {done.stderr.strip()}")


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


def check(mutant: Mutant) -> float:
    """Seconds that it took to kill it.

    Raises:
        Survived: its tests passed, or none of them ran.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        place, log = Path(directory) / "tree", Path(directory) / "log"
        place.mkdir()
        copy_to(place)
        apply(mutant, place)
        code = run_tests(place, mutant.tests, log)
        # 1: tests ran and failed; -1: a mutant that hangs is noticed by anybody.
        if code not in (1, -1):
            said = log.read_text()[-2000:] if log.exists() else ""
            raise Survived(f"{mutant.name}: pytest ended with {code}\n{said}")
    return time.monotonic() - start


def check_sound(mutants: list[Mutant]) -> None:
    """All named tests pass without a mutant.

    Raises:
        Survived: one does not.
    """
    tests = tuple(dict.fromkeys(test for m in mutants for test in m.tests))
    # Those of the compiler apart, and each package: where pydirect is loaded, autograd
    # has threads, and no fork may run backward.
    parts: dict[str, tuple[str, ...]] = {}
    for test in tests:
        part = COMPILER if COMPILER in test else test.split("/")[1]
        parts[part] = (*parts.get(part, ()), test)
    with tempfile.TemporaryDirectory() as directory:
        place, log = Path(directory) / "tree", Path(directory) / "log"
        place.mkdir()
        copy_to(place)
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
    try:
        check_sound(mutants)
    except Survived as error:
        print(error)
        return 1
    for mutant in mutants:
        try:
            seconds = check(mutant)
            print(f"killed  {mutant.name:32} {mutant.pitfall} ({seconds:.1f} s)")
        except Survived as error:
            survivors.append(mutant.name)
            print(f"ALIVE   {mutant.name:32} {error}")
        sys.stdout.flush()
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
