"""Rules that the code does not keep everywhere yet, by how often it breaks them.

A number here may only go down: whoever mends a place lowers it.
"""

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.arch.test_layers import PACKAGES, ROOT, functions, product_files, tree_of

CIRCLES = 0
"""Groups of files that import one another, where imports inside functions and for
types count as well. No group does so while it is imported."""
TWICE = {"ssdtrain": 0, "pydirect": 1, "hector": 12}
"""Public names of classes and functions that stand in several files of a package."""
IN_SEVERAL = 88
"""Likewise in several packages."""
ANYTHING = {"ssdtrain": 17, "pydirect": 1, "hector": 8}
"""Parameters of constructors that are typed `Any`."""
FROM_OUTSIDE = {"ssdtrain": 405, "pydirect": 90, "hector": 49}
"""Assignments to an attribute of another object."""
BY_NAME = {"add_arguments", "run", "main", "imported", "offload"}
"""Found by name in a module: of every command the first three, `imported` of every hook
of integrations/autoload.py; `offload` is the door, and an override of torchtitan's."""

Graph = dict[str, set[str]]
Rule = Callable[[ast.AST], Iterator[str]]


@functools.cache
def modules() -> dict[str, Path]:
    """The product's files by their dotted names."""
    found = {}
    for path in product_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def parts_of(tree: ast.AST, *, at_import: bool) -> Iterator[ast.AST]:
    """The nodes of a tree; at_import: those alone that run when it is imported."""
    lazy = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    left = [tree]
    while left:
        node = left.pop()
        if at_import and (isinstance(node, lazy) or is_for_types(node)):
            continue
        yield node
        # Statements stand in statements.
        if isinstance(node, ast.stmt | ast.mod | ast.excepthandler | ast.match_case):
            left += ast.iter_child_nodes(node)


def imported(name: str, tree: ast.AST, known: set[str], *, at_import: bool) -> set[str]:
    """The modules among `known` that this one imports."""
    package = name if name in PACKAGES else name.rpartition(".")[0]
    found: set[str] = set()
    for node in parts_of(tree, at_import=at_import):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            home = ".".join([*above, *filter(None, [node.module])])
            inside = {f"{home}.{each.name}" for each in node.names}
            found |= inside & known or {home}
    return (found & known) - {name}


def circles(graph: Graph) -> list[set[str]]:
    """Groups of modules each of which reaches all others of its group."""
    reached: Graph = {}
    for start in graph:
        seen: set[str] = set()
        left = [start]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        reached[start] = seen
    rings = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
    }
    return sorted((set(ring) for ring in rings if ring), key=sorted)


def import_graph(*, at_import: bool) -> Graph:
    known = set(modules())
    return {
        name: imported(name, tree_of(path), known, at_import=at_import)
        for name, path in modules().items()
    }


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert circles(import_graph(at_import=True)) == []


def test_circles_by_lazy_imports() -> None:
    found = circles(import_graph(at_import=False))
    assert len(found) == CIRCLES, [sorted(ring) for ring in found]


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set[str]()}
    assert circles(graph) == [{"b", "c"}]


def homes() -> dict[str, set[str]]:
    """Modules by the public names of their classes and functions."""
    found: dict[str, set[str]] = {}
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, path in modules().items():
        for node in tree_of(path).body:
            if isinstance(node, kinds) and node.name[0] != "_":
                found.setdefault(node.name, set()).add(module)
    return {name: found[name] for name in found if name not in BY_NAME}


def test_a_public_name_is_defined_once() -> None:
    twice: Counter[str] = Counter(dict.fromkeys(PACKAGES, 0))
    several = []
    for name, files in homes().items():
        packages = Counter(file.split(".")[0] for file in files)
        twice.update(package for package in packages if packages[package] > 1)
        if len(packages) > 1:
            several.append(name)
    assert dict(twice) == TWICE
    assert len(several) == IN_SEVERAL, sorted(several)


def any_collaborators(tree: ast.AST) -> Iterator[str]:
    """Parameters of constructors that may be anything."""
    for node in functions(tree):
        if node.name == "__init__":
            for each in [*node.args.args, *node.args.kwonlyargs]:
                kind = "" if each.annotation is None else ast.unparse(each.annotation)
                if kind in ("Any", "Any | None"):
                    yield f"line {each.lineno}: {each.arg}"


def assigned(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement assigns to or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        yield from node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target


def from_outside(tree: ast.AST) -> Iterator[str]:
    """Assignments to attributes of others: not of `self`, not of a class by its own
    methods, and not of the context that autograd hands to its functions."""
    for statement in ast.walk(tree):
        for target in assigned(statement):
            for node in ast.walk(target):
                if isinstance(node, ast.Attribute) and not isinstance(
                    node.ctx, ast.Load
                ):
                    owner = ast.unparse(node.value)
                    if owner not in ("self", "cls", "ctx"):
                        yield f"line {node.lineno}: {owner}.{node.attr}"


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [(any_collaborators, ANYTHING), (from_outside, FROM_OUTSIDE)],
    ids=["any", "outside"],
)
def test_how_often_a_rule_is_broken(rule: Rule, numbers: dict[str, int]) -> None:
    found: dict[str, int] = dict.fromkeys(PACKAGES, 0)
    for module, path in modules().items():
        found[module.split(".")[0]] += len(list(rule(tree_of(path))))
    assert found == numbers, "a number only goes down"


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (any_collaborators, "class A:\n  def __init__(self, b: Any): ..."),
        (from_outside, "self.a.b = 1"),
        (from_outside, "x, (y.z, *w.v) = q"),
        (from_outside, "del a.b"),
        (from_outside, "a.b += 1"),
    ],
)
def test_the_rules_find_it(rule: Rule, code: str) -> None:
    assert list(rule(ast.parse(code)))
