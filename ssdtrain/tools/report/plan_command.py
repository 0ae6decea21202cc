"""`ssdtrain plan`: a profile in, a plan out, with its predicted step and peak."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import NamedTuple

from ssdtrain.config import Target
from ssdtrain.curves import COPY_SLOWDOWN, Curve, Links
from ssdtrain.errors import ConfigError
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.plan import PLAN_FILE, Plan
from ssdtrain.plan.profile import PROFILE_FILE, Profile
from ssdtrain.plan.words import ModuleRow, explain, rows
from ssdtrain.quantities import bytes_text
from ssdtrain.tools.arguments import (
    count_argument,
    fraction_argument,
    refuse_all_but_one,
    show,
    size_argument,
)
from ssdtrain.tools.foresight.device import DEFAULT_DEVICE, DeviceCosts, load_device
from ssdtrain.tools.foresight.recorder import STATES
from ssdtrain.tools.foresight.spec import links_of
from ssdtrain.tools.machine.links import LINK_FILE, LinkKind
from ssdtrain.tools.printed import figures_table, show_tables
from ssdtrain.tools.progress import Progress, each
from ssdtrain.tools.report.scatter import frontier_lines, spots
from ssdtrain.tools.report.subject import (
    MODELS,
    Build,
    add_batch,
    build_of,
    estimated,
    observed,
)

EXAMPLES = """examples:
  ssdtrain plan --model blocks:8192x4 --micro-batch 16 --no-gpu --links links.json
  ssdtrain plan --model my.py:build --max-overhead 0.02 --save plan.json
                                        observe on this machine, write the plan
  ssdtrain plan --profile runs/latest/profile.json --memory-budget 8GB
  ssdtrain plan --model blocks:8192x4 --no-gpu --sweep micro_batch --batch 64 \\
                --stages 4 --memory-budget 20GB

