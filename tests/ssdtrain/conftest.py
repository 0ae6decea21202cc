"""Shared by the ssdtrain tests: a module around any function, and sessions on it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ssdtrain
from ssdtrain.observe import observation
from ssdtrain.storage import open as opening
from ssdtrain.transfer.device import CpuDevice, MemoryLevel
from tests.ssdtrain.faulty import Fault, FaultyStorage
from tests.ssdtrain.plan.profiles import curve
from tests.ssdtrain.virtual_time import virtual_time

__all__ = ["virtual_time"]

EVERYTHING = {
    "target": "host",
    "min_bytes": 0,
    "plan": "offload-all",
    "recompute": "off",
    "window_bytes": 1,
    "host_bytes": 256 * 1024 * 1024,
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch's deterministic algorithms alone."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that another test has compiled, before and behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves are in time for plans, however long operators and copies take here."""
    ways = dict.fromkeys(("d2h", "h2d", "ssd_write", "ssd_read"), curve(1e6))
    fitted = observation.fitted_links
    monkeypatch.setattr(
        observation, "fitted_links", lambda *told: replace(fitted(*told), **ways)
    )


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that holds everything, so that a budget is all that limits a step."""
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(CpuDevice, "memory", lambda device: MemoryLevel(0, 0, 0, 0))


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A `DeviceMesh` of one rank in this process: DTensors without other processes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Around(nn.Module):
    """A module whose forward is the given function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.anchor = nn.Parameter(torch.ones(1))
        self.weights = nn.ParameterList(nn.Parameter(p) for p in parameters)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


@pytest.fixture
def around() -> type[Around]:
    return Around


@pytest.fixture
def everything() -> dict[str, Any]:
    """Settings under which all that can move moves at once."""
    return dict(EVERYTHING)


Gradients = tuple[list[Tensor | None], list[ssdtrain.StepReport]]


@pytest.fixture
def gradients() -> Callable[..., Gradients]:
    """Runs a function forward and backward, with or without a session."""

    def run(
        function: Callable[..., Tensor],
        inputs: list[Tensor],
        settings: dict[str, Any] | None = None,
        parameters: tuple[Tensor, ...] = (),
    ) -> Gradients:
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        model = Around(function, *(p.clone() for p in parameters))
        session = None if settings is None else ssdtrain.offload(model, **settings)
        reports: list[ssdtrain.StepReport] = []
        try:
            model(*leaves).backward()
            if session is not None:
                reports = list(session.steps)
        finally:
            if session is not None:
                session.close()
        return [x.grad for x in [*leaves, *model.weights]], reports

    return run


@pytest.fixture
def faulty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, everything: dict[str, Any]
) -> Callable[..., ssdtrain.Session]:
    """A session whose storage fails as scripted."""
    real = opening.open_storage

    def start(net: nn.Module, *faults: Fault, **settings: Any) -> ssdtrain.Session:
        def open_faulty(*args: Any, **kwargs: Any) -> FaultyStorage:
            return FaultyStorage(real(*args, **kwargs), faults)

        monkeypatch.setattr(opening, "open_storage", open_faulty)
        return ssdtrain.offload(
            net,
            **{
                "max_overhead": 0.01,
                **everything,
                "target": "ssd",
                "directory": str(tmp_path),
                **settings,
            },
        )

    return start
