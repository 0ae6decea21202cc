"""`ssdtrain foresight`: predict steps that nobody has run, and learn from kernels."""

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import load_as
from ssdtrain.quantities import bytes_text
from ssdtrain.tools.arguments import count_argument, positive_argument, show
from ssdtrain.tools.foresight.autocast import AutocastEmulation
from ssdtrain.tools.foresight.calibrate import family_scales, host_scale, measured_power
from ssdtrain.tools.foresight.call import KernelFamily
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.caveats import explained, left_out
from ssdtrain.tools.foresight.cluster import EXAMPLE, cluster_of
from ssdtrain.tools.foresight.collectives import Network, load_fabric
from ssdtrain.tools.foresight.device import (
    DEFAULT_DEVICE,
    DeviceCosts,
    load_device,
    shipped,
    write_device,
)
from ssdtrain.tools.foresight.fit import score
from ssdtrain.tools.foresight.gather import gather, read_times
from ssdtrain.tools.foresight.graph import Graph, Stream, read_graph, write_graph
from ssdtrain.tools.foresight.learn import fitted, learn, own_device
from ssdtrain.tools.foresight.memory import estimate_peak
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.price import StepEstimate, estimate_step
from ssdtrain.tools.foresight.ranks import (
    RankLayout,
    Spread,
    estimate_graphs,
    estimate_ranks,
)
from ssdtrain.tools.foresight.recorder import STATES
from ssdtrain.tools.foresight.sharding import EmbeddingTable as EmbeddingTable
from ssdtrain.tools.foresight.sharding import Lookups, candidates
from ssdtrain.tools.foresight.spec import Kind, links_of
from ssdtrain.tools.foresight.steps import capture_step
from ssdtrain.tools.foresight.table_plan import TABLE_PLAN_FILE, table_plan
from ssdtrain.tools.foresight.wires import Wires, fabric_of
from ssdtrain.tools.printed import figures_table, show_tables
from ssdtrain.tools.report.subject import add_batch, build_of, function_of