FUNCTION(micro_batch) gives (module, forward), forward() a loss. A saved plan is given
to training as `offload.plan=plan.json`.
"""


PLANNED = [t.value for t in Target if t.behind.is_staged or not t.behind.is_disk]
"""Not those that fill host memory first: how much there is, no file says."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    add_subject(parser)
    add = parser.add_argument
    add("--profile", metavar="FILE", help="a saved profile, no model")
    add("--memory-budget", type=size_argument, metavar="BYTES", help="least time in it")
    whole = "least time with weights, gradients and optimizer in it as well"
    add("--device-memory", type=size_argument, metavar="BYTES", help=whole)
    whose = "with --no-gpu: whose state and update are counted (default: adamw)"
    add("--optimizer", choices=sorted(STATES), default="adamw", help=whose)
    add("--save", metavar="FILE", help="write the plan (JSON)")
    add("--save-profile", metavar="FILE", help="write the profile")
    add("--sweep", choices=["micro_batch"], help="compare sizes at one --batch")
    add("--batch", type=count_argument, default=64, help="of a step (--sweep)")
    add("--stages", type=count_argument, default=1, help="of the pipeline")
    add("--json", action="store_true", help="print JSON, no tables")


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Add what names a model and a machine; `rok` has it too."""
    add = parser.add_argument
    add("--model", metavar="MODEL", help="blocks:HIDDENxLAYERS or FILE.py:FUNCTION")
    add_batch(parser)
    add("--min-bytes", type=size_argument, default=1 << 20, metavar="BYTES")
    add(
        "--max-overhead",
        type=fraction_argument,
        default=0.01,
        metavar="FRACTION",
        help="of the step, such as 0.01 or 1%% (default)",
    )
    estimate = "estimate on the meta device instead of observing"
    add("--no-gpu", action="store_true", help=estimate)
    add("--links", metavar="FILE", help="from `ssdtrain doctor --save`")
    add("--target", choices=PLANNED, default=PLANNED[0], help="where bytes go")
    add(
        "--device",
        metavar="NAME",
        help="with --no-gpu: kernel models of h100, h200 or a device file "
        f"(docs/foresight.md); default: {DEFAULT_DEVICE}",
    )


def chosen_links(args: argparse.Namespace) -> Links:
    """Return curves of the link file; the device's data sheet without one. Raises
    ConfigError: the file cannot be used, or lacks a link."""
    if args.links is None:
        if Target(args.target).behind.is_staged:
            raise ConfigError(
                f"--target {args.target} needs --links FILE with a drive's curves"
            )
        return links_of(chosen_device(args).spec)
    return read_link_curves(args.links)


def read_link_curves(path: str) -> Links:
    """Return the fastest link of each kind in a link file (docs/doctor.md). Raises
    ConfigError: it cannot be read, or has no link between device and host."""
    try:
        links = LINK_FILE.read(path)
    except OSError as error:
        raise ConfigError(
            f"--links: {path} cannot be read ({error.strerror or error}); "
            f"`ssdtrain doctor --save {path}` writes one"
        ) from error

    def best(kind: LinkKind) -> Curve | None:
        curves = [link.curve for link in links.of_kind(kind)]
        return max(curves, key=lambda c: c.bytes_per_second, default=None)

    host = best(LinkKind.HOST_COPY)
    d2h, h2d = best(LinkKind.D2H) or host, best(LinkKind.H2D) or host
    if d2h is None or h2d is None:
        raise ConfigError(f"--links: {path} has no d2h and h2d links; measure again")
    both = (best(LinkKind.BOTH) or d2h).bytes_per_second
    return Links(
        d2h=d2h,
        h2d=h2d,
        ssd_write=best(LinkKind.SSD_WRITE),
        ssd_read=best(LinkKind.SSD_READ),
        copy_slowdown=COPY_SLOWDOWN,
        duplex_slowdown=max(0.0, d2h.bytes_per_second / both - 1.0),
    )


def chosen_device(args: argparse.Namespace) -> DeviceCosts:
    """Return the kernel models of `--device`. Raises ConfigError: it is not known."""
    return load_device(args.device or DEFAULT_DEVICE)


def profile_of(args: argparse.Namespace, build: Build, micro_batch: int) -> Profile:
    """Estimate or observe the profile, as asked for."""
    if args.no_gpu:
        links, device = chosen_links(args), chosen_device(args)
        given = build, micro_batch, links, device, args.min_bytes
        profile = estimated(*given, optimizer=getattr(args, "optimizer", None))
    else:
        profile = observed(build, micro_batch, args.min_bytes, target="host")
        if args.links is not None:
            profile = replace(profile, links=read_link_curves(args.links))
    return replace(profile, notes={**profile.notes, "target": args.target})


def run(args: argparse.Namespace) -> int:
    """Plan and print. Raises ConfigError, OSError: input that cannot work."""
    if args.sweep:
        return _sweep(args)
    with Progress(2) as progress:
        progress.part("reading the profile" if args.profile else "a step")
        profile = _profile(args)
        _refuse_too_large(args, profile)
        progress.part("searching for a plan")
        goal = Goal(
            max_overhead=args.max_overhead,
            memory_budget_bytes=args.memory_budget,
            device_bytes=args.device_memory,
        )
        plan = choose(profile, goal)
    if args.save is not None:
        PLAN_FILE.write(args.save, plan)
    if args.save_profile is not None:
        PROFILE_FILE.write(args.save_profile, profile)
    if args.json:
        print(json.dumps(PLAN_FILE.to_json(plan), indent=1))
    else:
        _print(profile, plan, _capacity(args))
    return 0


def _capacity(args: argparse.Namespace) -> int | None:
    """Return the memory of the device that `--no-gpu` asks about; None: unknown."""
    if not args.no_gpu or args.profile is not None:
        return None
    return int(chosen_device(args).spec.memory_bytes)


def _refuse_too_large(args: argparse.Namespace, profile: Profile) -> None:
    """Raise ConfigError if what training holds needs more than there is."""
    limits = (args.device_memory, _capacity(args))
    most = min((limit for limit in limits if limit is not None), default=None)
    needed = profile.base_bytes + profile.rest_bytes
    if args.no_gpu and most is not None and needed > most:
        raise ConfigError(
            f"weights, gradients and optimizer take {bytes_text(needed)}, "
            f"more than {bytes_text(most)}, before any activation: no plan fits. Take "
            "more memory, fewer trained weights (LoRA), or several GPUs with FSDP."
        )


def _profile(args: argparse.Namespace) -> Profile:
    refuse_all_but_one(args, profile="runs/latest/profile.json", model=MODELS)
    if args.profile is not None:
        profile = PROFILE_FILE.read(args.profile)
        if args.links is not None:
            profile = replace(profile, links=read_link_curves(args.links))
        return profile
    return profile_of(args, build_of(args.model, args.sequence), args.micro_batch)


MOST_ROWS = 40
"""More modules than these share a row with those of the other layers."""


def by_layer(found: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Return the rows; of many, modules that differ by their numbers alone as one sum:
    `blocks.0.up` and `blocks.1.up` as `blocks.*.up`."""
    if len(found) <= MOST_ROWS:
        return list(found)
    summed: dict[str, ModuleRow] = {}
    for row in found:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.module)
        before = summed.get(name)
        figures = row[1:] if before is None else map(add, before[1:], row[1:])
        summed[name] = ModuleRow(name, *figures)
    return list(summed.values())


