"""Timing kernels: the design runs on a CPU, resumes, and keeps what failed."""

import json
from pathlib import Path

import pytest
import torch

from ssdtrain.tools.foresight import bodies, calls, design, gather
from ssdtrain.tools.foresight.call import KernelFamily
from ssdtrain.tools.foresight.spec import Kind

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bodies.POOL_BYTES, "cpu", 1 << 22)
    monkeypatch.setattr(bodies, "COLD_BYTES", 1e5)
    small = design.Limits(num_bytes=1e6, flops=1e7, fp32_flops=1e7)
    monkeypatch.setitem(design.LIMITS, Kind.CPU, small)


def test_a_gather_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    assert gather.gather({KernelFamily.MEMORY: 4}, path, CPU) == 4
    path.write_text(path.read_text() + '{"family": "mem')  # killed while writing
    assert gather.gather({KernelFamily.MEMORY: 6, KernelFamily.NORM: 3}, path, CPU) == 5
    assert gather.gather({KernelFamily.MEMORY: 6, KernelFamily.NORM: 3}, path, CPU) == 0
    times = gather.read_times(path)
    assert len(times) == 9
    assert all(us > 0 for _, us in times)
    drawn = design.draw(KernelFamily.MEMORY, 0, limits=design.LIMITS[Kind.CPU])
    assert times[0][0] == drawn


def test_what_cannot_run_is_written_down_and_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    gather.gather({KernelFamily.NORM: 24}, path, CPU)
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
