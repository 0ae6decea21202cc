"""What no look at a region's code finds."""

from typing import Any


class Behind:
    """Passes on to an object that changes unseen: it says that it is of the standard
    library, into whose objects nobody looks."""

    __module__ = "codecs"
    __slots__ = ("__weakref__", "_object")

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "_object", value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(object.__getattribute__(self, "_object"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._object, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._object[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._object[key] = value


class Owner:
    """Holds a value that may change unseen."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def proxy(self) -> Any:
        """The same, for functions of a region."""
        return Behind(self)
