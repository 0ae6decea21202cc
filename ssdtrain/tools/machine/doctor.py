"""`examine`: all facts, all measurements, all findings of one machine."""

import datetime
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ssdtrain.tools.machine import copies, disks, gpus, limits, software
from ssdtrain.tools.machine.copies import CopyBudget
from ssdtrain.tools.machine.disks import Disk
from ssdtrain.tools.machine.findings import LINKS, STORAGE, Finding
from ssdtrain.tools.machine.gpus import GpuReport
from ssdtrain.tools.machine.limits import ProcessLimits
from ssdtrain.tools.machine.links import LINK_FILE, Link, LinkFile, LinkKind
from ssdtrain.tools.machine.software import Software
from ssdtrain.tools.machine.ssd import SsdBudget, SsdResult, measure_ssd

MIB = 1024 * 1024
TYPICAL_TENSOR_BYTES = 64 * MIB
"""Bandwidths in findings are for tensors of this size."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to examine, and what it may cost."""

    directories: tuple[str, ...] = ()
    """Directories that are to hold activations."""
    measure: bool = True
    """False: facts only; nothing is copied and nothing is written."""
    copy: CopyBudget = field(default_factory=CopyBudget)
    """For each GPU, for the GPU pairs together, and for host copies."""
    ssd: SsdBudget = field(default_factory=SsdBudget)
    """For each directory."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What `doctor` found."""

    gpu: GpuReport
    disks: tuple[Disk, ...]
    limits: ProcessLimits
    software: Software
    links: LinkFile
    findings: tuple[Finding, ...]
    bytes_written: int
    """Written to all directories together while measuring."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `links` has the schema of the link file."""
        values = asdict(self)
        values["links"] = LINK_FILE.to_json(self.links)
        values["findings"] = [
            {**asdict(finding), "level": finding.level.value}
            for finding in self.findings
        ]
        values["gpu"].pop("findings")
        return values


POOR_FIT = 0.3
"""Fitted against measured seconds; the planner's own predictions are within 5 %."""


def parts(request: Wanted) -> int:
    """Return how many parts `examine` has, each of which may take many seconds."""
    return 1 + (len(request.directories) + 1 if request.measure else 0)


def examine(request: Wanted, part: Callable[[str], None]) -> Examination:
    """Look at this machine and measure its links; what it lacks is a finding, and no
    error. `part`: told what begins, `parts` times."""
    part("looking at GPUs, limits and versions")
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    gpu = gpus.inspect_gpus()
    process, packages = limits.inspect_limits(), software.inspect_software()
    findings = [*gpu.findings]
    found_disks: list[Disk] = []
    links: list[Link] = []
    written = 0
    for directory in request.directories:
        if request.measure:
            part(
                f"measuring {directory}: about {request.ssd.max_seconds:.0f} s, "
                f"{request.ssd.max_bytes / 1e9:.1f} GB written at most"
            )
        try:
            disk = disks.inspect_disk(directory)
        except OSError as error:
            findings.append(_unusable(directory, error))
            continue
        found_disks.append(disk)
        findings.extend(disks.judge_disk(disk))
        if request.measure:
            result = _measure_directory(directory, request.ssd, findings)
            links.extend(result.links if result else ())
            written += result.bytes_written if result else 0
    if request.measure:
        part("measuring copies")
        links = [*_measure_copies(request.copy, findings), *links]
    findings.extend(judge_links(tuple(links)))
    findings.extend(limits.judge_limits(process))
    findings.extend(software.judge(packages))
    machine = {
        "host": platform.node(),
        "gpus": [one.name for one in gpu.gpus],
        "cpus": process.cpus,
        "kernel": packages.kernel,
        "torch": packages.versions["torch"],
    }
    return Examination(
        gpu=gpu,
        disks=tuple(found_disks),
        limits=process,
        software=packages,
        links=LinkFile(created_utc=began, links=tuple(links), machine=machine),
        findings=tuple(findings),
        bytes_written=written,
    )


