"""`ssdtrain project`: arguments in, tables or JSON out."""

import argparse
import json
from dataclasses import asdict, replace
from functools import partial

from ssdtrain.errors import ConfigError
from ssdtrain.tools.arguments import count_argument, positive_argument, show
from ssdtrain.tools.printed import figures_table, show_tables
from ssdtrain.tools.project.assumptions import Assumptions
from ssdtrain.tools.project.cases import CaseSet, cases, parse_set
from ssdtrain.tools.project.endurance import cost_of_drives, fewest, wear
from ssdtrain.tools.project.model import Case, Sharding, Throughput, project
from ssdtrain.tools.project.render import (
    CaseRow,
    cost_table,
    plot_projection,
    projection_table,
)
from ssdtrain.tools.project.tables import (
    GPUS,
    MODELS,
    SSDS,
    GpuSheet,
    TransformerShape,
    find_row,
)

EXAMPLES = """examples:
  ssdtrain project                                    the systems of Figure 5.10
  ssdtrain project --cases table-5.5                  two GPUs scaled up to 64
  ssdtrain project --ssd 980-pro --assume retention_factor=86
                                                      Figure 5.13
  ssdtrain project --model gpt-175b --gpu h200-sxm --gpus 384 --tensor 8 \\
      --pipeline 12 --batch 1536 --sequence-parallel --cost --gpu-price 32000
  ssdtrain project --hidden 8192 --layers 64 --gpus 64 --tensor 8 --batch 512
  ssdtrain project --list                             GPUs, SSDs, models, assumptions

Activations, bandwidth and drives are per GPU. docs/project.md derives every formula.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    add = parser.add_argument
    add(
        "--cases",
        metavar="SET",
        help=f"{', '.join(each.value for each in CaseSet)} (default: figure-5.10)",
    )
    _add_system(parser.add_argument_group("a system of your own"))
    drives = parser.add_argument_group("drives and assumptions").add_argument
    drives("--ssd", default="d7-p5620", help="drive (default: d7-p5620)")
    of_gpu = "drives a GPU (default: 4)"
    drives("--ssds", type=count_argument, default=4, metavar="N", help=of_gpu)
    drives(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a named assumption; may be given several times (see --list)",
    )
    drives("--cost", action="store_true", help="add the cost table")
    span = "span of the cost table (default: 3)"
    drives("--years", type=positive_argument, default=3.0, help=span)
    price = "price of one GPU"
    drives("--gpu-price", type=positive_argument, metavar="USD", help=price)
    add("--plot", metavar="PNG", help="plot as Figure 5.10 does")
    add("--json", action="store_true", help="print JSON, no tables")
    add("--list", action="store_true", help="print the tables of data")


def _add_system(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, partial(group.add_argument, type=count_argument)
    add("--gpu", help="GPU (default: a100-pcie)")
    add("--model", help="a model of the table (see --list)")
    count("--hidden", help="or its size: hidden dimension,")
    count("--layers", help="layers,")
    count("--heads", help="heads (default: hidden / 128),")
    count("--sequence", help="tokens a sequence (2048)")
    count("--gpus", default=8, help="GPUs in all (default: 8)")
    count("--tensor", default=1, help="tensor parallelism")
    count("--pipeline", default=1, help="pipeline stages")
    count("--chunks", default=1, help="model chunks a GPU")
    divided = "divide norms and dropouts too"
    add("--sequence-parallel", action="store_true", help=divided)
    add("--zero3", action="store_true", help="shard the training state")
    count("--batch", help="sequences a step (default: 16 a GPU)")
    count("--micro-batch", default=1, help="sequences at once")
    reached = "reached TFLOP/s a GPU (default: peak x efficiency)"
    add("--tflops", type=positive_argument, help=reached)
    of_steps = "--tflops is of whole steps: add no communication and no bubble"
    add("--end-to-end", action="store_true", help=of_steps)


def run(args: argparse.Namespace) -> int:
    """Project and print. Raises ConfigError, OSError: impossible settings."""
    assume = Assumptions().changed(args.assume)
    if args.list:
        _print_list(args.json)
        return 0
    rows = _rows(args, assume)
    if args.plot:
        plot_projection(rows, args.plot)
    if args.json:
        plain = {"assumptions": asdict(assume), "rows": [row.as_dict() for row in rows]}
        print(json.dumps(plain, indent=1))
        return 0
    show_tables(projection_table(rows))
    if args.cost:
        show_tables(cost_table(rows, args.years))
    return 0


def _rows(args: argparse.Namespace, assume: Assumptions) -> list[CaseRow]:
    ssd = find_row(SSDS, args.ssd, "SSD")
    rows = []
    for case in _cases(args):
        found = project(case, assume)
        drives = wear(found, ssd, args.ssds, assume)
        row = CaseRow(found=found, drives=drives)
        if args.cost:
            row = replace(
                row,
                cost=cost_of_drives(found, drives, args.years, assume),
                needs=tuple(fewest(found, each, args.years, assume) for each in SSDS),
            )
        rows.append(row)
    return rows


def _cases(args: argparse.Namespace) -> tuple[Case, ...]:
    gpu = find_row(GPUS, args.gpu or "a100-pcie", "GPU")
    if args.gpu_price is not None:
        gpu = replace(gpu, price_usd=args.gpu_price)
    own = args.model is not None or args.hidden is not None
    if args.cases is not None and own:
        raise ConfigError("--cases and a system of your own exclude one another")
    if not own:
        _refuse_unused(args)
        which = CaseSet.FIGURE_5_10 if args.cases is None else parse_set(args.cases)
        return cases(which, gpu)
    return (_own_case(args, gpu),)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raise ConfigError for settings of a system of one's own without a model."""
    parser = argparse.ArgumentParser()
    _add_system(parser.add_argument_group())
    own = vars(parser.parse_args([]))
    given = [
        f"--{name.replace('_', '-')}"
        for name, default in own.items()
        if name != "gpu" and getattr(args, name) != default
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)} describe a system of your own, which expects --model, "
            "or --hidden and --layers"
        )


