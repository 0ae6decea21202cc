"""`ssdtrain train | report | plan | rok | doctor | project | ...`: the command line.

`train` composes a Hydra config and runs the trainer that it names; the others are
mounted as they are. Exit status: 0 success, 1 the run ended and its verdict is bad,
2 the input cannot work, 130 and 143 stopped by SIGINT and SIGTERM.
"""

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from ssdtrain import __version__
from ssdtrain.errors import AttachError, ConfigError

# Their modules offer HELP, add_arguments(parser) and run(args).
COMMANDS: Mapping[str, str] = {
    "train": "ssdtrain.cli.train",
    "report": "ssdtrain.report.page_command",
    "plan": "ssdtrain.report.plan_command",
    "rok": "ssdtrain.report.rok_command",
    "doctor": "ssdtrain.machine.command",
    "project": "ssdtrain.project.command",
    "foresight": "ssdtrain.report.foresight_command",
    "paths": "ssdtrain.cli.paths",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of every command; a test freezes its options.

    only: a command whose arguments are enough: the others' modules load torch.
    """
    parser = _Parser(prog="ssdtrain", description="Train within GPU memory.")
    # DeepSpeed's launcher inserts --local_rank=N right after the module's name; the
    # rank itself is read from the environment.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--version", action="version", version=f"ssdtrain {__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        if only not in (None, name):
            commands.add_parser(name)
            continue
        home = import_module(module)
        command = commands.add_parser(name, help=home.HELP, description=home.HELP)
        home.add_arguments(command)
        command.set_defaults(run=home.run)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; overrides of `train` may stand before, between and behind its
    options, which argparse allows for no subcommand."""
    named = next((word for word in words if not word.startswith("-")), None)
    parser = build_parser(named if named in COMMANDS else None)
    args, rest = parser.parse_known_args(words)
    overrides = [word for word in rest if not word.startswith("-")]
    if overrides != rest or (rest and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *overrides]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"ssdtrain {__version__}")
        return 0
    args = parse(words)
    args.words = [word for word in words if not word.startswith("--local_rank")]
    try:
        return int(args.run(args) or 0)
    except (ConfigError, AttachError) as error:
        print(f"ssdtrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"ssdtrain {args.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
