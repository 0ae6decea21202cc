"""Timing kernels: the design runs on a CPU, resumes, and keeps what failed."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ssdtrain.tools.foresight import bodies, calibrate, calls, design, gather
from ssdtrain.tools.foresight.calibrate import host_scale, programs
from ssdtrain.tools.foresight.call import Family
from ssdtrain.tools.foresight.device import bare_device
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.foresight.tracing import composites, traced

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bodies.POOL_BYTES, "cpu", 1 << 22)
    monkeypatch.setattr(bodies, "COLD_BYTES", 1e5)
    small = design.Limits(num_bytes=1e6, flops=1e7, fp32_flops=1e7)
    monkeypatch.setitem(design.LIMITS, Kind.CPU, small)


def test_a_gather_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    assert gather.gather({Family.MEMORY: 4}, path, CPU) == 4
    path.write_text(path.read_text() + '{"family": "mem')  # killed while writing
    assert gather.gather({Family.MEMORY: 6, Family.NORM: 3}, path, CPU) == 5
    assert gather.gather({Family.MEMORY: 6, Family.NORM: 3}, path, CPU) == 0
    times = gather.read_times(path)
    assert len(times) == 9
    assert all(us > 0 for _, us in times)
    drawn = design.draw(Family.MEMORY, 0, limits=design.LIMITS[Kind.CPU])
    assert times[0][0] == drawn


def test_what_cannot_run_is_written_down_and_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    gather.gather({Family.NORM: 24}, path, CPU)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    failed = [row for row in rows if row["us"] is None]
    # A CPU has no backward of the fused normalization.
    assert {row["variant"] for row in failed} <= {"rms_norm_backward"}
    assert all("NotImplementedError" in row["error"] for row in failed)
    assert len(gather.read_times(path)) == len(rows) - len(failed)


@pytest.mark.parametrize("variant", [*calls.POINTWISE, *calls.REDUCTIONS])
@pytest.mark.parametrize("shape", [(16, 32), (17, 33)])
def test_every_element_wise_variant_runs(variant: str, shape: tuple[int, int]) -> None:
    call = calls.memory(variant, rows=shape[0], columns=shape[1], dtype="fp32")
    _, found = bodies.bodies_of(call, bodies.Pool(CPU))
    for body in found:
        body()


def test_the_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps of three programs, in turn; one round in which the machine is busy,
    and one program that is priced wrong, change nothing."""
    asked: list[int] = []

    def seen_us(step: Callable[[], None], *, seconds: float) -> float:
        step()
        asked.append(len(asked))
        program, is_busy = len(asked) % 3, len(asked) > 6
        return (1.0, 2.0, 9.0)[program] * (5.0 if is_busy else 1.0)

    for each in programs(Kind.CPU):
        before = [parameter.detach().clone() for parameter in each.model.parameters()]
        each.step()()
        assert all(p.grad is not None for p in each.model.parameters())
        assert all(map(torch.equal, before, each.model.parameters()))
    monkeypatch.setattr(calibrate, "step_us", seen_us)
    monkeypatch.setattr(
        calibrate, "estimate_step", lambda graph, device: SimpleNamespace(step_us=0.5)
    )
    assert host_scale(bare_device("h100"), seconds=0.0) == 4.0
    assert len(asked) == 9


def test_a_trace_names_what_a_dispatch_mode_sees() -> None:
    known = composites()
    assert "aten::linear" in known and "aten::sum" not in known
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    seen = traced(lambda: layer(x).relu().sum().backward(), 1)
    names = {(one.phase.value, one.name) for one in seen}
    assert ("forward", "aten::addmm") in names
    assert ("backward", "aten::mm") in names
    assert ("forward", "aten::sum") in names
    assert not any(name == "aten::linear" for _, name in names)
