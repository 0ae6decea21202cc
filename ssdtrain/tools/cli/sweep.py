"""`ssdtrain train --multirun`: one run for each combination of swept values."""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ssdtrain.errors import ConfigError
from ssdtrain.quantities import bytes_text
from ssdtrain.tools.report.table import WITH, WITHOUT, label, text_of


def sweep(
    args: argparse.Namespace, compose: Callable[[str, Sequence[str]], object]
) -> int:
    """Run every combination in a process of its own, then compare them. Raises
    ConfigError: a combination can never work; nothing has run by then. Returns the
    largest status of a run; a signal ends the sweep with its status."""
    from ssdtrain.train import runs
    from ssdtrain.train.launch import run_in_order

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
        pairs = zip(job, args.overrides, strict=True)
        label = " ".join(one for one, given in pairs if one != given) or "(no sweep)"
        if not args.json:
            print(f"ssdtrain: {number + 1} of {len(jobs)}: {label}", flush=True)
        code = run_in_order(["train", *own], sys.stderr if args.json else None)
        if code > 128:
            ended = f"{number} of {len(jobs)} runs of the sweep have ended"
            print(f"ssdtrain: {ended}; they are in {directory}", file=sys.stderr)
            return code
        worst = max(worst, code if code >= 0 else 1)
        found.append({"overrides": label, "status": code, **figures_in(place)})
    (directory / "sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        Console().print(table_of(found))
        print(f"written to {directory}; in pictures: ssdtrain report {directory}")
    return worst


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every run: swept keys take each of their values. Raises
    ConfigError: an override cannot be parsed."""
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


def figures_in(directory: Path) -> dict[str, Any]:
    """Return what the table shows of one run; empty where it wrote no result."""
    try:
        result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    except OSError:
        return {}
    legs = result.get("legs")
    if legs is None:  # a graph trainer's own figures
        numbers = ((k, v) for k, v in result.items() if isinstance(v, int | float))
        return {name: value for name, value in numbers if "." not in name}
    leg = legs.get(WITH) or legs[WITHOUT]
    return {
        "last_loss": leg["losses"][-1],
        "step_ms": leg["step_ms"],
        "step_ratio": result.get("step_ratio"),
        "peak_bytes": max(leg["peak_bytes"]),
        "last_peak_bytes": max(leg["last_peak_bytes"]),
        "bytes_offloaded": leg["totals"].get("bytes_offloaded", 0),
    }


# As the table of one run calls them; a line break stands where a heading may break.
HEADINGS = {
    "overrides": "setting",
    "status": "result",
    "last_loss": "last\nloss",
    "step_ms": "step,\nmedian",
    "step_ratio": "x\nwithout",
    "peak_bytes": "peak,\nall steps",
    "last_peak_bytes": "peak,\nlast step",
    "bytes_offloaded": "offloaded",
}
LEAST_WIDTH = 12
"""Of the column that tells the runs apart."""
OUTCOMES = {0: "ok", 1: "FAILED", 2: "refused"}
"""Of a run, by its exit status."""


def table_of(found: Sequence[dict[str, Any]]) -> Table:
    """Return a row a run: what was set, and what came of it."""
    names = list(dict.fromkeys(name for run in found for name in run))
    shown = [n for n in names if any(run.get(n) is not None for run in found)]
    all_ok = not any(run["status"] for run in found)
    if all_ok:
        shown.remove("status")
    title = f"{len(found)} runs{', all ok' * all_ok}"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for name in shown:
        heading = HEADINGS.get(name) or label(name).replace(" ", "\n")
        if name == "overrides":  # folded where it must be, and never cut short
            table.add_column(heading, overflow="fold", min_width=LEAST_WIDTH)
        else:
            table.add_column(heading, justify="right", no_wrap=True)
    for run in found:
        # As text: overrides hold brackets, which rich would take for markup.
        table.add_row(*(Text(_text(name, run.get(name))) for name in shown))
    return table


def _text(name: str, value: Any) -> str:
    if name == "status":
        return OUTCOMES.get(value, f"status {value}")
    if name == "step_ratio" and value is not None:
        return f"x {value:.3f}"
    if name == "step_ms" and value is not None:
        return f"{value:.1f} ms"  # as in the table of one run
    if "bytes" in name:
        return bytes_text(value)
    return text_of(name, value)