EXAMPLES = """actions and examples:
  predict    ssdtrain foresight predict --model my.py:build --device h100 \\
                                 --micro-batch 8 --optimizer adamw
             time, peak and where the time goes; --ranks N spreads it over N GPUs as
             --spread says; --slower 1.2: one of them is slower
  capture    ssdtrain foresight capture --model my.py:build --save graph.json
             the execution graph (JSON, Chakra's names), from the meta device
             torchrun --nproc-per-node 2 -m ssdtrain foresight capture \\
                                 --step my.py:prepare --save graph.json
             from a step that runs: compiled, FSDP2, DeepSpeed, Megatron; prepare()
             gives (module or modules, step); every rank writes its graph.rankN.json
             ssdtrain foresight predict --graph graph.rank*.json --device h200
  gather     ssdtrain foresight gather --times times.jsonl --seconds 60
             time kernels of a random design on this machine's GPU (or, with --on cpu,
             its CPU); goes on where it ended
  learn      ssdtrain foresight learn --times times.jsonl --seconds 60 --save own.json
             gather, then ceilings, kernel models and host times of this machine from
             nothing (needs scikit-learn); then --device own.json
  calibrate  ssdtrain foresight calibrate --device h100 --save mine.json
             scale a shipped device to this machine in a minute; then --device mine.json
  shard      ssdtrain foresight shard --tables tables.json --ranks 4 --micro-batch 4096
             which rank holds which embedding table (JSON list of rows, width, lookups
             a sample and distinct_share or reuse_factors); --save writes a plan that
             torchrec, DTensor and python -m ssdtrain.tools.foresight.dlrm take
  fit        ssdtrain foresight fit --times times.jsonl --device h100 --save new.json
             train kernel models on gathered times (needs scikit-learn)

FUNCTION(micro_batch) gives (module, forward), forward() a loss.
"""
MOST_NAMES = 5
COUNT = 4000
"""Calls of the design for each family: more than any budget times."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    add = parser.add_argument
    add("action", choices=sorted(_ACTIONS))
    add("--model", metavar="MODEL", help="blocks:HIDDENxLAYERS or FILE.py:FUNCTION")
    add("--step", metavar="FILE.py:FUNCTION", help="a step that runs, to capture")
    add("--graph", metavar="FILE", nargs="+", help="captured graphs, one a rank")
    add_batch(parser)
    add("--optimizer", choices=sorted(STATES), help="fused")
    add("--ranks", type=count_argument, default=1, help="number of GPUs")
    add(
        "--spread",
        choices=[spread.value for spread in Spread],
        default=Spread.DDP.value,
        help="how a step is spread over --ranks (default: ddp)",
    )
    factor = "factor by which one rank is slower"
    add("--slower", type=positive_argument, default=1.0, help=factor)
    add("--micro-batches", type=count_argument, default=1, help="of a pipeline's step")
    add("--chunks", type=count_argument, default=1, help="of a pipeline's rank")
    add(
        "--fabric",
        metavar="NAME",
        help="links between GPUs: a file, nvlink (default: the device's) or those of "
        "several nodes, such as nvlink:8,ib:400G",
    )
    add("--tables", metavar="FILE", help="embedding tables (JSON)")
    names = f"a file, or one of {', '.join(shipped()) or 'none'}"
    add("--device", default=DEFAULT_DEVICE, metavar="NAME", help=names)
    add("--save", metavar="FILE", help="write what was made")
    add("--times", metavar="FILE", help="kernel times (JSON lines)")
    add("--seconds", type=positive_argument, default=60.0, help="budget of a gather")
    add(
        "--on",
        choices=[kind.value for kind in Kind],
        default=(Kind.CUDA if torch.cuda.is_available() else Kind.CPU).value,
        help="whose kernels are timed: this machine's GPU (default, if any) or CPU",
    )
    add("--seed", type=int, default=0, help="of the random design")
    add(
        "--family",
        choices=[family.value for family in KernelFamily],
        help="only this one",
    )
    add("--json", action="store_true", help="print JSON, no tables")


def run(args: argparse.Namespace) -> int:
    """Do one action. Raises ConfigError, OSError: input that cannot work."""
    _ACTIONS[args.action](args)
    return 0


def _needed(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) is None:
            raise ConfigError(f"{args.action} needs --{name.replace('_', '-')}")


def _graph(args: argparse.Namespace, on: Kind = Kind.CUDA) -> Graph:
    _needed(args, "model")
    build = build_of(args.model, args.sequence)
    with torch.device("meta"), AutocastEmulation(on).noted():
        subject = build(args.micro_batch)
        notes = {"model": args.model, "micro_batch": str(args.micro_batch)}
        return capture(
            subject.model, subject.forward, optimizer=args.optimizer, notes=notes, on=on
        )


def _capture(args: argparse.Namespace) -> None:
    _needed(args, "save")
    path = Path(args.save)
    if args.step is None:
        graph = _graph(args)
    else:
        models, step = _prepared(args.step)
        graph = capture_step(step, models, notes={"step": args.step})
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # with a group or without
            path = path.with_suffix(f".rank{os.environ['RANK']}{path.suffix}")
    write_graph(path, graph)
    print(f"{len(graph.nodes)} operators written to {path}")


def _prepared(text: str) -> tuple[Any, Callable[[], Any]]:
    """What the function of `--step` gives. Raises ConfigError: it raised, or gave
    something else than (modules, step)."""
    function = function_of(text, "--step ")
    try:
        given = function()
    except ConfigError:
        raise
    except Exception as error:
        raise explained(error, f"--step {text} failed") from error
    if not isinstance(given, tuple | list) or len(given) != 2 or not callable(given[1]):
        raise ConfigError(
            f"--step {text}: the function takes nothing and expects to give (module or "
            "modules, step), where step() runs one whole training step, got "
            f"{type(given).__name__}"
        )
    return given[0], given[1]


def _predict(args: argparse.Namespace) -> None:
    if args.graph and args.model:
        raise ConfigError(
            "--graph and --model both name a step; give one of them (--graph has the "
            "step as it was captured)."
        )
    device = load_device(args.device)
    graphs = [read_graph(path) for path in args.graph or ()]
    graph = graphs[0] if graphs else _graph(args, device.spec.kind)
    wires = _wires(args, device, graphs or [graph])
    step = estimate_step(graph, device, wires)
    peak = estimate_peak(graph, device.context_bytes)
    ranks = None
    if len(graphs) > 1:
        ranks = estimate_graphs(graphs, device, wires)
    elif args.ranks > 1:
        layout = RankLayout(
            spread=Spread(args.spread),
            num_ranks=args.ranks,
            slower=args.slower,
            num_micro_batches=args.micro_batches,
            num_chunks=args.chunks,
        )
        ranks = estimate_ranks(graph, device, _fabric(args), layout)
    if args.json:
        values = {
            **asdict(step),
            "by_family_us": {k.value: v for k, v in step.by_family_us.items()},
            "peak_bytes": peak.peak_bytes,
            "num_generic": step.num_generic,
            "left_out": left_out(graph.notes),
            "has_update": _has_update(graph),
            "ranks": None if ranks is None else asdict(ranks),
        }
        print(json.dumps(values, indent=1))
        return
    _print(device, step, peak.peak_bytes)
    for line in _not_in_it(args, graph):
        print(line)
    if ranks is not None:
        how = "captured" if graphs else args.spread
        print(
            f"{len(graphs) or args.ranks} ranks ({how}): step "
            f"{ranks.step_us / 1e3:.2f} ms, the same work on one "
            f"{ranks.alone_us / 1e3:.2f} ms, communication "
            f"{ranks.communication_us / 1e3:.2f} ms, peak of a rank "
            f"{bytes_text(ranks.peak_bytes)}."
        )


def _has_update(graph: Graph) -> bool:
    return any(node.phase is StepPhase.UPDATE for node in graph.nodes)


def _not_in_it(args: argparse.Namespace, graph: Graph) -> list[str]:
    """What the prediction leaves out."""
    lines = left_out(graph.notes)
    if not _has_update(graph) and not args.graph:
        lines.append(
            "The optimizer's update and its state are not in it: --optimizer adds them."
        )
    return [f"Left out: {line}" for line in lines]


def _wires(args: argparse.Namespace, device: DeviceCosts, graphs: list[Graph]) -> Wires:
    """Links for what captured graphs move."""
    streams = {node.stream for graph in graphs for node in graph.nodes}
    between = Stream.COMMUNICATION in streams
    own = streams - {Stream.COMPUTE, Stream.COMMUNICATION}
    return Wires(
        links=links_of(device.spec) if own else None,
        fabric=_fabric(args) if between else None,
    )


def _fabric(args: argparse.Namespace) -> Network:
    if args.fabric is None:
        return fabric_of(load_device(args.device).spec)
    if ":" in args.fabric and not Path(args.fabric).exists():
        return cluster_of(args.fabric, load_device(args.device).spec)
    try:
        return load_fabric(args.fabric)
    except FileNotFoundError:
        raise ConfigError(
            "--fabric expects nvlink, a fabric file (.json) that is there, or "
            f"{EXAMPLE}, got {args.fabric!r}"
        ) from None


def _shard(args: argparse.Namespace) -> None:
    _needed(args, "tables")
    tables = load_as(
        tuple[EmbeddingTable, ...], args.tables, "a list of embedding tables"
    )
    lookups = Lookups(
        device=load_device(args.device), fabric=_fabric(args), batch=args.micro_batch
    )
    found = {
        name: (lookups.step_us(tables, ranks, args.ranks), ranks)
        for name, ranks in candidates(tables, args.ranks, args.seed).items()
    }
    best = min(found, key=lambda name: found[name][0])
    for name, (us, _) in sorted(found.items(), key=lambda pair: pair[1][0]):
        print(f"{name}: {us / 1e3:.3f} ms{' <- chosen' if name == best else ''}")
    if args.save:
        on = "cpu" if lookups.device.spec.kind is Kind.CPU else "cuda"
        plan = table_plan(best, tables, found[best][1], args.ranks, on)
        TABLE_PLAN_FILE.write(args.save, plan)


def _print(device: DeviceCosts, step: StepEstimate, peak_bytes: int) -> None:
    total = max(1.0, sum(step.by_family_us.values()))
    rows = [
        (
            family.value,
            f"{us / 1e3:.2f}",
            f"{100 * us / total:.0f} %",
            f"{100 * device.error(family):.1f} %",
        )
        for family, us in sorted(step.by_family_us.items(), key=lambda pair: -pair[1])
    ]
    title = f"one step on {device.spec.name}, by kernel model"
    heads = ("family", "ms", "share", "error of a kernel")
    show_tables(figures_table(title, heads, rows))
    bound = "the host binds it" if step.is_host_bound else "the device binds it"
    lines = [
        f"step {step.step_us / 1e3:.2f} ms ({bound}: host {step.host_us / 1e3:.2f} ms, "
        f"kernels {step.device_us / 1e3:.2f} ms), peak {bytes_text(peak_bytes)}."
    ]
    if step.clock < 1.0:
        lines.append(f"The power limit holds the clock at {100 * step.clock:.0f} %.")
    if step.num_generic:
        most = sorted(step.generic, key=lambda name: -step.generic[name])
        named = ", ".join(most[:MOST_NAMES]) + (", ..." * (len(most) > MOST_NAMES))
        lines.append(
            f"{step.num_generic} operators are priced as copies of their bytes, as no "
            f"model knows them: {named}."
        )
    if step.unknown_host:
        lines.append(f"Host times of {step.unknown_host} operators are means.")
    print(*lines, sep="\n")


def _gather(args: argparse.Namespace) -> None:
    _needed(args, "times")
    families = [KernelFamily(args.family)] if args.family else list(KernelFamily)
    given = dict.fromkeys(families, COUNT), Path(args.times), own_device(Kind(args.on))
    number = gather(*given, seed=args.seed, budget_s=args.seconds)
    print(f"{number} kernels timed, in {args.times}")


def _learn(args: argparse.Namespace) -> None:
    _needed(args, "times", "save")
    times = Path(args.times)
    device = learn(Kind(args.on), times, seconds=args.seconds, seed=args.seed)
    write_device(args.save, device)
    spec = device.spec
    rates = ", ".join(f"{rate:.3g} TFLOP/s {t}" for t, rate in spec.tflops.items())
    print(f"{spec.name}: {rates}, {spec.memory_gb_per_s:.3g} GB/s")
    for family, count in Counter(call.family for call, _ in read_times(times)).items():
        told = f"{count} kernels, too few for a model; priced by the rates above, set "
        told += "--seconds higher"
        if (error := device.errors.get(family)) is not None:
            told = f"error {100 * error:.1f} %, cross-validated"
        print(f"{family.value}: {told}")
    print(f"written to {args.save}")


def scaled_here(device: DeviceCosts, seconds: float, seed: int) -> DeviceCosts:
    """Return the device, scaled to this machine."""
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
        path = Path(directory) / "times.jsonl"
        families = dict.fromkeys(device.forests, COUNT)
        # Other shapes than those that the models were trained on.
        own = own_device(device.spec.kind)
        gather(families, path, own, seed=seed + 1000, budget_s=seconds)
        scales = family_scales(device, read_times(path))
    if device.power is not None and torch.cuda.is_available():
        device = replace(device, power=measured_power(device.power))
    device = device.scaled(scales)
    return device.scaled({}, host_scale(device))


def _calibrate(args: argparse.Namespace) -> None:
    _needed(args, "save")
    device = scaled_here(load_device(args.device), args.seconds, args.seed)
    write_device(args.save, device)
    for family, scale in device.scales.items():
        print(f"{family.value}: {scale:.3f} of the shipped time")
    print(f"host: {device.host_scale:.3f}; written to {args.save}")


def _fit(args: argparse.Namespace) -> None:
    _needed(args, "times", "save")
    device = load_device(args.device)
    by_family: dict[KernelFamily, list[Any]] = {}
    for call, us in read_times(Path(args.times)):
        by_family.setdefault(call.family, []).append((call, us))
    for family, times in by_family.items():
        if args.family not in (None, family.value):
            continue
        found = score(times, device.spec)
        device = fitted(device, family, times, found["gmae"])
        print(
            f"{family.value}: {len(times)} kernels, error {100 * found['gmae']:.1f} % "
            f"+- {100 * found['spread']:.1f} (roofline "
            f"{100 * found['roofline_gmae']:.1f} %)"
        )
    write_device(args.save, device)


_ACTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "predict": _predict,
    "capture": _capture,
    "gather": _gather,
    "learn": _learn,
    "shard": _shard,
    "calibrate": _calibrate,
    "fit": _fit,
}
