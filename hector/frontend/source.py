"""The source of a layer."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from hector.frontend.values import FrontendError


class UnsupportedPythonError(FrontendError):
    """Python that the compiler does not read; names the file and line."""


class LayerSource(NamedTuple):
    """A function's text and where it stands."""

    tree: ast.FunctionDef
    file: str
    first: int
    """Number of its first line in the file."""
    lines: list[str]


def parse(function: Callable[..., Any]) -> LayerSource:
    """The source of a function; UnsupportedPythonError if there is none."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as missing:
        raise UnsupportedPythonError(
            f"the source of {function!r} is not available; define it in a file"
        ) from missing
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise UnsupportedPythonError(f"expected a function, got {function!r}")
    file = inspect.getsourcefile(function) or "<unknown>"
    return LayerSource(tree, file, first, lines)
