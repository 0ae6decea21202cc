"""NUMA nodes from the kernel's files, and processes bound to one."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from ssdtrain import numa
from ssdtrain.train.ranks import Ranks


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes that share out this machine's processors, and a GPU on the second."""
    own = sorted(os.sched_getaffinity(0))
    halves = (own[: len(own) // 2], own[len(own) // 2 :])
    for node, cpus in enumerate(halves):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(",".join(map(str, cpus)) + "\n")
    (tmp_path / "node9").mkdir()
    (tmp_path / "node9/cpulist").write_text("\n")  # memory alone
    gpu = tmp_path / "0000:3b:00.0"
    gpu.mkdir()
    (gpu / "numa_node").write_text("1\n")
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    return tmp_path


def test_what_the_kernel_says(machine: Path) -> None:
    (machine / "node0/cpulist").write_text("0-3,8,10-11\n")
    assert numa.nodes()[0] == {0, 1, 2, 3, 8, 10, 11}
    assert set(numa.nodes()) == {0, 1}
    assert numa.node_of_pci("0000:3b:00.0") == 1
    (machine / "0000:3b:00.0/numa_node").write_text("-1\n")
    assert numa.node_of_pci("0000:3b:00.0") is None
    assert numa.node_of_pci("none") is numa.node_of_pci(None) is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_all_threads_of_a_rank_are_bound(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, whose affinity it may change; the policy is the
    kernel's word."""
    code = f"""
import os, threading, types
from pathlib import Path
from ssdtrain import numa
from ssdtrain.train.ranks import Ranks
import torch
numa.NODES = numa.PCI_DEVICES = Path({str(machine)!r})
there = threading.Event()
threading.Thread(target=there.wait, daemon=True).start()
properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3b, pci_device_id=0)
torch.cuda.get_device_properties = lambda device: properties
preferred = []
numa.prefer_memory = preferred.append
ranks = Ranks(rank=0, world_size=2, local_rank=0, local_size=2, launched=True)
Ranks.device = lambda self: torch.device("cuda", 0)
assert numa.nodes_of_process() == (0, 1)
assert ranks.bind() == 1 and preferred == [1]
assert numa.nodes_of_process() == (1,)
for thread in os.listdir("/proc/self/task"):
    assert os.sched_getaffinity(int(thread)) == numa.nodes()[1]
assert ranks.bind() is None, "it is on one node already"
ranks.share_cores()
assert torch.get_num_threads() == len(numa.nodes()[1]), "the other rank is elsewhere"
there.set()
"""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_nothing_is_bound_without_need(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", None)  # must not be called
    ranks = Ranks(rank=0, world_size=1, local_rank=0, local_size=1, launched=False)
    monkeypatch.setattr(Ranks, "device", lambda self: torch.device("cpu"))
    assert ranks.bind() is None
    assert not numa.bind(5)
    monkeypatch.setattr(Ranks, "device", lambda self: torch.device("cuda", 0))
    found = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert ranks.bind() is None, "the kernel does not say where the GPU is"


def test_the_kernel_takes_the_policy() -> None:
    """In a process of its own: `numa.prefer_memory` asks for a node that there is."""
    code = (
        "from ssdtrain import numa; numa.prefer_memory(min(numa.nodes(), default=0)); "
    )
    code += "print(open('/proc/self/numa_maps').read())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if "numa_maps" in done.stderr:
        pytest.skip("this kernel has no numa_maps")
    assert "prefer" in done.stdout
