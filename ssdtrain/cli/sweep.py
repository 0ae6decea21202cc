"""`ssdtrain train --multirun`: one run for each combination of swept values."""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ssdtrain.errors import ConfigError
from ssdtrain.report.table import WITH, WITHOUT, bytes_text


def sweep(args: argparse.Namespace) -> int:
    """Run every combination in a process of its own, then compare them.

    Returns:
        The largest status of a run; a signal ends the sweep with its status.

    Raises:
        ConfigError: a combination can never work; nothing has run by then.
    """
    from ssdtrain.cli.train import compose
    from ssdtrain.train import runs

    jobs = combinations(args.overrides)
    for job in jobs:
        compose(args.config, job)
    if args.cfg:
        raise ConfigError("--cfg shows one config; leave --multirun out")
    directory = runs.new_path("sweep")
    quiet = [*(["--quiet"] if args.quiet or args.json else [])]
    worst, found = 0, []
    for number, job in enumerate(jobs):
        place = directory / f"{number}"
        own = [*job, f"run_directory={place}", "--config", args.config, *quiet]
        label = " ".join(varying(job, args.overrides)) or "(no sweep)"
        if not args.json:
            print(f"ssdtrain: {number + 1} of {len(jobs)}: {label}", flush=True)
        code = subprocess.run(
            [sys.executable, "-m", "ssdtrain", "train", *own],
            stdout=sys.stderr if args.json else None,
        ).returncode
        if code > 128:
            return code
        worst = max(worst, code if code >= 0 else 1)
        found.append({"overrides": label, "status": code, **_figures(place)})
    (directory / "sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        Console().print(table_of(found))
        print(f"written to {directory}")
    return worst


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every run: swept keys take each of their values.

    Raises:
        ConfigError: an override cannot be parsed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(str(error)) from error
    choices = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
        if one.is_sweep_override()
        else [word]
        for word, one in zip(overrides, parsed, strict=True)
    ]
    return [list(job) for job in itertools.product(*choices)]


def varying(job: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a job that other jobs set otherwise."""
    return [own for own, given in zip(job, overrides, strict=True) if own != given]


def _figures(directory: Path) -> dict[str, Any]:
    """Return what the table shows of one run; empty where it wrote no result."""
    try:
        result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    except OSError:
        return {}
    legs = result.get("legs")
    if legs is None:  # a graph trainer's own figures
        return {k: v for k, v in result.items() if isinstance(v, int | float | str)}
    leg = legs.get(WITH) or legs[WITHOUT]
    return {
        "last_loss": leg["losses"][-1],
        "step_ms": leg["step_ms"],
        "step_ratio": result.get("step_ratio"),
        "peak_bytes": max(leg["peak_bytes"]),
        "bytes_offloaded": leg["totals"].get("bytes_offloaded", 0),
    }


def table_of(found: Sequence[dict[str, Any]]) -> Table:
    """Return a row a run: what was set, and what came of it."""
    names = list(dict.fromkeys(name for run in found for name in run))
    table = Table(title=f"{len(found)} runs")
    for name in names:
        # What tells the runs apart is never cut short, nor broken where it fits.
        widest = max(len(run.get("overrides", "")) for run in found)
        whole = name == "overrides" and widest <= 24
        title = name.replace("_", " ")
        table.add_column(title, justify="right", overflow="fold", no_wrap=whole)
    for run in found:
        # As text: overrides hold brackets, which rich would take for markup.
        table.add_row(*(Text(_text(name, run.get(name))) for name in names))
    return table


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if "bytes" in name:
        return bytes_text(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
