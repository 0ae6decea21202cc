"""The blocks of pages that need a GPU, each run in a process of its own.

python -m tests.docs.on_gpu [--out docs.json] [--budget-s 200]

Runs `<!-- on a GPU, given: code -->` blocks beside one another (what stands behind a
line `then:` runs behind the block), and every page's other
Python blocks on the GPU's machine as well. Writes for each whether it ran, its seconds,
and of a failed one the end of what it printed; the status is 1 if one failed.
"""

import argparse
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import ROOT, Block, blocks, pages, parts_of, where

MOUNTS = "/mnt/nvme"
"""In pages: where SSDs are mounted. Here directories below the block's own."""
NUM_LANES = 6
"""Blocks that run at once."""
TAIL = 2000
PROGRAMS = {"ssdtrain": "ssdtrain", "hector": "hector"}


class Script(NamedTuple):
    """What runs in a process."""

    name: str
    text: str
    is_shell: bool = False


class Outcome(NamedTuple):
    """What became of a script."""

    ok: bool
    seconds: float
    tail: str
    """The end of its output."""


def on_gpu_scripts() -> list[Script]:
    """Return the blocks that are marked."""
    marked = [b for page in pages() for b in blocks(page) if b.on_gpu]
    return [Script(where(block), _whole(block), block.is_shell) for block in marked]


def _whole(block: Block) -> str:
    """What is given, the block, and what is given behind a line `then:`."""
    given, _, after = block.given.partition("\nthen:\n")
    return f"{given}\n{block.text}\n{after}"


def page_scripts() -> Iterator[Script]:
    """Return each page's other Python blocks, as one script."""
    for page in pages():
        parts = [part for block in blocks(page) for part in _parts(block)]
        if parts:
            yield Script(page.stem, "\n".join(text for _, _, text in parts))


def _parts(block: Block) -> list[tuple[str, int, str]]:
    return [*parts_of(block)] if block.is_python and block.runs_here else []


def mounted(text: str, directory: Path) -> str:
    """Return the text with its SSDs below `directory`, which are made."""
    for number in range(2):
        own = directory / f"nvme{number}" / "me"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        own.parent.chmod(0o700)
    return text.replace(MOUNTS, f"{directory}/nvme")


def run(script: Script, limit_s: float) -> Outcome:
    """Run one script in a process and a directory of its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        text = mounted(script.text, directory)
        file = directory / ("block.sh" if script.is_shell else "block.py")
        file.write_text(text, encoding="utf-8")
        words = ["bash", "-eu"] if script.is_shell else [sys.executable]
        try:
            done = subprocess.run(
                [*words, str(file)],
                cwd=directory,
                env=_environment(directory),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=max(limit_s, 0.1),
            )
            ok, output = done.returncode == 0, done.stdout
        except subprocess.TimeoutExpired as late:
            told = f"\nstopped after {limit_s:.0f} s".encode()
            ok, output = False, (late.stdout or b"") + told
    tail = output.decode(errors="replace")[-TAIL:]
    return Outcome(ok, time.monotonic() - began, tail)


def _environment(directory: Path) -> dict[str, str]:
    """Programs of this checkout on the path, caches below the directory."""
    bin_directory = directory / "bin"
    bin_directory.mkdir()
    for name, module in PROGRAMS.items():
        file = bin_directory / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    inherited = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{inherited}" if inherited else str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HECTOR_CACHE": str(directory / "hector"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
    }


def run_all(scripts: Sequence[Script], budget_s: float) -> dict[str, Outcome]:
    """Run all of them, `NUM_LANES` at once, and none past the budget."""
    ends = time.monotonic() + budget_s

    def outcome(script: Script) -> Outcome:
        left = ends - time.monotonic()
        if left < 1:
            return Outcome(False, 0.0, "not run: the budget was spent")
        return run(script, left)

    with ThreadPoolExecutor(NUM_LANES) as lanes:
        found = list(lanes.map(outcome, scripts))
    return {script.name: one for script, one in zip(scripts, found, strict=True)}


def main() -> int:
    """Run what the pages say; 1 if a block failed."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, metavar="FILE", help="outcomes, as JSON")
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--only", default="", metavar="TEXT", help="names that hold it")
    args = parser.parse_args()
    scripts = [*on_gpu_scripts(), *page_scripts()]
    found = run_all([s for s in scripts if args.only in s.name], args.budget_s)
    rows = {
        name: {"ok": one.ok, "seconds": round(one.seconds, 1)}
        | ({} if one.ok else {"tail": one.tail})
        for name, one in found.items()
    }
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for name, row in rows.items():
        print(f"{'ok' if row['ok'] else 'FAILED':6}  {row['seconds']:6} s  {name}")
    return 0 if all(one.ok for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
