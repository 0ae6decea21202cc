"""`ssdtrain train | plan | rok | doctor | project`: the command line.

`train` composes a Hydra config and runs the trainer that it names; the others are
mounted as they are. Exit status: 0 success, 1 the run ended and its verdict is bad,
2 the input cannot work.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from ssdtrain.counters import Span
from ssdtrain.errors import AttachError, ConfigError
from ssdtrain.report.memory import draw
from ssdtrain.report.table import render
from ssdtrain.report.trace import write_trace

EXAMPLES = """examples:
  ssdtrain train                                      a laptop's GPT, two ranks, SSD
  ssdtrain train host=plain offload=host              one process, pinned host memory
  ssdtrain train size=small offload.directory=/mnt/nvme0 train.steps=100
  ssdtrain train --config my.yaml                     your own root config
"""

# Commands of other rooms: their module offers HELP, add_arguments(parser), run(args).
MOUNTED: Mapping[str, str] = {
    "plan": "ssdtrain.report.plan_command",
    "rok": "ssdtrain.report.rok_command",
    "doctor": "ssdtrain.machine.command",
    "project": "ssdtrain.project.command",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; a test freezes its options."""
    parser = _Parser(prog="ssdtrain", description="Train within GPU memory.")
    # DeepSpeed's launcher inserts --local_rank=N right after the module's name; the
    # rank itself is read from the environment.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train, and compare with the same run without ssdtrain",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument(
        "--config",
        default="ssdtrain.yaml",
        metavar="FILE",
        help="a YAML file, or the name of a packaged one (default: ssdtrain.yaml)",
    )
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Hydra overrides"
    )
    train.set_defaults(run=_train)
    for name, module in MOUNTED.items():
        home = import_module(module)
        mounted = commands.add_parser(name, help=home.HELP)
        home.add_arguments(mounted)
        mounted.set_defaults(run=home.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    args.words = [word for word in words if not word.startswith("--local_rank")]
    try:
        return int(args.run(args) or 0)
    except (ConfigError, AttachError) as error:
        print(f"ssdtrain: {error}", file=sys.stderr)
        return 2


def _train(args: argparse.Namespace) -> int:
    from hydra.errors import HydraException

    from ssdtrain.train.compose import compose_config

    try:
        config = compose_config(args.config, args.overrides)
    except HydraException as error:
        cause = f"\n{error.__cause__}" if error.__cause__ else ""
        print(f"ssdtrain: {error}{cause}", file=sys.stderr)
        return 2
    trainer = build_trainer(config)
    to_start = getattr(trainer, "ranks_to_start", int)()
    if to_start:
        from ssdtrain.train.launch import start_ranks

        return start_ranks(to_start, args.words)
    result = trainer.run()
    if result is None:
        return 0
    return _conclude(result, str(config.run_directory))


def build_trainer(config: Any) -> Any:
    """The trainer that `trainer._target_` names.

    A class with `from_config` is given the whole config as plain values; any other is
    instantiated by Hydra from the keys beside `_target_`. It offers `run()`.
    """
    from hydra.utils import get_class, instantiate

    from ssdtrain.train.compose import values_of

    values = values_of(config)
    trainer = values.get("trainer")
    target = trainer.get("_target_") if isinstance(trainer, Mapping) else None
    try:
        kind = get_class(str(target))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"trainer._target_ expects the path of a class, got {target!r} ({error})"
        ) from error
    if hasattr(kind, "from_config"):
        return kind.from_config(values)
    return instantiate(config.trainer)


def _conclude(result: Mapping[str, Any], run_directory: str) -> int:
    """Write and show what happened, on the first rank; the status is everybody's."""
    from ssdtrain.train.ranks import Ranks

    if Ranks.from_environment().is_first:
        directory = Path(run_directory)
        directory.mkdir(parents=True, exist_ok=True)
        values = dict(result)
        recorded = values.pop("recorded", None)
        text = json.dumps(values, indent=1)
        (directory / "result.json").write_text(text + "\n", encoding="utf-8")
        if recorded is not None:
            _draw(recorded, values["peak_of"], directory)
            Console().print(render(values))
        print(f"written to {directory}")
    return 0 if result.get("ok", True) else 1


def _draw(recorded: Mapping[str, Any], what: str, directory: Path) -> None:
    """The pictures: memory over a step, and the time line if one was recorded."""
    memory = json.dumps(recorded["memory"])
    (directory / "memory.json").write_text(memory, encoding="utf-8")
    draw(recorded["memory"], what, directory / "memory.png")
    ranks = [[Span(*span) for span in spans] for spans in recorded["spans"]]
    if any(ranks):
        write_trace(ranks, directory / "trace.json")
