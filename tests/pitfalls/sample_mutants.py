"""Breaks a package at random and counts how many of the breaks its tests notice.

A mutant is one flipped comparison, one swapped sign, one dropped call or one dropped
assignment, on a line that the tests run. Only the test files that run the line are
asked.

    python -m tests.pitfalls.sample_mutants --package pydirect --number 100 --seed 0

Prints each survivor as a line to change, and exits with 1 where more than a share of
them is left (`--most-alive`).
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
TRACER = """
import atexit, json, sys, threading
seen, package = {}, sys.argv[1]
def local(frame, event, argument):
    if event == "line":
        seen.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
    return local
def tracer(frame, event, argument):
    return local if package in frame.f_code.co_filename else None
def save():
    sys.settrace(None)
    with open(sys.argv[2], "w") as file:
        json.dump({name: sorted(lines) for name, lines in seen.items()}, file)
threading.settrace(tracer)
sys.settrace(tracer)
import pytest
quiet = ["-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
code = pytest.main([*quiet, *sys.argv[3:]])
save()
sys.exit(code)
"""


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


def lines_run(package: str, test: Path, place: Path) -> dict[str, set[int]]:
    """Lines of the package that one test file runs, by file."""
    out = place / "lines.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-c", TRACER, f"/{package}/", str(out), str(test)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 5) or not out.exists():
        raise SystemExit(f"{test} fails without a break:\n{done.stdout[-2000:]}")
    found = json.loads(out.read_text())
    return {
        str(Path(name).relative_to(ROOT)): set(lines)
        for name, lines in found.items()
        if name.startswith(f"{ROOT}/{package}/")
    }


def coverage(
    package: str, tests: list[Path], kept: Path
) -> dict[str, dict[str, list[int]]]:
    """Lines by test file, measured once and kept beside the tests' times."""
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    with tempfile.TemporaryDirectory() as directory:
        known = {
            str(test.relative_to(ROOT)): {
                file: sorted(lines)
                for file, lines in lines_run(package, test, Path(directory)).items()
            }
            for test in tests
        }
    kept.write_text(json.dumps(known))
    return known


def killed(change: Break | None, tests: tuple[str, ...]) -> bool:
    """Whether one of the tests fails; without a change none should."""
    with tempfile.TemporaryDirectory() as directory:
        place, log = Path(directory) / "tree", Path(directory) / "log"
        place.mkdir()
        copy_to(place)
        if not (place / "configs").exists():
            (place / "configs").symlink_to(ROOT / "configs")
        if change is not None:
            file = place / change.file
            file.write_text(change.apply(file.read_text()))
        code = run_tests(place, tests, log)
        if code == 5:
            raise SystemExit(f"{change}: no test ran")
        return code != 0  # failed, could not be imported, hung, or crashed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--package", default="pydirect")
    parser.add_argument("--below", nargs="*", default=[""], help="folders or files")
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-alive", type=float, default=0.08)
    parser.add_argument("--lines", type=Path, required=True, help="kept coverage")
    parser.add_argument("--without", nargs="*", default=[], help="tests not asked")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    every = (ROOT / "tests" / given.package).rglob("test_*.py")
    tests = sorted(t for t in every if not any(w in str(t) for w in given.without))
    known = coverage(given.package, tests, given.lines)
    choices = []
    for path in sorted((ROOT / given.package).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not any(file.startswith(f"{given.package}/{part}") for part in given.below):
            continue
        source = path.read_text()
        inside = in_functions(source)
        for change in breaks(file, source):
            by = [t for t, files in known.items() if change.line in files.get(file, [])]
            if by and change.line in inside:
                # Tests that run little else of the package first: they are quick.
                by.sort(key=lambda t: sum(map(len, known[t].values())))
                choices.append((change, tuple(by)))
    picked = random.Random(given.seed).sample(choices, min(given.number, len(choices)))
    preload()
    # A test that fails anyway would kill every mutant.
    for test in sorted({test for _, by in picked for test in by}):
        if killed(None, (test,)):
            raise SystemExit(f"{test} fails in a copy of the tree without a break")
    alive = 0
    for number, (change, by) in enumerate(picked, 1):
        dead = killed(change, by)
        alive += not dead
        state = "killed" if dead else "ALIVE "
        print(
            f"{number:4} {state} {change.file}:{change.line} {change.kind}: "
            f"{' '.join(change.text.split())[:90]}",
            flush=True,
        )
    print(f"{len(picked) - alive} of {len(picked)} killed")
    return 1 if alive > given.most_alive * len(picked) else 0


if __name__ == "__main__":
    sys.exit(main())
