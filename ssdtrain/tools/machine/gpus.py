"""GPU facts: NVML (pynvml, imported here alone) or the kernel's PCI files and torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ssdtrain import numa
from ssdtrain.tools.machine.findings import GPU, Finding

# Transfer rate in GT/s a lane to PCIe generation, as the kernel prints it.
GENERATION_OF_RATE = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
WIDTHS = {str(width): width for width in range(33)}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; None where this machine does not say."""

    index: int
    name: str
    memory_bytes: int
    pci_address: str | None
    pcie_generation: int | None
    """Now; GPUs lower it when idle, so compare it under load only."""
    pcie_generation_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    numa_node: int | None
    nvlinks: int | None
    """Active NVLink connections."""
    driver: str | None


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """The GPUs and what is to be said about them."""

    gpus: tuple[Gpu, ...]
    source: str
    """`nvml`, `torch`, or `none`."""
    findings: tuple[Finding, ...]


def inspect_gpus() -> GpuReport:
    """Return all GPUs of this machine; absence is a finding, never an error."""
    try:
        import pynvml
    except ImportError:
        return _without_nvml("nvidia-ml-py is not installed")
    try:
        with _session(pynvml):
            count = pynvml.nvmlDeviceGetCount()
            gpus = tuple(_from_nvml(pynvml, index) for index in range(count))
    except pynvml.NVMLError as error:
        return _without_nvml(f"NVML does not answer ({error})")
    return GpuReport(gpus=gpus, source="nvml", findings=tuple(judge_gpus(gpus)))


@contextmanager
def _session(pynvml: Any) -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _from_nvml(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, function)(handle, *arguments)
        except (pynvml.NVMLError, AttributeError):
            return None  # "not supported here": shown as unknown

    pci = ask("nvmlDeviceGetPciInfo")
    address = None if pci is None else _text(pci.busId).lower()[-12:]
    links = [
        ask("nvmlDeviceGetNvLinkState", link)
        for link in range(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 0))
    ]
    known = [state for state in links if state is not None]
    return Gpu(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or "unknown"),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        pci_address=address,
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        numa_node=numa.node_of_pci(address),
        nvlinks=sum(map(bool, known)) if known else None,
        driver=_text(pynvml.nvmlSystemGetDriverVersion()),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _without_nvml(reason: str) -> GpuReport:
    """Return what torch and the kernel know."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(_from_torch(torch, index) for index in range(count))
    findings = list(judge_gpus(gpus))
    if gpus:
        advice = "`pip install nvidia-ml-py` for PCIe, NUMA and NVLink facts."
        findings.append(GPU.note(reason, advice))
    source = "torch" if gpus else "none"
    return GpuReport(gpus=gpus, source=source, findings=tuple(findings))


def _from_torch(torch: Any, index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    address = numa.pci_address(found)
    return Gpu(
        index=index,
        name=found.name,
        memory_bytes=found.total_memory,
        pci_address=address,
        pcie_generation=GENERATION_OF_RATE.get(_link(address, "current_link_speed")),
        pcie_generation_max=GENERATION_OF_RATE.get(_link(address, "max_link_speed")),
        pcie_width=WIDTHS.get(_link(address, "current_link_width")),
        pcie_width_max=WIDTHS.get(_link(address, "max_link_width")),
        numa_node=numa.node_of_pci(address),
        nvlinks=None,
        driver=None,
    )


def _link(address: str | None, name: str) -> str:
    """Return what the kernel says of the link, without its unit; empty: nothing."""
    try:
        text = (numa.PCI_DEVICES / (address or "") / name).read_text()
    except OSError:
        return ""
    return text.strip().partition(" ")[0]


def judge_gpus(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """Findings about the GPUs, the link width and the sockets they hang on."""
    if not gpus:
        yield GPU.note(
            "no GPU was found",
            "CPU tensors are offloaded too; for GPU training install a CUDA build of "
            "torch and run doctor on the GPU machine.",
        )
        return
    for gpu in gpus:
        label = f"GPU {gpu.index} ({gpu.name}, {gpu.memory_bytes / 1e9:.0f} GB)"
        width, most = gpu.pcie_width, gpu.pcie_width_max
        if not width or not most:  # virtual machines report 0
            yield GPU.note(
                f"{label}: PCIe width unknown",
                "trust the measured D2H and H2D bandwidth instead.",
            )
        elif width < most:
            yield GPU.warning(
                f"{label}: PCIe x{width} of x{most}",
                "reseat the card or move it to a full-width slot: every transfer is "
                f"{most / width:.0f} times slower.",
            )
        else:
            yield GPU.good(
                f"{label}: PCIe generation {gpu.pcie_generation_max} x{width}",
                "full width.",
            )
    nodes = {gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
    if len(nodes) > 1:
        yield GPU.note(
            f"GPUs sit on NUMA nodes {sorted(nodes)}",
            "ssdtrain train binds each rank to its GPU's node; elsewhere use numactl "
            "--cpunodebind --membind: remote host memory is up to 3 times slower.",
        )
    if any(gpu.memory_bytes == 0 for gpu in gpus):
        yield GPU.problem("a GPU reports no memory", "reset it or leave it out.")
