"""`ssdtrain search MODEL --gpus N`: how to lay a model out over GPUs."""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from ssdtrain.plan.plan import PLAN_FILE
from ssdtrain.quantities import bytes_text
from ssdtrain.tools.arguments import count_argument, positive_argument, show
from ssdtrain.tools.foresight.cluster import DEFAULT
from ssdtrain.tools.foresight.device import DeviceCosts, load_device
from ssdtrain.tools.report.build_public import Loss
from ssdtrain.tools.report.fits_command import add_loss, tokens_argument
from ssdtrain.tools.report.pictures import Line, write_cloud
from ssdtrain.tools.search.frameworks import Framework
from ssdtrain.tools.search.launch import configurations
from ssdtrain.tools.search.layout_search import Asked, Ranked, search
from ssdtrain.tools.search.own_trainer import plan_of
from ssdtrain.tools.search.pricing import PricedLayout
from ssdtrain.tools.search.stores import HOST, LEAST_YEARS

EXAMPLES = """examples:
  ssdtrain search llama-3.1-8b --gpus 8
  ssdtrain search llama-3.1-70b --gpus 64 --gpu h200 --fabric nvlink:8,ib:400G
  ssdtrain search llama-3.1-70b --gpus 16 --host 2TB --ssd d7-p5620:8
  ssdtrain search path/to/config.json --gpus 16 --tokens 4k --batch 256 --save DIR
"""
SHOWN = 8
SLOWEST = 2.5
"""Layouts that take so many times the fastest one's step are not in the picture."""
FILES = {
    "torchtitan": "torchtitan.toml",
    "megatron": "megatron_flags.txt",
    "deepspeed": "deepspeed.json",
    "fsdp2": "fsdp2.py",
    "ssdtrain": "ssdtrain.py",
    "ssdtrain train": "train.yaml",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name or a config.json")
    add("--gpus", type=count_argument, required=True, help="of all nodes")
    add("--gpu", default="h100", help="h100, h200 or a device file")
    add("--fabric", default=DEFAULT, help=f"GPUs of a node, links (default: {DEFAULT})")
    of_tokens = "of a sequence (default: 8k)"
    add("--tokens", type=tokens_argument, default=8192, help=of_tokens)
    add("--batch", type=count_argument, default=512, help="sequences of a step (512)")
    add("--host", default=HOST, help=f"a node's memory for activations ({HOST})")
    add("--ssd", metavar="NAME:NUMBER", help="a node's drives, of `ssdtrain project`")
    lasting = f"that the drives have to last ({LEAST_YEARS:g})"
    add("--ssd-years", type=positive_argument, default=LEAST_YEARS, help=lasting)
    add_loss(parser)
    launcher = "that has to launch it, whose memory is counted (default: any)"
    add("--framework", choices=[one.value for one in Framework], help=launcher)
    add("--save", type=Path, metavar="DIR", help="launch configurations, a picture")
    add("--json", action="store_true", help="print JSON, no table")


def run(args: argparse.Namespace) -> int:
    """Search; 0, or 1 if no layout fits. Raises ConfigError, OSError: input that
    cannot work."""

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"ssdtrain search: {text}", file=sys.stderr)

    names = ("model", "gpus", "gpu", "fabric", "tokens", "batch")
    given = {name: getattr(args, name) for name in (*names, "host", "ssd_years")}
    framework = args.framework and Framework(args.framework)
    asked = Asked(**given, ssd=args.ssd, loss=Loss(args.loss), framework=framework)
    found = search(asked, progress)
    if args.save is not None:
        save(found, load_device(args.gpu), args.save)
    if args.json:
        print(json.dumps(layouts_to_json(found), indent=1))
    else:
        print("\n".join(lines(asked, found)))
    return 0 if found.best is not None else 1


def save(found: Ranked, device: DeviceCosts, directory: Path) -> None:
    """Write what launches the best layout, a file for each framework, the plan of
    `ssdtrain train`, and a picture of all layouts."""
    best = found.best
    if best is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.resolve() / "plan.json"
    plan = plan_of(best.layout, found.job, device, drives=_uses_drives(best))
    if plan is not None:
        PLAN_FILE.write(path, plan)
    for name, text in _launch(found, best, None if plan is None else path).items():
        (directory / FILES[name]).write_text(text, encoding="utf-8")
    try:
        write_front(found, directory / "front.png")
    except ImportError as error:
        print(f"ssdtrain search: no front.png: {error}", file=sys.stderr)


