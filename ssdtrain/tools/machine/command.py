"""`ssdtrain doctor`: arguments in, text or JSON out."""

import argparse
import json
import sys

from ssdtrain.errors import ConfigError
from ssdtrain.tools.arguments import positive_argument, reason, show, size_argument
from ssdtrain.tools.machine.copies import CopyBudget
from ssdtrain.tools.machine.doctor import Examination, Request, examine, parts
from ssdtrain.tools.machine.findings import Level
from ssdtrain.tools.machine.links import LINK_FILE
from ssdtrain.tools.machine.ssd import SsdBudget
from ssdtrain.tools.progress import Progress

EXAMPLES = """examples:
  ssdtrain doctor                                     facts, and host or GPU copies
  ssdtrain doctor --directory /mnt/nvme0              also measures that drive
  ssdtrain doctor --directory /mnt/nvme0 --save links.json
                                                      the file the planner reads
  ssdtrain doctor --no-measure --json                 facts only, for a script

A measurement writes at most --max-write-bytes to each directory, takes about
--max-seconds for each, and leaves no file behind. Exit status: 0, or 1 when a
finding is a problem.
"""
WIDE_COLUMNS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    add = parser.add_argument
    add(
        "--directory",
        action="append",
        default=[],
        metavar="DIR",
        help="a directory that is to hold activations; may be given several times",
    )
    add("--save", metavar="FILE", help="write the measured curves (JSON) to FILE")
    add("--plot", metavar="PNG", help="plot the measured curves")
    add("--json", action="store_true", help="print JSON, no tables")
    add("--no-measure", action="store_true", help="facts only: copy and write nothing")
    add(
        "--max-write-bytes",
        type=size_argument,
        default=SsdBudget().max_bytes,
        metavar="BYTES",
        help="bytes written to each directory at most, such as 2GB (default: 4GiB)",
    )
    add(
        "--max-seconds",
        type=positive_argument,
        default=SsdBudget().max_seconds,
        metavar="S",
        help="seconds for each directory, and for each GPU (default: 20)",
    )


def run(args: argparse.Namespace) -> int:
    """Examine and print; 0, 1 if a finding is a problem, 2 for impossible settings."""
    try:
        request = _request(args)
        # Each part is said as it begins: it may take half a minute.
        with Progress(parts(request), interval_s=0.0) as progress:
            found = examine(request, progress.part)
        if args.save:
            LINK_FILE.write(args.save, found.links)
        if args.plot:
            from ssdtrain.tools.machine.render import plot_links

            plot_links(found.links, args.plot)
    except (ConfigError, ValueError, ImportError, OSError) as error:
        print(f"ssdtrain doctor: {reason(error, args)}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        _print_tables(found)
    return int(any(one.level is Level.PROBLEM for one in found.findings))


def _request(args: argparse.Namespace) -> Request:
    if args.no_measure and (args.save or args.plot):
        raise ConfigError(
            "--save and --plot need measured curves, got --no-measure; leave one out."
        )
    return Request(
        directories=tuple(args.directory),
        measure=not args.no_measure,
        copy=CopyBudget(max_seconds=args.max_seconds),
        ssd=SsdBudget(max_bytes=args.max_write_bytes, max_seconds=args.max_seconds),
    )


def _print_tables(found: Examination) -> None:
    from rich.console import Console

    from ssdtrain.tools.machine.render import tables

    # A pipe has no width; 80 columns would cut the cells.
    console = Console(width=None if sys.stdout.isatty() else WIDE_COLUMNS)
    for table in tables(found):
        console.print(table)
