"""`ssdtrain train`: a composed config in, a run directory out."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from traceback import format_exception
from types import FrameType
from typing import Any

from rich.console import Console

from ssdtrain.counters import Span
from ssdtrain.errors import AttachError, ConfigError
from ssdtrain.plan.plan import PLAN_FILE
from ssdtrain.plan.profile import PROFILE_FILE
from ssdtrain.tools.arguments import show
from ssdtrain.tools.report.pictures import write_memory
from ssdtrain.tools.report.table import render
from ssdtrain.tools.report.trace import write_trace
from ssdtrain.train.rundirs import LATEST

EXAMPLES = """examples:
  ssdtrain train                                      a laptop's GPT, two ranks, SSD
  ssdtrain train engine=plain offload=host              one process, pinned host memory
  ssdtrain train size=small offload.directory=/mnt/nvme0 train.steps=100
  ssdtrain train --config my.yaml                     your own root config
  ssdtrain train --cfg job model=bert                 show the composed config
  ssdtrain train -m offload=host,ssd model=gpt,bert   a run for each combination
  ssdtrain train resume=latest train.steps=200        go on from its checkpoint

Every run has a directory below runs/; runs/latest is a link to the newest. Ctrl-C
finishes the step and, with train.checkpoint_every, writes a checkpoint.
"""

FIRST_RANK_S = 10.0
"""So long the first rank has to refuse what another one refuses."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    show(parser, EXAMPLES)
    add = parser.add_argument
    add(
        "--config",
        default="ssdtrain.yaml",
        metavar="FILE",
        help="a YAML file, or the name of a packaged one (default: ssdtrain.yaml)",
    )
    add("--cfg", choices=["job"], help="print the composed config as YAML and stop")
    add(
        "-m",
        "--multirun",
        action="store_true",
        help="one run for each combination of key=a,b values",
    )
    add("-q", "--quiet", action="store_true", help="no progress, only the result")
    add("--json", action="store_true", help="print result.json instead of a table")
    add("overrides", nargs="*", metavar="key=value", help="Hydra overrides")


def run(args: argparse.Namespace) -> int:
    """Compose, then train, show the config or sweep; the exit status. Raises
    ConfigError: a setting can never work."""
    try:
        return _run(args)
    except ConfigError:
        if os.environ.get("RANK", "0") != "0":
            # Mostly the first rank says the same: then we are ended meanwhile, whether
            # we are its own ranks or a launcher's.
            time.sleep(FIRST_RANK_S)
        raise


def _run(args: argparse.Namespace) -> int:
    from ssdtrain.train.choices import refuse_early

    refuse_early(args.config, args.overrides, to_run=not args.cfg)
    started_by_us = "SSDTRAIN_PARENT" in os.environ
    shown = not (args.quiet or args.json or args.cfg or started_by_us)
    if shown and os.environ.get("RANK", "0") == "0":
        print("ssdtrain: loading torch and the settings ...", flush=True)
    if args.multirun:
        from ssdtrain.tools.cli.sweep import sweep

        return sweep(args, compose)
    config, earlier = _composed(args)
    if args.cfg:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(config), end="")
        return 0
    if earlier is not None and (code := _finished(earlier, config)) is not None:
        return code
    from ssdtrain.tools.cli.env import start_with_hook

    start_with_hook(config, args.words, told=shown)
    if not args.json:
        return _Run(args, config, earlier).run()
    with redirect_stdout(sys.stderr):  # libraries print, too
        return _Run(args, config, earlier).run()


def compose(name: str, overrides: Sequence[str]) -> Any:
    """Return the composed config, without the groups that its trainer does not read.
    Raises ConfigError: an unknown name, a word without a value, or a setting that would
    do nothing; the text has the nearest name."""
    from hydra.errors import HydraException

    from ssdtrain.train.compose import compose_config
    from ssdtrain.train.refused import checked, read_groups_alone, told_by_hydra

    overrides = [checked(word) for word in overrides]
    try:
        config = compose_config(name, overrides)
    except HydraException as error:
        raise ConfigError(told_by_hydra(error, name, overrides)) from error
    read_groups_alone(config, name, overrides)
    return config


def _composed(args: argparse.Namespace) -> "tuple[Any, Path | None]":
    """Return the config, and the directory of the run that it goes on with."""
    from ssdtrain.train import runs

    args.overrides = [_resolved(word) for word in args.overrides]
    asked = [w for w in args.overrides if w.partition("=")[0] == "resume"]
    name = asked[-1].partition("=")[2].strip("'\"") if asked else ""
    if name in ("", "null"):
        config = compose(args.config, args.overrides)
        name = config.get("resume") or ""  # of the user's own file
        if not name:
            return config, None
    # Otherwise not composed alone: its keys may be those of the run's own groups.
    earlier = runs.find_run(str(name))
    record = runs.read_record(earlier)
    if record is None:
        raise ConfigError(f"resume={name}: {earlier} has no {runs.RECORD}")
    try:
        return _continued(earlier, record, args.overrides), earlier
    except ConfigError as error:
        if name != LATEST:
            raise
        which = f"(resume={name} is {earlier}{runs.others(earlier)})"
        raise ConfigError(f"{error}\n{which}") from error


