"""Runs compiled programs: `executable` is the door, `reference` runs a plan operation
by operation, `device` launches generated kernels (`launch`, `bound`), `tune` times
their schedules, `contract` multiplies parameters."""

from hector.runtime.executable import (
    Backend,
    Compiled,
    Executable,
    Options,
    Report,
    executables,
    graph_arrays,
    uses_triton,
)

__all__ = [
    "Backend",
    "Compiled",
    "Executable",
    "Options",
    "Report",
    "executables",
    "graph_arrays",
    "uses_triton",
]
