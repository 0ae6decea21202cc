"""Versions of what ssdtrain works with (from metadata; kvikio alone is imported, for
its mode), GPUDirect Storage, a C compiler, and the malloc hook."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ssdtrain import switch
from ssdtrain.errors import ConfigError
from ssdtrain.tools.machine.findings import AUTOLOAD, GDS, VERSIONS, Finding
from ssdtrain.versions import c_compiler, installed, numbers, nvidia_fs_loaded


class Tested(NamedTuple):
    """A package and the versions tests run with: `[least, below)`."""

    package: str
    least: tuple[int, ...]
    below: tuple[int, ...]
    needed_for: str


TESTED = (
    Tested("torch", (2, 11), (2, 14), "everything"),
    Tested("deepspeed", (0, 19, 6), (0, 20), "engine=deepspeed"),
    Tested("megatron-core", (0, 16), (0, 20), "engine=megatron"),
    Tested("kvikio-cu13", (26, 8), (27,), "GPUDirect Storage"),
    Tested("transformers", (5, 0), (6,), "the reference models"),
)


@dataclass(frozen=True, kw_only=True)
class Software:
    """Versions and modes; None where a package is not installed."""

    python: str
    kernel: str
    versions: dict[str, str | None]
    cuda: str | None
    """CUDA version torch was built for."""
    nvidia_fs: bool
    """The kernel module of GPUDirect Storage is loaded."""
    gds_mode: str
    """`gds`, `compat`, `kvikio missing`, or why it could not be asked."""
    malloc_hook: str | None
    """Path of the CUDA malloc hook in this process, None when not loaded."""
    compiler: str | None
    """Path of the C compiler that is used: `$CC`, or cc."""
    asked: str | None = None
    """What SSDTRAIN holds; None where it switches nothing on."""
    autoload: bool = False
    """Python started with the autoload of ssdtrain in force."""


def inspect_software() -> Software:
    """Versions, storage mode and hook of this process."""
    import torch

    return Software(
        python=platform.python_version(),
        kernel=platform.release(),
        versions={tested.package: installed(tested.package) for tested in TESTED},
        cuda=torch.version.cuda,
        nvidia_fs=nvidia_fs_loaded(),
        gds_mode=_gds_mode(),
        malloc_hook=_listed("/proc/self/maps", "malloc_hook"),
        compiler=c_compiler(),
        asked=switch.text(),
        autoload=switch.is_active(),
    )


def _listed(file: str, word: str) -> str | None:
    """Last field of the first line that contains `word`."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if word in line), None)


def _gds_mode() -> str:
    try:
        from kvikio import cufile_driver
    except ImportError:
        return "kvikio missing"
    try:
        available = bool(cufile_driver.properties.is_gds_available)
    except (RuntimeError, AttributeError, OSError) as error:
        # Without libcuda or libcufile every question raises; say which.
        return f"unavailable ({str(error).splitlines()[0][:80]})"
    return "gds" if available else "compat"


def judge(software: Software) -> Iterator[Finding]:
    """Findings about versions, GDS and the hook."""
    for tested in TESTED:
        met = software.versions.get(tested.package)
        low = ".".join(map(str, tested.least))
        high = ".".join(map(str, tested.below))
        pin = f'`pip install "{tested.package}>={low},<{high}"`'
        if met is None:
            yield VERSIONS.note(
                f"{tested.package} is not installed",
                f"needed only for {tested.needed_for}: {pin}.",
            )
        elif tested.least <= numbers(met) < tested.below:
            yield VERSIONS.good(f"{tested.package} {met}", "a tested version.")
        else:
            yield VERSIONS.warning(
                f"{tested.package} {met} is outside the tested {low} to {high}",
                f"it may work; the tested one is {pin}.",
            )
    if software.compiler is None:
        yield VERSIONS.note(
            "there is no C compiler",
            "copies to host memory are then called from Python, which costs the host "
            "more: install one (cc), or set CC.",
        )
    yield _judge_autoload(software)
    yield from _judge_gds(software)


def _judge_autoload(software: Software) -> Finding:
    if software.asked is None:
        return AUTOLOAD.note(
            "SSDTRAIN is not set, so no trainer is changed",
            "SSDTRAIN=fit in front of a command adds ssdtrain to transformers, TRL, "
            "Lightning and what is built on them.",
        )
    try:
        switch.parse_settings(software.asked)
    except ConfigError as error:
        return AUTOLOAD.problem(str(error), "correct it, or unset SSDTRAIN.")
    said = f"SSDTRAIN={software.asked!r}"
    if software.autoload:
        return AUTOLOAD.good(f"{said} is active", "trainers get it as they start.")
    return AUTOLOAD.warning(
        f"{said} is set and not active: Python did not read ssdtrain_autoload.pth",
        "install ssdtrain with pip into this environment, and start Python without -S.",
    )


def _judge_gds(software: Software) -> Iterator[Finding]:
    if software.gds_mode == "gds":
        yield GDS.good("GPUDirect Storage is available", "SSD to GPU without a hop.")
        if software.malloc_hook is None:
            yield GDS.note(
                "the CUDA malloc hook is not loaded",
                'eval "$(ssdtrain env)" in front of a command registers GPU buffers '
                "with cuFile; ssdtrain train does so by itself.",
            )
    elif software.gds_mode == "compat":
        missing = "" if software.nvidia_fs else " (nvidia-fs is not loaded)"
        yield GDS.note(
            f"cuFile runs in compatibility mode{missing}",
            "pinned staging buffers are used; load nvidia-fs for the direct path.",
        )
    else:
        yield GDS.note(
            f"GPUDirect Storage: {software.gds_mode}",
            "not needed: pinned staging buffers are used.",
        )
