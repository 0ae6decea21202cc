"""From layer code to programs: `layer` is the door, `interpreter` reads the source,
`calls` and `functions` give calls a meaning, `values` are what names stand for."""

from hector.frontend.layer import CompiledLayer, Prepared, compile
from hector.frontend.source import UnsupportedPythonError
from hector.frontend.values import FrontendError

__all__ = [
    "CompiledLayer",
    "FrontendError",
    "Prepared",
    "UnsupportedPythonError",
    "compile",
]