def _continued(earlier: Path, record: Mapping[str, Any], fresh: Sequence[str]) -> Any:
    """Return the config of a run that goes on with `fresh` overrides. Raises
    ConfigError: it has no checkpoint, or cannot go on with these settings."""
    from ssdtrain.train import runs

    began = parse_words(record["words"][1:])
    config = compose(began.config, runs.merged_words(began.overrides, fresh))
    config.run_directory = str(earlier)
    runs.refuse_without_checkpoint(earlier, record, config)
    if "train" in config:
        config.train.resume = str(earlier / runs.CHECKPOINTS)
    elif "resume" in config.trainer:  # a graph trainer goes on in its own directory
        config.trainer.resume = True
    elif "resume" in config.trainer.get("run", {}):
        config.trainer.run.resume = "must"
    runs.refuse_other(earlier, config)
    return config


def _finished(earlier: Path, config: Any) -> int | None:
    """Say so if the run that is to go on has ended; the status that it ended with."""
    from ssdtrain.train import runs

    record = runs.read_record(earlier)
    told = None if record is None else runs.finished(earlier, record, config)
    if record is None or told is None:
        return None
    if os.environ.get("RANK", "0") == "0":
        print(f"ssdtrain: {told}", file=sys.stderr)
    return 0 if record["status"] == runs.FINISHED else 1


def _resolved(override: str) -> str:
    """Return the override with a checkpoint after `runs/latest`, which this run is
    about to point to itself, by the name that stays."""
    key, _, value = override.partition("=")
    if key != "train.resume" or not value or not Path(value).expanduser().is_dir():
        return override
    return f"{key}='{Path(value).expanduser().resolve()}'"


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Return the words after `train`, options and overrides in any order."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_intermixed_args(words)


