"""Pages name files, members of classes and notes that the code has."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.arch.test_layers import nodes_of
from tests.docs.pages import ROOT, pages

PACKAGES = ("ssdtrain", "pydirect", "hector")
PATH = re.compile(
    rf"`((?:{'|'.join(PACKAGES)}|tests|configs|recipes|launch|docs)/[\w/.-]+)`"
)
SHORT = re.compile(r"`([\w/]+\.(?:py|c|cu|toml|yaml))`")
FOR_CONTRIBUTORS = ("CONTRIBUTING.md", "docs/layout.md")
"""Pages whose short paths, `storage/base.py`, are the code's own."""
MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)")
NOTE = re.compile(r"\[Note: ([^\]]+)\]")
NO_NAMES = ("ssdtrain/stall_ms", "...")
"""What looks like one: a metric, an example of a note."""


@cache
def endings() -> set[str]:
    """All files of the code, its tests and recipes, by whatever ends their paths."""
    tops = (*PACKAGES, "tests", "recipes", "configs")
    files = [path for top in tops for path in (ROOT / top).rglob("*.*")]
    files += ROOT.glob("*.toml")
    parts = (file.relative_to(ROOT).parts for file in files)
    return {"/".join(part[at:]) for part in parts for at in range(len(part))}


@cache
def sources() -> dict[Path, str]:
    files = (file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))
    return {file: file.read_text(encoding="utf-8") for file in files}


@cache
def code() -> str:
    """All of it, its white space as single spaces."""
    return " ".join(" ".join(sources().values()).split())


@cache
def members() -> dict[str, set[str]]:
    """Of all classes of one name: what they define or set on `self`."""
    found: dict[str, set[str]] = {}
    for file in sources():
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(_defined(node))
    return found


def _defined(of: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(of):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def gone(text: str) -> list[str]:
    """What a page names that is not there."""
    paths = (path for path in PATH.findall(text) if "NAME" not in path)
    missing = [path for path in paths if not (ROOT / path).exists()]
    known = members()
    missing += [
        f"{owner}.{name}"
        for owner, name in MEMBER.findall(text)
        if owner in known and name not in known[owner]
    ]
    notes = (" ".join(note.split()) for note in NOTE.findall(text))
    missing += [note for note in notes if f"[Note: {note}]" not in code()]
    return [name for name in missing if name not in NO_NAMES]


def test_what_pages_name_is_there() -> None:
    for page in (ROOT / "CONTRIBUTING.md", *pages()):
        assert not gone(page.read_text(encoding="utf-8")), page.name


def test_short_paths_are_there() -> None:
    for page in FOR_CONTRIBUTORS:
        named = SHORT.findall((ROOT / page).read_text(encoding="utf-8"))
        assert named and not set(named) - endings(), page
    assert "storage/base.py" in endings() and "storage/no_such.py" not in endings()


def test_what_is_gone_is_found() -> None:
    text = "`ssdtrain/nowhere.py`, `TensorCache.nothing_such`, [Note: no such note]"
    assert len(gone(text)) == 3
    assert not gone("`ssdtrain/api.py`, `TensorCache.unpack`, [Note: sizes]")
