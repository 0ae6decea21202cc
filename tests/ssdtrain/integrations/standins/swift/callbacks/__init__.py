"""The table of callbacks of ms-swift 4.6: a name, and what makes a callback."""

from collections.abc import Callable
from typing import Any

callbacks_map: dict[str, Callable[[Any, Any], Any]] = {}
