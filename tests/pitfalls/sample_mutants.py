"""Breaks a package at random and counts how many of the breaks its tests notice.

A mutant is one flipped comparison, one swapped sign, one dropped call or one dropped
assignment, on a line that a test runs on a CPU. Files are drawn with equal weight, then
a change within the file. The tests that run the line are asked first, the quickest
first; where they all pass, the whole test files that hold them are.

    python -m tests.pitfalls.sample_mutants --seed 0 --lines lines.json --out out.json

Prints each mutant as a line to change, writes all of them, goes on where it was
stopped, and exits with 1 where more than a share of them is left (`--most-alive`).
"""

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.bench.harness.cells import Cells
from tests.pitfalls import run_mutants
from tests.pitfalls.run_mutants import ROOT, copy_to, preload, run_tests

FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
# Lines by test, by test file: what a fixture of a whole module runs counts for the
# first test that asks for it.
TRACER = """
import json, sys, threading
package, out, files = sys.argv[1], sys.argv[2], {}
seen, tests = {}, {}
def local(frame, event, argument):
    if event == "line":
        seen.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
    return local
def tracer(frame, event, argument):
    if frame.f_code.co_filename not in files:
        files[frame.f_code.co_filename] = package in frame.f_code.co_filename
    return local if files[frame.f_code.co_filename] else None
threading.settrace(tracer)
sys.settrace(tracer)
import pytest
class Recorder:
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        seen.clear()
        tests[item.nodeid] = {"seconds": 0.0, "passed": True, "lines": {}}
        yield
        lines = {name: sorted(found) for name, found in list(seen.items())}
        tests[item.nodeid]["lines"] = lines
    def pytest_runtest_logreport(self, report):
        test = tests[report.nodeid]
        test["seconds"] += report.duration
        test["passed"] &= report.outcome != "failed"
quiet = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
pytest.main([*quiet, sys.argv[3]], plugins=[Recorder()])
sys.settrace(None)
threading.settrace(None)
with open(out, "w") as file:
    json.dump(tests, file)
"""
# Host builds of kernels that no mutant changes are made once.
COMPILER = """#!{python}
import hashlib, os, pathlib, shutil, subprocess, sys
words = sys.argv[1:]
at = words.index("-o")
out, rest = words[at + 1], words[:at] + words[at + 2 :]
text = subprocess.run(["{gxx}", "-E", "-P", *rest], check=True, capture_output=True)
flags = " ".join(w for w in rest if not w.startswith(("-I", "/")))
key = hashlib.sha256(text.stdout + flags.encode()).hexdigest()
kept = pathlib.Path("{kept}") / key
if not kept.exists():
    subprocess.run(["{gxx}", *words], check=True)
    shutil.copy(out, f"{{kept}}.{{os.getpid()}}")
    os.rename(f"{{kept}}.{{os.getpid()}}", kept)
shutil.copy(kept, out)
"""
LEAST_LIMIT_S = 120.0


@dataclass(frozen=True)
class Break:
    """One change of the source."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """The source with the change."""
        return source[: self.start] + self.text + source[self.end :]


def breaks(file: str, source: str) -> Iterator[Break]:
    """Every change there is to a file."""
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    tree = ast.parse(source)

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        # Columns count bytes; the sources are ASCII.
        assert node.end_lineno is not None and node.end_col_offset is not None
        first = begins[node.lineno - 1] + node.col_offset
        return first, begins[node.end_lineno - 1] + node.end_col_offset

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPS:
            start, end = span(node)
            node.ops[0] = FLIPS[type(node.ops[0])]()
            yield Break(
                file, node.lineno, "comparison", start, end, f"({ast.unparse(node)})"
            )
        elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            if any(
                isinstance(s, (ast.Constant, ast.JoinedStr))
                and not isinstance(getattr(s, "value", 0), (int, float))
                for s in (node.left, node.right)
            ):
                continue
            start, end = span(node)
            node.op = SIGNS[type(node.op)]()
            yield Break(file, node.lineno, "sign", start, end, f"({ast.unparse(node)})")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            start, end = span(node)
            yield Break(file, node.lineno, "call", start, end, "pass")
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            start, end = span(node)
            yield Break(file, node.lineno, "assignment", start, end, "pass")


def in_functions(source: str) -> set[int]:
    """Lines inside functions: what a module does once at import is not asked for."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return lines


@dataclass(frozen=True)
class Test:
    """One test, and the lines of the package that it runs, by file."""

    name: str
    seconds: float
    lines: dict[str, frozenset[int]]

    @property
    def file(self) -> str:
        """The file that holds the test."""
        return self.name.partition("::")[0]


def tests_of(package: str, test_file: Path, kept: dict[str, dict]) -> list[Test]:
    """The passing tests of a file with their lines; measured anew where the package or
    the file has changed since ``kept`` was written."""
    name = str(test_file.relative_to(ROOT))
    digest = hashlib.sha256(test_file.read_bytes())
    for source in sorted((ROOT / package).rglob("*.py")):
        digest.update(source.read_bytes())
    if kept.get(name, {}).get("digest") != digest.hexdigest():
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "lines.json"
            command = [sys.executable, "-c", TRACER, f"/{package}/", str(out), name]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if not out.exists():
                raise SystemExit(f"{name} did not run:\n{done.stdout[-2000:]}")
            found = json.loads(out.read_text())
        kept[name] = {"digest": digest.hexdigest(), "tests": found}
    inside = f"{ROOT}/{package}/"
    made = []
    for test, known in kept[name]["tests"].items():
        if not known["passed"]:
            print(f"{test} fails without a mutant: not asked")
            continue
        lines = {
            str(Path(file).relative_to(ROOT)): frozenset(numbers)
            for file, numbers in known["lines"].items()
            if file.startswith(inside)
        }
        made.append(Test(test, known["seconds"], lines))
    return made


