"""A run's directory: its name, what is recorded about it, and how it is gone on from.

runs/2026-11-22T18-59-07-gpt-ssd/
    config.yaml       the composed config, interpolations resolved
    run.json          command, versions, git state, machine, status
    log.txt           what ssdtrain logged; log-rank1.txt and so on: other ranks
    metrics.jsonl     one line a step (resumed runs append)
    result.json       the verdict and the table's figures
    checkpoints/      where `train.checkpoint_every` or an interrupt wrote one
runs/latest           a link to the newest
"""

import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import ssdtrain
from ssdtrain.errors import ConfigError
from ssdtrain.train.rundirs import LATEST, RUNS, no_such_run
from ssdtrain.versions import installed

CONFIG = "config.yaml"
RECORD = "run.json"
LOG = "log.txt"
CHECKPOINTS = "checkpoints"
CHECKPOINT = "checkpoint.pt"
"""Of trainers that keep one alone, in the run's directory itself."""
PACKAGES = ("torch", "transformers", "deepspeed", "megatron-core", "triton")
# What may differ between a run and its continuation: gradients do not depend on it.
FREE = (
    *("data.cache_directory", "name", "numa", "offload", "preload", "progress"),
    *("resume", "run_directory", "train.checkpoint_every", "train.compare"),
    *("train.resume", "train.steps", "train.tensorboard", "trainer.epochs"),
    *("trainer.progress", "trainer.resume", "trainer.run.checkpoint_epochs"),
    *("trainer.run.output_directory", "trainer.run.progress", "trainer.run.resume"),
    "trainer.run_directory",
)


# How long a run is.
SAVES = ("train.checkpoint_every", "trainer.run.checkpoint_epochs")
"""How often a run saves."""
LENGTHS = ("train.steps", "trainer.epochs")
FINISHED = "finished"
FAILED_VERDICT = "verdict failed"


class RunDirectory:
    """One run's files. Nothing is written before `open`."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        """Whether the run goes on in a directory that holds its beginning."""

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / CHECKPOINTS

    def open(self, config: DictConfig, words: Sequence[str]) -> None:
        """Record what is run, and let `latest` point to it."""
        self.path.mkdir(parents=True, exist_ok=True)
        record = {
            "command": ["ssdtrain", *words],
            "words": list(words),
            "length": dict(lengths(config)),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "status": "running",
            "resumed": self.resumed,
            **facts(),
        }
        earlier = read_record(self.path) if self.resumed else None
        if earlier is not None:
            before = earlier.pop("earlier", [])
            record["words"] = merged_words(earlier["words"], words[1:])
            record["earlier"] = [*before, earlier]
        text = OmegaConf.to_yaml(config, resolve=True)
        self._replace(CONFIG, text)
        self._replace(RECORD, json.dumps(record, indent=1) + "\n")
        _link_latest(self.path)

    def close(self, status: str) -> None:
        """Record how the run ended."""
        record = read_record(self.path)
        if record is not None:
            ended = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            values = {**record, "status": status, "ended": ended}
            self._replace(RECORD, json.dumps(values, indent=1) + "\n")

    def _replace(self, name: str, text: str) -> None:
        """Write a file at once: other ranks may be reading it."""
        partial = self.path / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / name)

    @contextmanager
    def logged(self, rank: int = 0) -> Iterator[None]:
        """Append what ssdtrain logs, and warnings, to the rank's log; without it they
        would go to the terminal, into the first rank's live line."""
        if rank and not self.path.is_dir():  # of a node that does not share the disk
            yield
            return
        name = f"{Path(LOG).stem}-rank{rank}.txt" if rank else LOG
        handler = logging.FileHandler(self.path / name, encoding="utf-8")
        layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(layout))
        logger = logging.getLogger("ssdtrain")
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(min(level, logging.INFO) or logging.INFO)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)
            handler.close()


def new_path(label: str) -> Path:
    """Make the directory of a new run below `runs`; its name is time and label."""
    if Path(label).name != label:
        raise ConfigError(f"name expects a directory's name without '/', got {label!r}")
    stem = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{label}"
    make(RUNS)
    for number in range(1, 1000):
        path = RUNS / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise ConfigError(f"{RUNS / stem} exists a thousand times; set run_directory")


