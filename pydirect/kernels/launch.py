"""What a launch needs of a compiled module, whoever compiled it."""

import ctypes
from typing import Any, Protocol


class LaunchableKernel(Protocol):
    """One function of a module."""

    def launch(
        self, *, grid: int, block: int, arguments: ctypes.Structure, stream: int
    ) -> None: ...


class KernelModule(Protocol):
    """Looks kernels up by name: `pydirect.kernels.driver.Module`, or a test's."""

    def kernel(self, name: str) -> LaunchableKernel: ...


def members(
    kind: "type[ctypes._SimpleCData[Any]]", names: str
) -> "tuple[tuple[str, type[ctypes._SimpleCData[Any]]], ...]":
    """Return neighbours of one type in a structure's `_fields_`; names apart by
    spaces."""
    return tuple((name, kind) for name in names.split())
