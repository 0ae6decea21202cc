"""The recorded interfaces of trainers that the stand-ins keep to. Not a test file.

    PYTHONPATH=.../verl==0.9.1/site-packages \\
        python tests/ssdtrain/integrations/interfaces.py verl

writes what the installed package says of each name that its stand-in has.
"""

import ast
import importlib
import inspect
import json
import sys
from functools import reduce
from pathlib import Path

STANDINS = Path(__file__).with_name("standins")
RECORD = STANDINS / "interfaces.json"
Names = dict[str, list[str]]
"""By name, such as `verl.utils.x:Class.method`: its parameters, in order."""


def of_standin(package: str) -> Names:
    """What a stand-in declares. A dataclass declares its fields."""
    found: Names = {}
    for path in sorted((STANDINS / package).rglob("*.py")):
        parts = path.relative_to(STANDINS).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.update(_names(ast.parse(path.read_text()).body, f"{module}:"))
    return found


def _names(body: list[ast.stmt], prefix: str) -> Names:
    found: Names = {}
    for each in body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("__"):
            given = each.args
            arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            names = [argument.arg for argument in arguments]
            found[prefix + each.name] = [name for name in names if name != "cls"]
        elif isinstance(each, ast.ClassDef):
            name = prefix + each.name
            found[name] = [
                member.target.id
                for member in each.body
                if each.decorator_list
                and isinstance(member, ast.AnnAssign)
                and isinstance(member.target, ast.Name)
            ]
            found.update(_names(each.body, f"{name}."))
    return found


def of_package(names: Names) -> Names:
    """The same names in the installed package.

    Raises:
        AttributeError: it has one of them no more.
    """
    found: Names = {}
    for name in names:
        module, _, attribute = name.partition(":")
        value = reduce(getattr, attribute.split("."), importlib.import_module(module))
        found[name] = list(inspect.signature(value).parameters)
    return found


def recorded() -> dict[str, Names]:
    """By package."""
    found: dict[str, Names] = json.loads(RECORD.read_text())
    return found


if __name__ == "__main__":
    [package] = sys.argv[1:]
    now = recorded() if RECORD.exists() else {}
    now[package] = of_package(of_standin(package))
    RECORD.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