def make(path: Path) -> bool:
    """Make a directory of runs or of one run; return whether it was not there before.
    Raises ConfigError: it cannot be made, or not be written to."""
    there = path.is_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (probe := path / f".{os.getpid()}").touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run_directory={path} cannot be written to ({error.strerror}); set "
            "run_directory to a place where you may make files."
        ) from error
    return not there


def give_up(path: Path) -> None:
    """Remove the directory of a run that could not start, if no file is in it."""
    for directory, _, _ in os.walk(path, topdown=False):
        try:
            os.rmdir(directory)
        except OSError:
            return


def refuse_used(path: Path) -> None:
    """Raise ConfigError if a directory that the user named holds a run already."""
    if (path / RECORD).exists():
        raise ConfigError(
            f"run_directory={path} holds a run already; set resume={path} to go on "
            "with it, or another run_directory."
        )


def find_run(name: str) -> Path:
    """Return the run that `resume=name` means. ConfigError: none; lists the newest."""
    given = Path(name).expanduser()
    for path in (given, RUNS / name):
        if (path / CONFIG).is_file() and (path / RECORD).is_file():
            # `latest` may point elsewhere tomorrow; the rest stays as it was given.
            return path.parent / os.readlink(path) if path.is_symlink() else path
    there = (p.parent.name for p in RUNS.glob(f"*/{RECORD}"))
    raise ConfigError(f"resume={name}: {no_such_run(name, there)}")


def read_record(path: Path) -> dict[str, Any] | None:
    """Return what `run.json` says; None without it. Raises ConfigError: it is
    damaged."""
    try:
        text = (path / RECORD).read_text(encoding="utf-8")
    except OSError:
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path / RECORD} is damaged ({error})") from error
    if not isinstance(values, dict) or not isinstance(values.get("words"), list):
        raise ConfigError(f"{path / RECORD} is damaged: it names no command")
    return values


def lengths(config: DictConfig) -> Iterator[tuple[str, int]]:
    """Return what the config says of the length of its run, by key."""
    for key in LENGTHS:
        value = OmegaConf.select(config, key)
        if isinstance(value, int):
            yield key, value


def finished(path: Path, record: Mapping[str, Any], config: DictConfig) -> str | None:
    """Return, in a line, that the run in `path` has ended and `config` asks for no more
    of it, and how it would; None where there is something to do."""
    if record.get("status") not in (FINISHED, FAILED_VERDICT):
        return None
    before, more = record.get("length"), []
    if not isinstance(before, dict) or not before:
        return None
    for key, value in lengths(config):
        if not isinstance(before.get(key), int) or value > before[key]:
            return None
        if key in FREE:
            more.append(f"{key}={2 * before[key]}")
    told = ", ".join(f"{key}={value}" for key, value in before.items())
    how = f"to train longer: ssdtrain train resume={path} {' '.join(more)}"
    if not more or (OmegaConf.select(config, "trainer.run.num_seeds") or 1) > 1:
        how = "this trainer cannot go on beyond it; a new run can be longer"
    return f"{path} is finished ({told}), nothing to do; {how}{others(path)}"


def has_checkpoint(path: Path) -> bool:
    """Return whether a run's directory holds something to go on from."""
    return (path / CHECKPOINTS).is_dir() or (path / CHECKPOINT).is_file()


def refuse_without_checkpoint(
    path: Path, record: Mapping[str, Any], config: DictConfig
) -> None:
    """Raise ConfigError if a run left nothing to go on from; the text says how the next
    one does."""
    if has_checkpoint(path):
        return
    is_finished = record.get("status") == FINISHED
    key = next((k for k in SAVES if OmegaConf.select(config, k) is not None), None)
    how = "its trainer writes one behind each epoch"
    if key is not None:
        how = f"a run writes them with {key}=N"
        every = OmegaConf.select(OmegaConf.load(path / CONFIG), key)
        if every and not is_finished:
            how = f"it ended before its first ({key}={every})"
    ended = "is finished and " if is_finished else ""
    raise ConfigError(f"{path} {ended}has no checkpoint to go on from; {how}.")


