"""GPU facts from NVML, without NVML, and what is said about them."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ssdtrain import numa
from ssdtrain.tools.machine.findings import Level
from ssdtrain.tools.machine.gpus import Gpu, inspect_gpus, judge_gpus

GPU = Gpu(
    index=0,
    name="H200",
    memory_bytes=150 << 30,
    pci_address="0000:17:00.0",
    pcie_generation=5,
    pcie_generation_max=5,
    pcie_width=16,
    pcie_width_max=16,
    numa_node=0,
    nvlinks=18,
    driver="580.1",
)


class NVMLError(Exception):
    pass


def fake_nvml(broken: bool = False) -> ModuleType:
    """The calls `gpus` makes, for one GPU on which NUMA and one link fail."""

    def init() -> None:
        if broken:
            raise NVMLError("Driver Not Loaded")

    def link(handle: str, number: int) -> int:
        if number == 3:
            raise NVMLError("Not Supported")
        return int(number < 2)

    module = ModuleType("pynvml")
    calls = {
        "NVMLError": NVMLError,
        "NVML_NVLINK_MAX_LINKS": 4,
        "nvmlInit": init,
        "nvmlShutdown": lambda: calls["closed"].append(True),
        "closed": [],
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle{index}",
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=150 << 30),
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(
            busId=b"00000000:17:00.0"
        ),
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 4,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetNvLinkState": link,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }
    module.__dict__.update(calls)
    return module


def test_facts_from_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pci = tmp_path / "0000:17:00.0"
    pci.mkdir()
    (pci / "numa_node").write_text("1\n")
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    module = fake_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    report = inspect_gpus()
    assert report.source == "nvml"
    (gpu,) = report.gpus
    assert (gpu.name, gpu.driver) == ("NVIDIA H200", "580.1")
    assert (gpu.pcie_generation, gpu.pcie_width, gpu.nvlinks) == (4, 8, 2)
    assert gpu.numa_node == 1
    assert module.closed == [True]
    (finding,) = report.findings
    assert finding.level is Level.WARNING and "x8 of x16" in finding.text


@pytest.mark.parametrize("module", [None, fake_nvml(broken=True)])
def test_without_nvml(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = inspect_gpus()
    assert (report.gpus, report.source) == ((), "none")
    assert "no GPU" in report.findings[0].text and report.findings[0].advice


def test_facts_from_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pci = tmp_path / "0000:17:00.0"
    pci.mkdir()
    (pci / "numa_node").write_text("-1\n")
    (pci / "current_link_width").write_text("16\n")
    (pci / "max_link_width").write_text("63 is no number\n")
    (pci / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(
        name="H200", total_memory=7, pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    report = inspect_gpus()
    (gpu,) = report.gpus
    assert gpu.pci_address == "0000:17:00.0" and gpu.numa_node is None
    assert (gpu.pcie_width, gpu.pcie_width_max) == (16, None)
    assert (gpu.pcie_generation, gpu.pcie_generation_max) == (None, 5)
    assert any("nvidia-ml-py" in finding.text for finding in report.findings)


def test_findings_about_gpus() -> None:
    (fine,) = judge_gpus((GPU,))
    assert fine.level is Level.GOOD
    (unknown,) = judge_gpus((replace(GPU, pcie_width=0, pcie_width_max=0),))
    assert "unknown" in unknown.text
    far = replace(GPU, index=1, numa_node=1)
    assert any("NUMA nodes [0, 1]" in f.text for f in judge_gpus((GPU, far)))