def _own_case(args: argparse.Namespace, gpu: GpuSheet) -> Case:
    model = _model(args)
    parallel = "ZeRO3" if args.zero3 else f"TP {args.tensor} PP {args.pipeline}"
    return Case(
        name=f"{model.name}, {args.gpus} {gpu.name}, {parallel}",
        model=model,
        gpu=gpu,
        gpus=args.gpus,
        tensor=args.tensor,
        pipeline=args.pipeline,
        chunks=args.chunks,
        sequence_parallel=args.sequence_parallel,
        sharding=Sharding.ZERO3 if args.zero3 else Sharding.NONE,
        batch=16 * args.gpus if args.batch is None else args.batch,
        micro_batch=args.micro_batch,
        tflops=args.tflops,
        throughput=Throughput.END_TO_END if args.end_to_end else Throughput.KERNEL,
    )


def _model(args: argparse.Namespace) -> TransformerShape:
    if args.model is not None:
        if args.hidden or args.layers or args.heads:
            raise ConfigError("--model and --hidden, --layers, --heads exclude another")
        model = find_row(MODELS, args.model, "model")
        return replace(model, sequence=args.sequence) if args.sequence else model
    if args.layers is None:
        raise ConfigError("a model of your own expects --hidden and --layers")
    return TransformerShape(
        name=f"h{args.hidden}-l{args.layers}",
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads or max(1, args.hidden // 128),
        sequence=args.sequence or TransformerShape.sequence,
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _print_list(as_json: bool) -> None:
    tables = {
        "gpus": [gpu.as_dict() for gpu in GPUS],
        "ssds": [{**asdict(ssd), "price_usd": ssd.price_usd} for ssd in SSDS],
        "models": [asdict(model) for model in MODELS],
        "assumptions": [
            {"name": name, "value": each}
            for name, each in asdict(Assumptions()).items()
        ],
    }
    if as_json:
        print(json.dumps(tables, indent=1))
        return
    for title, rows in tables.items():
        cells = [[_cell(value) for value in row.values()] for row in rows]
        show_tables(figures_table(title, [*rows[0]], cells, words=len(rows[0])))
