"""The source of a layer."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from hector.frontend_values import FrontendError


class UnsupportedPythonError(FrontendError):
    """Python that the compiler does not read; names the file and line."""


def parse(function: Callable[..., Any]) -> tuple[ast.FunctionDef, str, int]:
    """(syntax tree, file, first line) of a function."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as missing:
        raise UnsupportedPythonError(
            f"the source of {function!r} is not available; define it in a file"
        ) from missing
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise UnsupportedPythonError(f"expected a function, got {function!r}")
    return tree, inspect.getsourcefile(function) or "<unknown>", first
