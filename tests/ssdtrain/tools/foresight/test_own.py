"""A machine learnt from nothing: its ceilings, its host, and a step on a CPU."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtrain.tools.cli import main
from ssdtrain.tools.foresight import bodies, design, fit, learn
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.device import from_json, load_device, to_json
from ssdtrain.tools.foresight.gather import read_times
from ssdtrain.tools.foresight.host import HostTable
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.recorder import IN_PLACE
from ssdtrain.tools.foresight.spec import DeviceSpec, Kind

CPU = design.LIMITS[Kind.CPU]
MADE_UP = DeviceSpec(
    name="made up",
    kind=Kind.CPU,
    num_sms=1,
    l2_bytes=1e6,
    memory_bytes=1e10,
    memory_gb_per_s=20.0,
    tflops={"fp32": 0.05},
    power_limit_watts=0.0,
)


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "NUM_TREES", {})
    monkeypatch.setattr(fit, "FEW_TREES", 25)


class Words(nn.Module):
    """Grouped-query attention with a mask of its own kind, and a product."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.qkv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.words(ids), 0.1, self.training)
        split = (x.shape[-1], x.shape[-1] // 2, x.shape[-1] // 2)
        query, key, value = self.qkv(x).split(split, dim=-1)
        mixed = F.scaled_dot_product_attention(
            *(t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (query, key, value)),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + mixed.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten())


def subject(device: str) -> tuple[nn.Module, torch.Tensor]:
    with torch.device(device):
        return Words().train(), torch.zeros(2, 16, dtype=torch.long)


class Names(TorchDispatchMode):
    """The operators that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_step_captured_without_memory_is_what_a_cpu_runs() -> None:
    model, ids = subject("meta")
    graph = capture(model, lambda: model(ids), on=Kind.CPU)
    real, ids_here = subject("cpu")
    with Names() as names:
        real(ids_here).backward()
    # Without a mode autograd adds up in place; both of these are modes.
    under_a_mode = {own: name for name, own in IN_PLACE.items()}
    assert [under_a_mode.get(node.name, node.name) for node in graph.nodes] == (
        names.found
    )
    assert any("attention_for_cpu" in name for name in names.found)


def host(t1: float, t5: float) -> HostTable:
    names = [
        f"{phase.value} aten::{name}" for phase in StepPhase for name in ("mm", "t")
    ]
    return HostTable.from_dict(
        {n: (t1, 0, 0, 0, t5 * n.endswith(":t"), n.endswith("mm")) for n in names}
    )


def made_up_times(
    family: KernelFamily, count: int, seed: int = 1
) -> list[tuple[Call, float]]:
    noise = random.Random(seed)
    found = []
    for index in range(count):
        call = design.draw(family, index, 0, CPU)
        us = 2.0 + 1.3 * MADE_UP.roofline_us(call) * noise.gauss(1.0, 0.02)
        found.append((call, us))
    return found


def test_an_assembled_machine_has_error_bars_and_survives_json() -> None:
    pytest.importorskip("sklearn")
    times = [
        *made_up_times(KernelFamily.PRODUCT, 60),
        *made_up_times(KernelFamily.MEMORY, 60),
        *made_up_times(KernelFamily.NORM, 5),
    ]
    device = learn.assemble(Kind.CPU, times, host(1.0, 1.0))
    assert set(device.forests) == {KernelFamily.PRODUCT, KernelFamily.MEMORY}
    assert 0.0 < device.errors[KernelFamily.PRODUCT] < 0.3
    assert device.error(KernelFamily.NORM) == pytest.approx(0.3)  # its roofline alone
    again = from_json(json.loads(json.dumps(to_json(device))))
    assert again.spec.kind is Kind.CPU
    for call, _ in times:
        assert again.kernel_us(call) == device.kernel_us(call)


def test_learn_then_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, from nothing to a step that nobody has run; and on with the file."""
    pytest.importorskip("sklearn")
    monkeypatch.setitem(bodies.POOL_BYTES, "cpu", 1 << 22)
    monkeypatch.setattr(bodies, "COLD_BYTES", 1e5)
    small = design.Limits(num_bytes=2e5, flops=1e6, fp32_flops=1e6, has_half=False)
    monkeypatch.setitem(design.LIMITS, Kind.CPU, small)
    counts = {KernelFamily.PRODUCT: 30, KernelFamily.MEMORY: 30, KernelFamily.NORM: 5}
    monkeypatch.setattr(learn, "COUNTS", counts)
    monkeypatch.setattr(learn, "ROUNDS", 1)
    times, own = tmp_path / "times.jsonl", tmp_path / "own.json"
    words = ["foresight", "learn", "--on", "cpu", "--times", str(times)]
    assert main([*words, "--save", str(own), "--seconds", "1000"]) == 0
    told = capsys.readouterr().out
    assert "memory: error" in told and "cross-validated" in told
    assert "norm: 5 kernels, too few for a model" in told and "--seconds" in told
    assert len(read_times(times)) == 65
    assert load_device(own).spec.kind is Kind.CPU
    model = ["--model", "blocks:128x1", "--sequence", "32", "--optimizer", "adamw"]
    assert main(["foresight", "predict", *model, "--device", str(own), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_us"] > 0


def test_a_gpu_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    words = ["--on", "cuda", "--times", str(tmp_path / "t"), "--save", "x"]
    assert main(["foresight", "learn", *words]) == 2
    assert "--on cpu" in capsys.readouterr().err


def test_what_trains_models_is_asked_for_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    times = tmp_path / "times.jsonl"
    words = ["--on", "cpu", "--times", str(times), "--save", str(tmp_path / "own.json")]
    assert main(["foresight", "learn", *words]) == 2
    assert "pip install 'ssdtrain[foresight]'" in capsys.readouterr().err
    assert not times.exists()