def write_front(found: Ranked, path: Path) -> None:
    """Draw step and memory of layouts near the fastest. ImportError: no matplotlib."""
    limit = found.capacity_bytes / 1e9
    most_ms = SLOWEST * min(one.step_ms for one in found.priced if one.fits)

    def points(layouts: Iterable[PricedLayout]) -> list[tuple[float, float]]:
        each = ((one.memory_bytes / 1e9, one.step_ms / 1e3) for one in layouts)
        return [(x, y) for x, y in each if x < 2 * limit and y < most_ms / 1e3]

    groups: dict[str, list[PricedLayout]] = {}
    for one in found.priced:
        groups.setdefault(one.layout.way.partition(" ")[0], []).append(one)
    write_cloud(
        {name: points(group) for name, group in groups.items()},
        Line("front", points(found.front)),
        limit,
        path,
        title=f"{found.job.gpus} GPUs, {found.job.batch} sequences of "
        f"{found.job.tokens:,} tokens a step",
        x_name="memory of the fullest GPU (GB); dotted: what it has",
        y_name="step (s)",
    )


def layouts_to_json(found: Ranked) -> dict[str, object]:
    """Return all layouts that fit, and the best one's launch configurations."""
    rows = [
        {
            **asdict(one.layout),
            "step_ms": one.step_ms,
            "tokens_per_s": found.tokens_per_s(one),
            "memory_bytes": one.memory_bytes,
            "memory_parts": dict(one.memory_parts),
            **asdict(one.resting),
            "ssd_years": one.years if math.isfinite(one.years) else None,
            "bound": one.bound,
            "parts_ms": dict(one.parts_ms),
        }
        for one in found.priced
        if one.fits
    ]
    best = found.best
    launch = {} if best is None else dict(_launch(found, best))
    return {"job": asdict(found.job), "layouts": rows, "launch": launch}


def lines(asked: Asked, found: Ranked) -> list[str]:
    """Return the answer as text: a table, and what launches the best layout."""
    fitting = [one for one in found.priced if one.fits]
    told = [
        f"{asked.model}, {asked.gpus} x {asked.gpu} ({asked.fabric}), "
        f"{asked.batch} sequences of {asked.tokens:,} tokens a step",
        f"{len(found.priced)} layouts, {len(fitting)} of them fit "
        f"{bytes_text(found.capacity_bytes)} of a GPU",
        "",
    ]
    if not fitting:
        least = min(found.priced, key=lambda one: one.memory_bytes)
        return [
            *told,
            f"None fits: the smallest needs {bytes_text(least.memory_bytes)} of a GPU. "
            "Take more GPUs, fewer --tokens or --loss fused.",
        ]
    told.append(
        f"  {'data':>5} {'tensor':>6} {'context':>7} {'stages':>6} {'experts':>7} "
        f"{'ZeRO':>4} {'micro':>5} {'activations':14} {'step':>10} {'tokens/s':>12} "
        f"{'memory':>10} {'host':>10} {'SSD':>10}  bound by"
    )
    told += [_row(found, one) for one in fitting[:SHOWN]]
    best = fitting[0]
    if math.isfinite(best.years):
        told += ["", f"The SSDs last {best.years:.1f} years under the first."]
    for name, text in _launch(found, best).items():
        told += ["", f"-- {name} --", text.rstrip()]
    return told


def _launch(
    found: Ranked, best: PricedLayout, plan: Path | None = None
) -> Mapping[str, str]:
    drives = _uses_drives(best)
    return configurations(best.layout, found.job, drives=drives, plan=plan)


def _uses_drives(one: PricedLayout) -> bool:
    return one.resting.ssd_bytes > 0


def _row(found: Ranked, one: PricedLayout) -> str:
    own = one.layout
    tensor = f"{own.tensor}{'s' if own.divided else ''}"
    stages = f"{own.pipeline}{f'x{own.chunks}' if own.chunks > 1 else ''}"
    return (
        f"  {own.data:>5} {tensor:>6} {own.context:>7} {stages:>6} {own.expert:>7} "
        f"{own.zero:>4} {own.sequences:>5} {own.way:14} {one.step_ms:>7.0f} ms "
        f"{found.tokens_per_s(one):>12,.0f} {bytes_text(one.memory_bytes):>10} "
        f"{bytes_text(one.resting.host_bytes):>10} "
        f"{bytes_text(one.resting.ssd_bytes):>10}  {one.bound}"
    )
