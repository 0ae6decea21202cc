#!/usr/bin/env python3
"""Write docs/settings.md from the dataclasses that hold the settings: `make settings`.

A test compares the page with what this writes.
"""

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from ssdtrain.config import OffloadConfig
from ssdtrain.packaged import packaged_directory
from ssdtrain.train.mcore.parallel import Parallel
from ssdtrain.train.settings import (
    DataSettings,
    EngineSettings,
    ModelSettings,
    TrainSettings,
)

PAGE = Path(__file__).with_suffix(".md")
GROUPS: tuple[tuple[str, type, str], ...] = (
    (
        "offload",
        OffloadConfig,
        "Also the keywords of `ssdtrain.offload(model, ...)`, of `OffloadCallback` and "
        "of `LightningCallback`, and the fields of `ssdtrain.OffloadConfig`.",
    ),
    ("model", ModelSettings, "The transformers of `ssdtrain train`."),
    ("engine", EngineSettings, "Who runs the training step, on how many ranks."),
    ("parallel", Parallel, "How `engine=megatron` spreads a model."),
    ("data", DataSettings, "Which text is read."),
    ("train", TrainSettings, "The loop."),
)
HEAD = """# Settings

<!-- Written by docs/settings.py (`make settings`) from the dataclasses; edit those. -->

Every setting of `ssdtrain train` is `group.key=value`, of `ssdtrain.offload` a keyword. The same text is understood in
Python, in YAML and on the command line:

| kind | written as |
|--|--|
| bytes | `1048576`, `1e9`, `"512MB"`, `"8GB"` (10^9), `"8GiB"` (2^30) |
| bytes of a memory | also a percentage of it: `"80%"` |
| fraction | `0.01` or `"1%"` |
| path | text or `Path`, `~` expanded; a list where several may be given |

An unknown key or choice is refused with the nearest name there is.

| at the root | meaning |
|--|--|
| `run_directory` | where this run's files go; by default a new directory below `runs/`, named by time and `name` |
| `name` | the label in that directory's name |
| `resume` | a run to go on with: `latest`, a name below `runs/`, or a path |
| `preload` | whether the run starts with [the malloc hook](storage.md#the-malloc-hook): `auto`, where it is of use, `always` or `never` |
| `numa` | whether each rank runs on its GPU's NUMA node, with its pinned memory and I/O threads: `auto`, where there are several nodes and the launcher has not bound it, or `never` |
| `progress` | a live line while it runs (`--quiet` turns it off) |
"""


def docstrings(cls: type) -> dict[str, str]:
    """The text under each field of a class, or under each member of an enum."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    found: dict[str, str] = {}
    body = tree.body  # type: ignore[attr-defined]
    for declared, below in pairwise(body):
        if isinstance(declared, ast.AnnAssign):
            name = ast.unparse(declared.target)
        elif isinstance(declared, ast.Assign):
            name = ast.unparse(declared.targets[0])
        else:
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[name] = " ".join(str(below.value.value).split())
    return found


def default_of(field: "Field[Any]") -> str:
    """The default as it would be written; empty where a value is required."""
    value = field.default
    if value is MISSING:
        return "required"
    if isinstance(value, Enum):
        value = value.value
    return "`null`" if value is None else f"`{value}`".replace("()", "[]")


def choices_of(field: "Field[Any]") -> str:
    """What an enum's members mean, one after the other."""
    kind = field.type
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        return ""
    texts = docstrings(kind)
    parts = [
        f"`{member.value}`: {texts[member.name]}"
        for member in kind
        if member.name in texts
    ]
    return " " + " ".join(parts) if parts else ""


def table(cls: type) -> list[str]:
    """A row for every field."""
    texts = docstrings(cls)
    rows = ["| key | default | meaning |", "|--|--|--|"]
    for field in fields(cls):
        meaning = f"{texts[field.name]}{choices_of(field)}".replace("|", "\\|")
        rows.append(f"| `{field.name}` | {default_of(field)} | {meaning} |")
    return rows


def choices(group: str) -> str:
    """The packaged files of a group."""
    found = sorted(p.stem for p in (packaged_directory() / group).glob("*.yaml"))
    names = ", ".join(f"`{name}`" for name in found if not name.startswith("_"))
    return f"Choices: {names}."


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for group, cls, about in GROUPS:
        lines += [f"## {group}", "", f"{about} {choices(group)}", ""]
        lines += [*table(cls), ""]
    lines += ["## size", "", f"Width and depth of the model. {choices('size')}", ""]
    about = (
        "Graph trainers, in place of the language model; their keys are `trainer.*`."
    )
    lines += ["## gnn", "", f"{about} {choices('gnn')}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
