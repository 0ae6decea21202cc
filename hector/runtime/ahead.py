"""Compilation for a GPU that is not here.

[Note: ahead of time] Inside `compiling_for` layers are compiled as on a GPU of that
architecture: plans, schedules and kernels are chosen by the graph's sizes, which are
the same wherever its arrays lie, and the compiler needs no device. Launches then do
nothing, so what a call returns has the shapes and dtypes of results and no values.
What was made is kept apart from what really runs: executables and prepared calls have
the target in their keys, Triton's kernels a device of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

WARP_SIZE = 32


@dataclass
class Target:
    """A GPU architecture, and the kernels that were compiled for it."""

    arch: int
    """Compute capability times ten: 90 for an H100 or H200."""
    kernels: dict[str, str] = field(default_factory=dict)
    """{Triton's digest: the kernel's name}."""

    def made(self, kernel: Any) -> None:
        """Note a compiled kernel."""
        self.kernels[kernel.hash] = kernel.name


_TARGET: ContextVar[Target | None] = ContextVar("hector_target", default=None)


target_now = _TARGET.get
"""`target`, without a call of Python's."""


def target() -> Target | None:
    """What is compiled for; None: the device that tensors lie on."""
    return target_now()


def arch() -> int | None:
    """The target's architecture: part of what compiled things are found by."""
    found = target()
    return None if found is None else found.arch


def compiles(device: torch.device) -> bool:
    """Whether kernels are compiled for tensors of `device`; the interpreter's are
    not."""
    return device.type == "cuda" or target() is not None


class _Machine:
    """Stands in for Triton's driver: it is asked which machine code is wanted."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        """As Triton's own drivers."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, WARP_SIZE)

    def get_current_device(self) -> str:
        """A key that no device has, so that none finds these kernels as its own."""
        return f"ahead of time for {self.arch}"

    def get_current_stream(self, device: object) -> int:
        """No launch reads it."""
        return 0


@contextmanager
def compiling_for(arch: int) -> Iterator[Target]:
    """Compile for compute capability `arch` / 10 and launch nothing; see
    [Note: ahead of time]. Triton's driver is the whole process's: no other thread may
    launch its kernels meanwhile.

    Raises:
        ValueError: no such architecture, or Triton interprets kernels.
        RuntimeError: this thread already compiles for one.
    """
    from triton import knobs
    from triton.runtime import driver

    if not 70 <= arch <= 200:
        raise ValueError(f"expected arch as 90 for compute capability 9.0, got {arch}")
    if knobs.runtime.interpret:
        raise ValueError("expected TRITON_INTERPRET unset: it compiles no kernels")
    if target() is not None:
        raise RuntimeError("expected one target at a time; close the one that is open")
    made = Target(arch)
    token = _TARGET.set(made)
    driver.set_active(_Machine(arch))
    try:
        yield made
    finally:
        _TARGET.reset(token)
        # The next to ask for it finds the machine's own.
        driver.set_active(None)