def _unusable(directory: str, error: OSError) -> Finding:
    return STORAGE.problem(
        f"{directory} cannot be used: {error.strerror or error}",
        "give an existing directory on an NVMe drive that this user may write to.",
    )


def _measure_directory(
    directory: str, budget: SsdBudget, findings: list[Finding]
) -> SsdResult | None:
    """Measure the curves of one directory; a failure becomes a finding."""
    try:
        result = measure_ssd(directory, budget)
    except OSError as error:
        findings.append(_unusable(directory, error))
        return None
    except ValueError as error:
        findings.append(LINKS.warning(str(error), "raise the measuring budget."))
        return None
    if result.skipped_cells:
        findings.append(
            LINKS.note(
                f"{directory}: the budget left out {len(result.skipped_cells)} SSD "
                f"cells ({', '.join(result.skipped_cells[:3])}, ...)",
                "larger --max-write-bytes or --max-seconds measures them.",
            )
        )
    return result


def _measure_copies(budget: CopyBudget, findings: list[Finding]) -> list[Link]:
    """Copies of every GPU and GPU pair; host copies where there is no GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return [copies.measure_host_copy(budget)]
    links: list[Link] = []
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
    try:
        for device in range(count):
            links.extend(copies.measure_gpu_copies(device, budget))
        for source, target in pairs:
            share = replace(budget, max_seconds=budget.max_seconds / len(pairs))
            links.append(copies.measure_peer_copy(source, target, share))
    except RuntimeError as error:  # torch's own: out of memory, no pinned memory
        text = str(error).splitlines()[0]
        findings.append(
            LINKS.problem(f"a copy measurement failed: {text}", "free GPU memory.")
        )
    return links


def judge_links(links: tuple[Link, ...]) -> Iterator[Finding]:
    """Return what the measured curves mean, and which of them to trust."""
    for link in links:
        if link.curve.fit_error > POOR_FIT:
            yield LINKS.warning(
                f"{link.kind.value} {link.source} to {link.target}, {link.depth} in "
                "flight: the curve misses a measured time by "
                f"{link.curve.fit_error:.0%}",
                "other work ran beside it, or the link is uneven: measure again on a "
                "quiet machine; predictions that use it can be as wrong.",
            )
    rates = dict.fromkeys(LinkKind, 0.0)
    for link in links:
        rate = link.curve.gb_per_s(TYPICAL_TENSOR_BYTES)
        rates[link.kind] = max(rates[link.kind], rate)
    d2h, both = rates[LinkKind.D2H], rates[LinkKind.BOTH]
    if d2h:
        level = LINKS.good if d2h > 20 else LINKS.warning
        yield level(
            f"GPU to host {d2h:.1f} GB/s, host to GPU {rates[LinkKind.H2D]:.1f} GB/s",
            f"a second of compute hides {d2h:.0f} GB of activations in host memory."
            if d2h > 20
            else "below PCIe 4 x16: check width and generation under load.",
        )
        if both < 0.75 * min(d2h, rates[LinkKind.H2D]):
            yield LINKS.note(
                f"both directions at once: {both:.1f} GB/s each way",
                "stores and loads disturb one another here; plan with less.",
            )
    yield from _judge_ssd(rates, d2h)


def _judge_ssd(rates: dict[LinkKind, float], d2h: float) -> Iterator[Finding]:
    write, read = rates[LinkKind.SSD_WRITE], rates[LinkKind.SSD_READ]
    if not write:
        return
    text = f"SSD write {write:.1f} GB/s, read {read:.1f} GB/s"
    if d2h and write < 0.25 * d2h:
        yield LINKS.note(
            f"{text}: {d2h / write:.0f} times below GPU to host",
            "use target='tiered', or give directories on several SSDs.",
        )
    else:
        yield LINKS.good(text, f"a second of compute hides {write:.1f} GB on the SSD.")
