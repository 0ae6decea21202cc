"""`ssdtrain rok`: the recompute-offload-keep curve (Wu, Figure 5.12), predicted:
activation peak against algorithmic FLOPs a second, over batch sizes and strategies.
`python -m recipes.bench planner.rok` measures it."""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from ssdtrain.errors import ConfigError
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.timeline import Timeline
from ssdtrain.tools.arguments import count_argument, show
from ssdtrain.tools.printed import figures_table, show_tables
from ssdtrain.tools.progress import each
from ssdtrain.tools.report.plan_command import add_subject, profile_of
from ssdtrain.tools.report.scatter import reruns
from ssdtrain.tools.report.subject import MODELS, Build, build_of

EXAMPLES = """examples:
  ssdtrain rok --model blocks:12288x3 --no-gpu --batches 1 2 4 8 16 --plot rok.png
"""
GB = 1e9
MARKERS = {"keep": "o", "offload": "s", "recompute": "^"}


class RokPoint(NamedTuple):
    """One run, as predicted."""

    model: str
    strategy: str
    batch: int
    peak_gb: float
    step_ms: float
    tflops: float
    """Algorithmic FLOPs a second, 1e12."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    add_subject(parser)
    add, sizes = parser.add_argument, [1, 2, 4, 8, 16]
    add("--batches", type=count_argument, nargs="+", default=sizes, metavar="N")
    add("--plot", metavar="PNG", help="draw the curve")
    add("--json", action="store_true", help="print JSON, no table")


def run(args: argparse.Namespace) -> int:
    """Print and draw. Raises ConfigError, OSError: input that cannot work."""
    if args.model is None:
        raise ConfigError(f"--model expects {MODELS}, got nothing")
    build = build_of(args.model, args.sequence)
    batches = each(args.batches, lambda batch: f"predicting batch {batch}")
    points = [p for batch in batches for p in _predicted(args, build, batch)]
    if args.plot:
        draw_rok(points, Path(args.plot))
    if args.json:
        print(json.dumps([point._asdict() for point in points], indent=1))
    else:
        _print(points)
    return 0


def _predicted(args: argparse.Namespace, build: Build, batch: int) -> list[RokPoint]:
    profile = profile_of(args, build, batch)
    work = _flops(build, batch)
    plan = choose(profile, Goal(max_overhead=args.max_overhead))
    found = plan.prediction
    if found is None:
        raise ConfigError("a chosen plan carries a prediction")
    runs = [
        ("keep", found.keep_ms, found.keep_peak_bytes),
        ("offload", found.step_ms, found.peak_bytes),
    ]
    for _, again in itertools.islice(reruns(Timeline(profile)), 1):
        runs.append(("recompute", again.step_ms, again.peak_bytes))
    return [
        RokPoint(args.model, name, batch, peak / GB, ms, work / (ms / 1e3) / 1e12)
        for name, ms, peak in runs
    ]


def _flops(build: Build, batch: int) -> float:
    """Count the operations of a forward and backward, on the meta device."""
    with torch.device("meta"):
        subject = build(batch)
        with FlopCounterMode(display=False) as counter:
            subject.forward().backward()
    return float(counter.get_total_flops())


def _print(points: Sequence[RokPoint]) -> None:
    """List all points, by model, strategy and batch."""
    heads = ("model", "strategy", "batch", "peak GB", "step ms", "TFLOP/s")
    rows = [
        (*words, f"{peak_gb:.2f}", f"{step_ms:.1f}", f"{tflops:.1f}")
        for *words, peak_gb, step_ms, tflops in sorted(points)
    ]
    show_tables(figures_table("recompute, offload, keep", heads, rows, words=2))


def draw_rok(points: Sequence[RokPoint], path: Path) -> None:
    """Draw a panel a model, a line a strategy. ImportError: matplotlib is missing."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(point.model for point in points))
    figure = Figure(figsize=(5.5 * max(1, len(models)), 4), layout="constrained")
    panels: Any = figure.subplots(1, max(1, len(models)), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=False):
        for strategy in dict.fromkeys(p.strategy for p in points if p.model == model):
            own = [p for p in points if (p.model, p.strategy) == (model, strategy)]
            own.sort(key=lambda p: p.batch)
            xs, ys = [p.peak_gb for p in own], [p.tflops for p in own]
            axes.plot(xs, ys, marker=MARKERS.get(strategy, "x"), label=strategy)
            for p in own:
                axes.annotate(f"B{p.batch}", (p.peak_gb, p.tflops), fontsize=7)
        axes.set_title(model)
        axes.set_xlabel("activation peak (GB)")
        axes.set_ylabel("model throughput (TFLOP/s)")
        axes.legend()
    figure.savefig(path, dpi=120)
