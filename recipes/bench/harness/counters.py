"""A GPU's counters for the kernels of a child process, by Nsight Compute (`ncu`)."""

import csv
import subprocess
import sys
from collections.abc import Iterable, Sequence


def counted(
    child: str, metrics: Sequence[str], *options: str, limit_s: float
) -> list[dict[str, str]]:
    """Run Python code; a row a kernel: its name and its counters, in base units.

    The GPU's clocks stay as they are, compilers that the code starts are let alone.

    Raises:
        RuntimeError: ncu could not count; its last words.
    """
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--clock-control", "none", "--replay-mode", "kernel"]
    command += ["--target-processes", "application-only", *options]
    command += ["--metrics", ",".join(metrics), sys.executable, "-c", child]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    rows = read(done.stdout.splitlines())
    if not rows:
        raise RuntimeError((done.stdout + done.stderr)[-400:])
    return rows


def read(lines: Iterable[str]) -> list[dict[str, str]]:
    """Of ncu's CSV; other lines stand before it, and its first row has the units."""
    return list(csv.DictReader(line for line in lines if line.startswith('"')))[1:]


def number(text: str) -> float:
    """As ncu writes it: thousands are set apart."""
    return float(text.replace(",", ""))
