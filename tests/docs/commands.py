"""What a command of a page would do, without doing it."""

import io
import re
import runpy
import shlex
import sys
import warnings
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

from ssdtrain.tools.cli import build_parser, parse
from ssdtrain.tools.cli.sweep import combinations
from ssdtrain.train.compose import compose_config
from ssdtrain.train.targets import build_trainer
from tests.docs.pages import ROOT

BUILTINS = (".", "cd", "eval", "export", "git", "mkdir", "source")
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
ASSIGNMENT = re.compile(r"[A-Z_0-9]+=")
LAUNCHERS = ("deepspeed", "torchrun", "slurm")


class CommandError(AssertionError):
    """A command of a page that could not have worked."""


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words; comments and continuations resolved."""
    joined = text.replace("\\\n", " ")
    inner = SUBSTITUTION.findall(joined)
    lines = [*inner, *SUBSTITUTION.sub("substituted", joined).splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    return [_without_assignments(words) for words in found if words]


def _without_assignments(words: list[str]) -> list[str]:
    rest = list(words)
    if rest and rest[0] == "$":
        rest.pop(0)
    while rest and ASSIGNMENT.match(rest[0]):
        rest.pop(0)
    return rest


def check(words: list[str]) -> None:
    """Parse one command with the parser that would get it.

    Raises:
        CommandError, SystemExit or the parser's own error: it would not work.
    """
    program = words[0] if words else "cd"
    if program == "ssdtrain":
        _ssdtrain(words[1:])
    elif program in LAUNCHERS and {"ssdtrain", "--config"} & set(words):
        _launched(words)
    elif program.startswith("recipes/"):
        _recipe(ROOT / program, words[1:])
    elif program in OTHERS:
        OTHERS[program](words[1:])
    elif program not in BUILTINS:
        raise CommandError(f"{program}: unknown here; mark the block not run")


def _launched(words: list[str]) -> None:
    if "ssdtrain" in words:
        _ssdtrain(words[words.index("ssdtrain") + 1 :])
    else:
        _trains(words[words.index("--config") :])


def _ssdtrain(words: list[str]) -> None:
    if words and words[0] == "train":
        _trains(words[1:])
    else:
        build_parser().parse_args(words)


def _trains(words: list[str]) -> None:
    """Compose the config; a language model's settings are checked as well."""
    overrides = [word for word in words if not word.startswith("--n")]
    args = parse(["train", *overrides])
    if args.config != "ssdtrain.yaml":
        return  # the reader's own file
    for job in combinations(args.overrides) if args.multirun else [args.overrides]:
        config = compose_config(args.config, job)
        if not any(word.startswith("gnn=") for word in job):
            build_trainer(config)


def _recipe(path: Path, words: list[str]) -> None:
    text = path.read_text(encoding="utf-8")
    group = text.split('main(["train", "')[1].split('"')[0]
    _trains([group, *words])


def _script(words: list[str]) -> None:
    """Every flag is one of the script's."""
    module = words[0] == "-m"
    name = words[1] if module else words[0]
    if name in ("venv", "pytest", "pip"):
        return
    if name == "recipes.bench":
        name = " ".join(words[1:3])  # each benchmark has its own options
    flags = {w.split("=")[0] for w in words[1 + module :] if w.startswith("--")}
    if not module and not (ROOT / name).exists():
        return  # the reader's own script
    known = _help(name, module)
    unknown = [flag for flag in flags if flag not in known]
    if unknown:
        raise CommandError(f"{name} knows no {unknown}")


@cache
def _help(name: str, module: bool) -> str:
    """What `--help` prints, in this process: torch is loaded once for all scripts."""
    printed = io.StringIO()
    argv, path = sys.argv, list(sys.path)
    name, *benchmark = name.split()
    sys.argv = [name, *benchmark, "--help"]
    sys.path[:0] = [str((ROOT / name).parent), str(ROOT)]
    try:
        with redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if module:
                runpy.run_module(name, run_name="__main__")
            else:
                runpy.run_path(str(ROOT / name), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise CommandError(f"{name} --help ended with {ended.code}") from ended
    finally:
        sys.argv, sys.path[:] = argv, path
    return printed.getvalue()


def _pip(words: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    known = set(re.findall(r"^(\w+) = \[", project, re.M))
    for word in words:
        for part in ("ssdtrain[", ".["):
            if word.startswith(part):
                extras = word.removeprefix(part).rstrip("]").split(",")
                unknown = set(extras) - known
                if unknown:
                    raise CommandError(f"no extra {unknown}")


def _make(words: list[str]) -> None:
    targets = (ROOT / "Makefile").read_text()
    for word in words:
        if f"\n{word}:" not in targets:
            raise CommandError(f"no target {word}")


def _pytest(words: list[str]) -> None:
    missing = [word for word in words if "/" in word and not (ROOT / word).exists()]
    if missing:
        raise CommandError(f"no {missing}")


OTHERS = {
    "make": _make,
    "pip": _pip,
    "pytest": _pytest,
    "python": _script,
    "python3": _script,
}
