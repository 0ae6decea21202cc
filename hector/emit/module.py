"""Generated modules: one a kernel, named by its content, on disk.

Kernels that read the same have one module, whichever plan they are part of: Triton's
cache knows a kernel by its text and its place in the file.
"""

import hashlib
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from hector.emit.gemm import (
    DotPrecision,
    Emitted,
    emit_gemm,
    emit_outer,
)
from hector.emit.parameters import emit_parameters, parameter_sums
from hector.emit.source import HEADER
from hector.emit.sums import Sum, emit_sums
from hector.emit.traversal import SegmentGroups, emit_traversal
from hector.ir.kernels import (
    Gemm,
    GemmSchedule,
    Kernel,
    Outer,
    OuterSchedule,
    Parameters,
    Schedule,
    SegmentMapping,
    Traversal,
    TraversalSchedule,
)
from hector.ir.node import Node
from hector.ir.types import TARGET, TYPE_DOMAINS
from hector.private_files import (
    cache_directory,
    private_directory,
    read_private,
    write_private,
)

_UNNAMED = "hector_kernel"
_KINDS = {
    Gemm: "gemm",
    Outer: "outer_product",
    Parameters: "parameters",
    Traversal: "traversal",
}


@dataclass(frozen=True)
class Generated:
    """The text of one kernel instance and what it launches, in order."""

    text: str
    name: str
    emitted: tuple[Emitted, ...]
    sums: tuple[Sum, ...] = ()
    """Partial sums that it leaves to be added: see `hector.emit.sums`."""

    def functions(self) -> Iterator[tuple[Emitted, Any]]:
        """What is launched, with the imported functions."""
        module = load_module(self.text)
        for e in self.emitted:
            yield e, getattr(module, e.source.name.replace(_UNNAMED, self.name))


def generate_module(
    kernel: Kernel,
    schedule: Schedule | None,
    precision: DotPrecision,
    late: frozenset[Node] = frozenset(),
) -> Generated:
    """The module of one instance; sums into `late` values are left to be added."""
    emitted = emit(kernel, _UNNAMED, schedule, precision)
    sums = sums_of(kernel, schedule)
    now = [s for s in sums if s.out not in late]
    if now:
        emitted.append(emit_sums(now, f"{_UNNAMED}_sum"))
    left = tuple(s for s in sums if s.out in late)
    return _named(_KINDS.get(type(kernel), "kernel"), emitted, left)


def generate_sums(sums: Sequence[Sum]) -> Generated:
    """The module that adds what `generate_module` left."""
    return _named("sums", [emit_sums(sums, _UNNAMED)], ())


def _named(kind: str, emitted: Sequence[Emitted], sums: tuple[Sum, ...]) -> Generated:
    # Serial numbers differ from program to program; quotes would end the docstring.
    docs = (re.sub(r"%\d+", "%", e.doc).replace('"', "'") for e in emitted)
    parts = (e.source.text(doc) for e, doc in zip(emitted, docs, strict=True))
    text = HEADER + "".join(f"\n\n{p}" for p in parts)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = f"hector_{kind}_{digest}"
    return Generated(text.replace(_UNNAMED, name), name, tuple(emitted), sums)


def emit(
    kernel: Kernel, name: str, schedule: Schedule | None, precision: DotPrecision
) -> list[Emitted]:
    """The generated kernels of one instance, in launch order, but for its sums."""
    if isinstance(kernel, Gemm) and isinstance(schedule, GemmSchedule):
        return [emit_gemm(kernel, name, schedule, precision)]
    if isinstance(kernel, Outer) and isinstance(schedule, OuterSchedule):
        return [emit_outer(kernel, name, schedule, precision)]
    if isinstance(kernel, Traversal) and isinstance(schedule, TraversalSchedule):
        if schedule.mapping.is_split:
            return emit_split(kernel, name, schedule)
        return [emit_traversal(kernel, name, schedule)]
    if isinstance(kernel, Parameters):
        return [emit_parameters(kernel, name)]
    return []


def sums_of(kernel: Kernel, schedule: Schedule | None) -> list[Sum]:
    """The values of which an instance leaves partial rows."""
    if isinstance(kernel, Outer) and isinstance(schedule, OuterSchedule):
        tiles = (kernel.domain, kernel.type_index, schedule.chunk_rows)
        return [Sum(tiles, kernel.out)]
    if isinstance(kernel, Parameters):
        return parameter_sums(kernel)
    if isinstance(kernel, Traversal) and isinstance(schedule, TraversalSchedule):
        group = kernel.loop.group
        if group and TARGET[kernel.loop.domain, group] in TYPE_DOMAINS:
            tiles = (kernel.loop.domain, group, schedule.chunk_rows)
            return [Sum(tiles, n) for n in kernel.stores if n.domain in TYPE_DOMAINS]
    return []


def emit_split(k: Traversal, name: str, schedule: TraversalSchedule) -> list[Emitted]:
    """The heavy groups, a program each; then the others, a lane or a program each."""
    heavy = replace(
        schedule,
        mapping=SegmentMapping.PROGRAM,
        block=schedule.heavy_block,
        num_warps=schedule.heavy_warps,
        heavy_first=True,
    )
    lanes = schedule.mapping is SegmentMapping.SPLIT
    mapping = SegmentMapping.LANE if lanes else SegmentMapping.PROGRAM
    light = replace(schedule, mapping=mapping, heavy_first=True)
    return [
        emit_traversal(k, f"{name}_heavy", heavy, SegmentGroups.HEAVY),
        emit_traversal(k, f"{name}_light", light, SegmentGroups.LIGHT),
    ]


def load_module(text: str, directory: Path | None = None) -> ModuleType:
    """The generated module, written under its content's hash and executed.

    What is executed is `text` itself; the file is for readers and for Triton, which
    looks a kernel's source up. See [Note: private files].
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    name = f"hector_generated_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    place = private_directory(directory) if directory else cache_directory()
    path = place / f"{name}.py"
    if read_private(path) != text:
        write_private(path, text)
    module = ModuleType(name)
    module.__file__ = str(path)
    # Read from here and not from the file, whatever becomes of it.
    lines = text.splitlines(keepends=True)
    linecache.cache[str(path)] = (len(text), None, lines, str(path))
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module
