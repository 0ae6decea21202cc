"""The command line of all benchmarks, read from the signatures of their `main`.

`NAME` is a module below `recipes.bench`. A `main` that asks for a `Bench` has the
options of all: `--out`, `--budget-s`, `--only`, `--again`, `--device`. Its keywords are
options of its own, what its docstring says below `Args:` their help; fields of a
dataclass are options as well.
"""

import argparse
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union

import torch

from recipes.bench.harness.cases import CASES, Case
from recipes.bench.harness.cells import Cells
from recipes.bench.harness.records import RESULTS

NO_CASES = {"report": "harness.report"}


@dataclass
class Bench:
    """What every benchmark may be told."""

    out: Path
    """Results file."""
    budget_s: float = 600.0
    """Start nothing after that."""
    only: tuple[str, ...] = ()
    """Patterns of cells' names."""
    again: tuple[str, ...] = ()
    """Patterns of cells' names: these are measured again."""
    on: str | None = None
    """Device; without it the GPU, or a CPU where there is none."""
    words: tuple[str, ...] = ()
    """The command's, behind the name."""

    def cells(self, settings: dict[str, Any] | None = None) -> Cells:
        """The cells of the results file, as `Cells` says."""
        more = {"only": self.only, "again": self.again}
        return Cells(self.out, self.budget_s, settings, **more)

    @property
    def device(self) -> torch.device:
        """Where to measure."""
        default = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(self.on or default)


class UsageError(ValueError):
    """Options that do not go together, or name nothing; said like a parser's own."""


def run(words: Sequence[str]) -> int:
    """Run the benchmark that the words name; its exit status."""
    if not words or words[0] in ("--list", "--help", "-h"):
        for case in CASES:
            print(f"{case.name:28} {case.seconds:>5} {case.what}")
        print(f"{'report':34} pages of results")
        return 0
    name, *rest = words
    main = importlib.import_module(f"recipes.bench.{NO_CASES.get(name, name)}").main
    parser = parser_of(name, main)
    given = {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in vars(parser.parse_args(rest)).items()
    }
    given["words"] = tuple(rest)
    places, named = [], {}
    hints = typing.get_type_hints(main)
    for each in inspect.signature(main).parameters.values():
        if is_dataclass(hint := hints[each.name]):
            parts = {field.name: given[field.name] for field in fields(hint)}
            places.append(typing.cast(Callable[..., Any], hint)(**parts))
        else:
            named[each.name] = given[each.name]
    try:
        return int(main(*places, **named) or 0)
    except UsageError as error:
        parser.error(str(error))


def parser_of(name: str, main: Callable[..., Any]) -> argparse.ArgumentParser:
    """The parser of a function's arguments; those of a dataclass are its fields."""
    about = ((inspect.getmodule(main) or main).__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m recipes.bench {name}", description=about
    )
    hints = typing.get_type_hints(main)
    for each in inspect.signature(main).parameters.values():
        hint = hints[each.name]
        if not is_dataclass(hint):
            _add(parser, each.name, hint, each.default, _told(main))
            continue
        common: set[str] = set()
        if issubclass(typing.cast(type, hint), Bench):
            common = {field.name for field in fields(Bench)}
            _add_common(parser, name)
        own, told = typing.get_type_hints(hint), _told(hint)
        for field in fields(hint):
            if field.name not in common:
                _add(parser, field.name, own[field.name], field.default, told)
    return parser


def _told(documented: Any) -> dict[str, str]:
    return dict(re.findall(r"^ *(\w+): (.+)$", documented.__doc__ or "", re.M))


def _add(
    parser: argparse.ArgumentParser,
    name: str,
    hint: Any,
    default: Any,
    told: dict[str, str],
) -> None:
    options = options_of(hint) | {"help": told.get(name, "").replace("%", "%%")}
    must = default in (inspect.Parameter.empty, MISSING)
    options |= {"required": True} if must else {"default": default}
    parser.add_argument("--" + name.replace("_", "-"), dest=name, **options)


def _add_common(parser: argparse.ArgumentParser, name: str) -> None:
    case = next((case for case in CASES if case.name == name), Case(name))
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS / f"{case.record}.json", help="results")
    told = "start nothing after that"
    add("--budget-s", type=float, default=case.budget_s, help=told)
    add("--only", nargs="+", default=(), help="patterns of cells' names")
    add("--again", nargs="+", default=(), help="forget these cells (patterns)")
    add("--device", dest="on", help="such as cpu")


def options_of(hint: Any) -> dict[str, Any]:
    """How a parser reads a type: flags, numbers, paths, choices, and tuples of them."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return {"action": "store_true"}
    if origin in (Union, types.UnionType):
        return options_of(next(part for part in parts if part is not type(None)))
    if origin is tuple:
        return {"nargs": "*", **options_of(parts[0])}
    if origin is Literal:
        return {"choices": parts, "type": type(parts[0])}
    return {"type": hint}