def _print(profile: Profile, plan: Plan, capacity: int | None) -> None:
    cells = []
    for row in by_layer(rows(profile, plan)):
        sizes = row.kept_bytes, row.host_bytes, row.ssd_bytes, row.recomputed_bytes
        figures = (*map(bytes_text, sizes), f"{row.recompute_ms:.2f}")
        cells.append((row.module, row.num_items, *figures))
    heads = ("module", "tensors", "kept", "host", "SSD", "rebuilt", "rebuild ms")
    show_tables(figures_table("placements by module, one micro-batch", heads, cells))
    room = None if capacity is None else capacity - profile.base_bytes
    print(explain(profile, plan), *frontier_lines(spots(profile), room), sep="\n")


# -- size against number of micro-batches ---------------------------------------------


class Sized(NamedTuple):
    """One micro-batch size at a fixed batch."""

    micro_batch: int
    num_micro_batches: int
    in_flight: int
    bubble: float
    step_ms: float
    peak_bytes: int
    samples_per_s: float
    policy: str
    note: str


def _sweep(args: argparse.Namespace) -> int:
    if args.model is None:
        raise ConfigError("--sweep needs --model: a profile holds one size only")
    build = build_of(args.model, args.sequence)
    sizes = [n for n in range(1, args.batch + 1) if args.batch % n == 0]
    found = [
        _sized(args, build, size)
        for size in each(sizes, lambda size: f"micro-batches of {size}")
    ]
    if args.json:
        print(json.dumps([entry._asdict() for entry in found], indent=1))
        return 0
    rows_of_sizes = []
    best = max((entry.samples_per_s for entry in found), default=0.0)
    for entry in found:
        fastest = entry.samples_per_s == best > 0
        cells = [str(each) for each in entry[:3]] + [f"{100 * entry.bubble:.1f} %"]
        speed, peak = f"{entry.samples_per_s:.2f}", bytes_text(entry.peak_bytes)
        priced = [f"{entry.step_ms:.1f} ms", peak, speed]
        cells += priced if entry.policy else ["-"] * len(priced)
        plan = (entry.policy or entry.note) + (" < fastest" if fastest else "")
        rows_of_sizes.append((plan, *cells))
    title = f"micro-batch size at batch {args.batch}, {args.stages} stages"
    heads = ("size", "number", "in flight", "bubble", "step", "peak", "samples/s")
    show_tables(figures_table(title, ("plan", *heads), rows_of_sizes))
    return 0


def _sized(args: argparse.Namespace, build: Build, size: int) -> Sized:
    """Size a stage, which holds as many micro-batches as stages at most (1F1B)."""
    number = args.batch // size
    in_flight = min(args.stages, number)
    bubble = (args.stages - 1) / (number + args.stages - 1)
    profile = profile_of(args, build, size)
    budget = None if args.memory_budget is None else args.memory_budget // in_flight
    goal = Goal(max_overhead=args.max_overhead, memory_budget_bytes=budget)
    none = Sized(size, number, in_flight, bubble, 0.0, 0, 0.0, "", "")
    try:
        plan = choose(profile, goal)
    except ConfigError as error:
        return none._replace(note=_short(error))
    if plan.prediction is None:
        raise ConfigError("a chosen plan carries a prediction")
    lane_ms = plan.prediction.step_ms - profile.tail_ms
    step_ms = number * lane_ms / (1 - bubble) + profile.tail_ms
    peak, speed = plan.prediction.peak_bytes * in_flight, args.batch / step_ms * 1e3
    figures = {"step_ms": step_ms, "peak_bytes": peak, "samples_per_s": speed}
    return none._replace(**figures, policy=plan.policy)


def _short(error: ConfigError) -> str:
    words: Sequence[str] = str(error).split("activations is ")
    if len(words) < 2:
        return str(error)
    return f"does not fit: least {bytes_text(int(words[1].split()[0]))} a micro-batch"
