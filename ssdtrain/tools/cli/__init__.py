"""`ssdtrain train | report | plan | rok | doctor | project | ...`: the command line.

`train` composes a Hydra config and runs the trainer that it names; the others are
mounted as they are. Exit status: 0 success, 1 the run ended and its verdict is bad,
2 the input cannot work, 130 and 143 stopped by SIGINT and SIGTERM.
"""

import argparse
import os
import re
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from ssdtrain import __version__
from ssdtrain.errors import AttachError, ConfigError
from ssdtrain.quantities import did_you_mean
from ssdtrain.tools.arguments import reason


class Command(NamedTuple):
    """A module that offers add_arguments(parser) and run(args), and what it is for."""

    module: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        ".cli.train", "train, and compare with the same run without ssdtrain"
    ),
    "fits": Command(
        ".report.fits_command",
        "will it fit, how fast, and what is the best way to train it",
    ),
    "search": Command(
        ".search.search_command",
        "how to lay a model out over GPUs: data, tensor, pipeline, ZeRO, micro-batch",
    ),
    "report": Command(
        ".report.page_command",
        "one HTML page of a run, or of several beside one another",
    ),
    "plan": Command(
        ".report.plan_command",
        "where each saved tensor should rest: placements, predicted step and peak",
    ),
    "rok": Command(
        ".report.rok_command",
        "recompute, offload or keep: peak against throughput over batch sizes",
    ),
    "doctor": Command(
        ".machine.command",
        "what this machine can do: GPUs, links, SSDs, limits, versions",
    ),
    "project": Command(
        ".project.command",
        "what a cluster would need of SSDs: bandwidth, lifespan, micro-batch, cost",
    ),
    "foresight": Command(
        ".report.foresight_command",
        "predict a training step from its operators, without running it",
    ),
    "graph": Command(
        "pydirect.traversal.command",
        "traverse a graph of a file: bfs, sssp, components, pagerank",
    ),
    "env": Command(
        ".cli.env", "what a shell sets so that any launcher starts with the malloc hook"
    ),
    "paths": Command(
        ".cli.paths", "where the packaged configs, launch wrappers and recipes are"
    ),
}
_OURS = frozenset({"ssdtrain", "pydirect", "hector"})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = f"; {self.prog} --help has all of them, and examples"
        print(f"{self.prog}: {message}{hint}", file=sys.stderr)
        raise SystemExit(2)


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of every command; of `only` one, "" for none: modules load
    torch."""
    parser = _Parser(prog="ssdtrain", description="Train within GPU memory.")
    # DeepSpeed's launcher inserts --local_rank=N right after the module's name; the
    # rank itself is read from the environment.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--version", action="version", version=f"ssdtrain {__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if only in (None, name):
            home = import_module(module, "ssdtrain.tools")
            home.add_arguments(command)
            command.set_defaults(run=home.run, parser=command)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; overrides of `train` may stand anywhere."""
    plain = (word for word in words if not word.startswith("-") and not word.isdigit())
    named = next(plain, "")
    if named and named not in COMMANDS:
        raise ConfigError(_unknown_command(named))
    parser = build_parser(named)
    args, rest = parser.parse_known_args(words)
    overrides = [word for word in rest if not word.startswith("-")]
    if overrides != rest or (rest and not hasattr(args, "overrides")):
        unknown = next((word for word in rest if word not in overrides), rest[0])
        known = re.findall(r"--[\w-]+", args.parser.format_help())
        near = did_you_mean(unknown, known)
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}{near}")
    if rest:
        args.overrides = [*args.overrides, *overrides]
    return args


def _unknown_command(word: str) -> str:
    """Return what to say of a first word that is no command."""
    near = did_you_mean(word, COMMANDS)
    if "=" in word:
        near = f"; settings stand behind a command: ssdtrain train {word}"
    return f"unknown command {word}{near}\ncommands: {', '.join(COMMANDS)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"ssdtrain {__version__}")
        return 0
    if not words:
        build_parser("").print_help(sys.stderr)
        return 2
    args = None
    try:
        args = parse(words)
        args.words = [word for word in words if not word.startswith("--local_rank")]
        code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _reader_is_gone():  # a pipe of the command's own
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or the interpreter fails at its end
        return 128 + signal.SIGPIPE
    except (ConfigError, AttachError, OSError, ModuleNotFoundError) as error:
        if (told := _told(error, args)) is None:
            raise
        print(f"ssdtrain: {told}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # Ctrl-C reaches every rank
            print(f"ssdtrain {' '.join(words[:1])}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _told(error: Exception, args: argparse.Namespace | None) -> str | None:
    """Return what to say of input that cannot work; None: the error is another one."""
    if isinstance(error, OSError):
        # No option of `train` names the files that a run reads and writes.
        return None if args is None or args.command == "train" else reason(error, args)
    if not isinstance(error, ModuleNotFoundError):
        return str(error)
    if error.name is None or error.name.partition(".")[0] in _OURS:
        return None
    return (
        f"the package {error.name} is missing in {sys.prefix}; install ssdtrain again "
        "with what it needs, as `python -m pip install '.[train]'` does in a checkout"
    )


def _reader_is_gone() -> bool:
    """Return whether nobody reads standard output, as after `| head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in output.poll(0))
