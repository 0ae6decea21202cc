"""`ssdtrain doctor`: arguments in, text or JSON out."""

import argparse
import json

from ssdtrain.errors import ConfigError
from ssdtrain.tools.arguments import positive_argument, show, size_argument
from ssdtrain.tools.machine.copies import CopyBudget
from ssdtrain.tools.machine.doctor import Wanted, examine, parts
from ssdtrain.tools.machine.findings import Level
from ssdtrain.tools.machine.links import LINK_FILE
from ssdtrain.tools.machine.ssd import SsdBudget
from ssdtrain.tools.printed import show_tables
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
    """Examine and print; 0, or 1 if a finding is a problem. Raises ConfigError,
    OSError: impossible settings."""
    from ssdtrain.tools.machine.render import plot_links, tables

    request = _request(args)
    # Each part is said as it begins: it may take half a minute.
    with Progress(parts(request), interval_s=0.0) as progress:
        found = examine(request, progress.part)
    if args.save:
        LINK_FILE.write(args.save, found.links)
    if args.plot:
        plot_links(found.links, args.plot)
    if args.json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        show_tables(*tables(found))
    return int(any(one.level is Level.PROBLEM for one in found.findings))


def _request(args: argparse.Namespace) -> Wanted:
    if args.no_measure and (args.save or args.plot):
        raise ConfigError(
            "--save and --plot need measured curves, got --no-measure; leave one out."
        )
    return Wanted(
        directories=tuple(args.directory),
        measure=not args.no_measure,
        copy=CopyBudget(max_seconds=args.max_seconds),
        ssd=SsdBudget(max_bytes=args.max_write_bytes, max_seconds=args.max_seconds),
    )