def candidates(
    package: str, tests: list[Test], below: list[str]
) -> dict[str, list[tuple[Break, tuple[Test, ...]]]]:
    """By file: every change on a line that tests run, with those tests."""
    found: dict[str, list[tuple[Break, tuple[Test, ...]]]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not any(file.startswith(f"{package}/{part}") for part in below):
            continue
        source = path.read_text()
        inside = in_functions(source)
        for change in breaks(file, source):
            by = [t for t in tests if change.line in t.lines.get(file, ())]
            if by and change.line in inside:
                by.sort(key=lambda t: t.seconds)
                found.setdefault(file, []).append((change, tuple(by)))
    return found


def draw(
    choices: dict[str, list[tuple[Break, tuple[Test, ...]]]], number: int, seed: int
) -> list[tuple[Break, tuple[Test, ...]]]:
    """Distinct changes, each of a file drawn with equal weight."""
    generator = random.Random(seed)
    left = {file: list(changes) for file, changes in choices.items()}
    picked = []
    while left and len(picked) < number:
        file = generator.choice(sorted(left))
        picked.append(left[file].pop(generator.randrange(len(left[file]))))
        if not left[file]:
            del left[file]
    return picked


def outcome(change: Break, by: tuple[Test, ...]) -> str:
    """What noticed the change: "test", "file", "hung" (past ten times its time), or
    "nothing"."""
    with tempfile.TemporaryDirectory() as directory:
        place, log = Path(directory) / "tree", Path(directory) / "log"
        place.mkdir()
        copy_to(place)
        if not (place / "configs").exists():
            (place / "configs").symlink_to(ROOT / "configs")
        file = place / change.file
        file.write_text(change.apply(file.read_text()))
        seconds = sum(test.seconds for test in by)
        run_mutants.TIME_LIMIT_S = max(LEAST_LIMIT_S, 10 * seconds)
        # A mutant that hangs hangs in one test.
        longest = max(test.seconds for test in by)
        os.environ["PYTEST_TIMEOUT"] = str(max(LEAST_LIMIT_S / 4, 10 * longest))
        files = tuple(dict.fromkeys(test.file for test in by))
        asked = tuple(test.name for test in by)
        for who, names in (("test", asked), ("file", files)):
            code = run_tests(place, names, log)
            if code == 5:
                raise SystemExit(f"{change}: no test ran")
            if code == -1:
                return "hung"
            if code != 0:  # failed, could not be imported, or crashed
                return who
    return "nothing"


def keep_builds(place: Path) -> None:
    """Put a compiler in front that compiles the same file once."""
    gxx = shutil.which("g++")
    if gxx is None:
        return
    (place / "kept").mkdir()
    (place / "bin").mkdir()
    script = place / "bin" / "g++"
    script.write_text(
        COMPILER.format(python=sys.executable, gxx=gxx, kept=place / "kept")
    )
    script.chmod(0o700)
    os.environ["PATH"] = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"


def main() -> int:
    """Draw, run, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--package", default="pydirect")
    parser.add_argument("--below", nargs="*", default=[""], help="folders or files")
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-alive", type=float, default=0.08)
    parser.add_argument("--lines", type=Path, required=True, help="kept coverage")
    parser.add_argument("--out", type=Path, required=True, help="results, resumable")
    parser.add_argument("--budget-s", type=float, default=3_600)
    parser.add_argument("--without", nargs="*", default=[], help="tests not asked")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        keep_builds(Path(directory))
        return sample(given)


def sample(given: argparse.Namespace) -> int:
    """1 where too many are alive."""
    kept = json.loads(given.lines.read_text()) if given.lines.exists() else {}
    tests: list[Test] = []
    every = (ROOT / "tests" / given.package).rglob("test_*.py")
    for path in sorted(t for t in every if not any(w in str(t) for w in given.without)):
        start = time.monotonic()
        tests += tests_of(given.package, path, kept)
        given.lines.write_text(json.dumps(kept))
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
    choices = candidates(given.package, tests, given.below)
    picked = draw(choices, given.number, given.seed)
    settings = {"package": given.package, "seed": given.seed, "number": given.number}
    cells = Cells(given.out, given.budget_s, settings)
    cells.fact("files", {file: len(found) for file, found in choices.items()})
    preload()
    for number, (change, by) in enumerate(picked, 1):
        cells.run(
            f"{number:03} {change.file}:{change.line} {change.kind}",
            lambda change=change, by=by: {  # type: ignore[misc]
                "change": " ".join(change.text.split())[:120],
                "source": _line(change),
                "noticed_by": outcome(change, by),
            },
        )
    done = cells.data["cells"].values()
    alive = [cell for cell in done if cell.get("noticed_by") == "nothing"]
    cells.fact("killed", len(done) - len(alive))
    print(f"{len(done) - len(alive)} of {len(done)} killed")
    return 1 if len(alive) > given.most_alive * len(picked) else 0


def _line(change: Break) -> str:
    lines = (ROOT / change.file).read_text().splitlines()
    return lines[change.line - 1].strip()


if __name__ == "__main__":
    sys.exit(main())