class _Run:
    """One run of one composed config, on this rank or on ranks of its own."""

    def __init__(
        self, args: argparse.Namespace, config: Any, earlier: Path | None
    ) -> None:
        from ssdtrain.train.ranks import Ranks

        self._args = args
        self._config = config
        self._resumed = earlier is not None
        self._ranks = Ranks.from_environment()
        self._quiet = bool(args.quiet or args.json)
        if self._quiet:
            config.progress = False

    def run(self) -> int:
        """Train and conclude; the exit status."""
        before = signal.signal(signal.SIGTERM, _terminated)
        try:
            return self._run()
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run(self) -> int:
        from ssdtrain.train import runs
        from ssdtrain.train.launch import end_with_parent, start_ranks
        from ssdtrain.train.targets import build_trainer

        end_with_parent()
        path, made = self._choose_directory()
        ready = False
        try:
            self._config.run_directory = str(path)
            graph = "train" not in self._config  # others tell what they prepare
            if graph and self._ranks.is_first and not self._quiet:
                print(f"ssdtrain: preparing {self._label()} ...", flush=True)
            trainer = build_trainer(self._config)
            to_start = getattr(trainer, "ranks_to_start", int)()
            if to_start:
                if not self._quiet:
                    print(f"ssdtrain: {to_start} ranks, {path}", flush=True)
                words = [_resolved(word) for word in self._args.words]
                return start_ranks(to_start, words, str(path))
            self._bind()
            self._prepare(trainer)
            ready = True
        except ConfigError as error:
            _keep_traceback(error, path)
            raise
        finally:
            if made and not ready:
                runs.give_up(path)
        directory = runs.RunDirectory(path, resumed=self._resumed)
        if not self._ranks.is_first:
            with directory.logged(self._ranks.rank):
                return self._train(trainer, path)
        directory.open(self._config, self._args.words)
        status = "failed"
        try:
            with directory.logged():
                code = self._train(trainer, path)
            status = {0: runs.FINISHED, 1: runs.FAILED_VERDICT}.get(code, "stopped")
            return code
        except (KeyboardInterrupt, SystemExit):
            status = "stopped"
            if told := runs.how_to_go_on(path, self._config):
                print(f"ssdtrain: {told}", file=sys.stderr)
            raise
        finally:
            directory.close(status)

    def _bind(self) -> None:
        """Run on the NUMA node of this rank's GPU, unless `numa=never`. Raises
        ConfigError: another value."""
        from ssdtrain.train.settings import Numa, member_of

        if member_of("numa", Numa, self._config.get("numa", "auto")) is Numa.NEVER:
            return
        node = self._ranks.bind()
        if node is not None and not self._quiet:
            print(
                f"ssdtrain: rank {self._ranks.rank} runs on NUMA node {node}, as its "
                "GPU does; numa=never leaves it free",
                flush=True,
            )

    def _choose_directory(self) -> tuple[Path, bool]:
        """Return the run's directory, the same on every rank (given, or chosen by who
        started us, or by the first), and whether this process made it."""
        from ssdtrain.train import runs

        if self._ranks.run_directory is not None:
            return Path(self._ranks.run_directory), False
        first = self._ranks.is_first
        given = self._config.get("run_directory")
        if given is not None:
            path = Path(given).expanduser()
            if not self._resumed and first:
                runs.refuse_used(path)
            return path, first and runs.make(path)
        if self._ranks.world_size == 1:
            return runs.new_path(self._label()), True
        self._ranks.join()
        mine = str(runs.new_path(self._label())) if first else None
        return Path(self._ranks.from_first(mine)), first

    def _prepare(self, trainer: Any) -> None:
        """Let the trainer read its data and build its model. ConfigError: it cannot."""
        from ssdtrain.train.targets import refusal

        try:
            getattr(trainer, "prepare", bool)()
        except (ConfigError, AttachError):
            raise
        except Exception as error:  # whatever libraries raise for data and sizes
            raise refusal(error) from error

    def _label(self) -> str:
        config = self._config
        if config.get("name"):
            return str(config.name)
        chosen = [w.split("=")[1] for w in self._args.overrides if w.startswith("gnn=")]
        if chosen:
            return str(chosen[-1])
        if "train" not in config:  # chosen in the user's file
            own = config.trainer.get("model", config.trainer)
            named = own.get("layer") or str(own.get("_target_", "run"))
            return str(named).rpartition(".")[2].lower()
        model = config.get("model", {}).get("family", "run")
        return f"{model}-{(config.get('offload') or {}).get('target', 'none')}"

    def _train(self, trainer: Any, path: Path) -> int:
        from ssdtrain.train.stop import StoppedError

        try:
            result = trainer.run()
        except StoppedError as stopped:
            self._say_how_to_go_on(stopped, path)
            return 128 + stopped.signum
        return 0 if result is None else self._conclude(result, path)

    def _say_how_to_go_on(self, stopped: Any, path: Path) -> None:
        if not self._ranks.is_first:
            return
        how = f"go on with: ssdtrain train resume={path}"
        if not stopped.checkpoint:
            how = "without train.checkpoint_every=N no step is saved; it starts anew"
            if self._config.train.checkpoint_every:  # the first of two compared runs
                how = "steps without ssdtrain are not saved; it starts anew"
        print(f"ssdtrain: {stopped}; {how}", file=sys.stderr)

    def _conclude(self, result: Mapping[str, Any], directory: Path) -> int:
        """Write and show what happened, on the first rank; the status is
        everybody's."""
        if self._ranks.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            values = dict(result)
            recorded = values.pop("recorded", None)
            if recorded is not None:
                about = ("rank", "step", "peak_bytes")
                values["picture"] = {name: recorded[name] for name in about}
            text = json.dumps(values, indent=1)
            (directory / "result.json").write_text(text + "\n", encoding="utf-8")
            if recorded is not None:
                _draw(recorded, values["peak_of"], directory)
            if self._args.json:
                print(text, file=sys.__stdout__, flush=True)
            else:
                if recorded is not None:
                    Console().print(render(values))
                print(f"written to {directory}")
        return 0 if result.get("ok", True) else 1


def _keep_traceback(error: ConfigError, path: Path) -> None:
    """Write the traceback of what no check foresaw next to the run's files."""
    from ssdtrain.train.targets import UnforeseenError

    if not isinstance(error, UnforeseenError):
        return
    try:
        (path / "error.txt").write_text("".join(format_exception(error)))
    except OSError:
        return
    error.args = (f"{error} (the traceback is in {path / 'error.txt'})",)


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _draw(recorded: Mapping[str, Any], what: str, directory: Path) -> None:
    """Draw the pictures: memory over a step, and the time line if one was recorded."""
    memory = json.dumps(recorded["memory"])
    (directory / "memory.json").write_text(memory, encoding="utf-8")
    title = f"memory over step {recorded['step']} (the last), rank {recorded['rank']}"
    path, peaks = directory / "memory.png", recorded["peak_bytes"]
    try:
        write_memory(recorded["memory"], peaks, what, path, title)
    except ImportError as error:  # a picture less is no reason to lose the run
        from ssdtrain.train.targets import in_a_line

        print(f"ssdtrain: no {path.name}: {in_a_line(error)}", file=sys.stderr)
    for profile, plan in recorded["planned"][:1]:
        if profile is not None:
            PROFILE_FILE.write(directory / "profile.json", profile)
        if plan is not None:
            PLAN_FILE.write(directory / "plan.json", plan)
    ranks = [[Span(*span) for span in spans] for spans in recorded["spans"]]
    if any(ranks):
        write_trace(ranks, directory / "trace.json")