def how_to_go_on(path: Path, config: DictConfig) -> str:
    """Return what to say of a run that ends at once: the command, or why there is none;
    empty for trainers that do not say when they save."""
    if has_checkpoint(path):
        return f"go on with: ssdtrain train resume={path}"
    key = next((k for k in SAVES if OmegaConf.select(config, k) is not None), None)
    if key is None:
        return ""
    every = OmegaConf.select(config, key)
    if every:
        return f"it ended before its first checkpoint ({key}={every}); it starts anew"
    return f"without {key}=N nothing is saved; it starts anew"


MOST_OTHERS = 3
"""So many other runs are named in a message."""


def others(path: Path) -> str:
    """Return, for a message, the newest runs besides `path` that can go on: those of
    its trainer, then of another one."""
    trainer = _trainer_of(path)
    there = sorted((each.parent for each in RUNS.glob(f"*/{RECORD}")), reverse=True)
    found = [
        each
        for each in there
        if not each.is_symlink() and each.name != path.name and has_checkpoint(each)
    ]
    same = [each for each in found if _trainer_of(each) == trainer][:MOST_OTHERS]
    rest = [each for each in found if each not in same][: MOST_OTHERS - len(same)]
    told = f"; runs with a checkpoint: {', '.join(map(str, same))}" if same else ""
    if rest := [each for each in rest if _trainer_of(each) != trainer]:
        told += f"; of another trainer: {', '.join(map(str, rest))}"
    return told


def _trainer_of(path: Path) -> str | None:
    """Return what the config of a run names as its trainer; None if it is damaged."""
    try:
        config = OmegaConf.load(path / CONFIG)
        return str(OmegaConf.select(config, "trainer._target_"))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None


def merged_words(earlier: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return a run's words with the overrides of its continuation over them."""
    fresh = [word for word in now if _is_override(word) and _key(word) != "resume"]
    replaced = {_key(word) for word in fresh}
    kept = [w for w in earlier if not _is_override(w) or _key(w) not in replaced]
    return [*kept, *fresh]


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _key(override: str) -> str:
    return override.split("=")[0].lstrip("+~")


def refuse_other(path: Path, config: DictConfig) -> None:
    """Raise ConfigError unless `config` may go on from the run in `path`: what decides
    the result must be what it was. Nothing has been written by then."""
    there = _flat(OmegaConf.to_container(OmegaConf.load(path / CONFIG)))
    here = _flat(OmegaConf.to_container(config, resolve=True))
    differing = [
        f"{key}: {there.get(key, 'not set')} in the run, {here.get(key, 'not set')} now"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key) and not _is_free(key)
    ]
    if differing:
        listed = "\n  ".join(differing)
        raise ConfigError(
            f"{path} cannot be resumed with other settings:\n  {listed}\n"
            "leave these out, or start a new run."
        )


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found.update(_flat(value, f"{prefix}{key}."))
    return found


def facts() -> dict[str, Any]:
    """Return versions, git state and machine, as plain values."""
    versions = {"ssdtrain": ssdtrain.__version__, "python": platform.python_version()}
    found = {name: installed(name) for name in PACKAGES}
    versions |= {name: version for name, version in found.items() if version}
    return {
        "versions": versions,
        "git": _git(),
        "machine": platform.node(),
        "python": sys.executable,
    }


def _git() -> dict[str, Any] | None:
    """Return the commit of the working directory and whether files differ; None outside
    git."""
    command = "git describe --always --abbrev=40 --exclude=* --dirty=+".split()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    commit = done.stdout.strip()
    return {"commit": commit.rstrip("+"), "changed": commit.endswith("+")}


def _link_latest(path: Path) -> None:
    """Point `runs/latest` at a run below `runs`."""
    if path.parent != RUNS:
        return
    link, fresh = RUNS / LATEST, RUNS / f".{LATEST}-{os.getpid()}"
    if link.is_dir() and not link.is_symlink():
        return  # somebody's directory
    fresh.symlink_to(path.name)
    fresh.replace(link)
