"""What no look at a region's code finds."""

import weakref
from typing import Any


class Owner:
    """Holds a value that may change unseen."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def proxy(self) -> Any:
        """The same, for functions of a region: looks end at weak references."""
        return weakref.proxy(self)
