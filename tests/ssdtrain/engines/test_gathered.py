"""Weights that FSDP2 gathers before the root's forward count in a step's memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import ssdtrain
from ssdtrain.engines.meshes import copies_tables
from ssdtrain.transfer.device import CpuDevice, MemoryLevel
from tests.ssdtrain.bits import same_bits

WEIGHTS, GATHERED = 1_000_000, 500_000
"""Bytes of this rank's parts, and of the root's own weights when they are whole."""

AT_ONCE: dict[str, Any] = {
    "target": "host",
    "min_bytes": 0,
    "plan": "offload-all",
    "window_bytes": 1,
}

if not dist.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A sharded block inside of a sharded root that has weights of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    net = nn.Sequential(nn.Linear(16, 16), block, nn.Linear(16, 16))
    fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    yield net
    dist.destroy_process_group()


def is_whole(model: Any) -> bool:
    return type(model[0].weight) is nn.Parameter


@pytest.fixture
def levels(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the allocator said; it holds nothing but weights."""
    found: list[int] = []
    most = [0]

    def memory(device: CpuDevice) -> MemoryLevel:
        now = WEIGHTS + GATHERED * is_whole(model)
        found.append(now)
        most[0] = max(most[0], now)
        return MemoryLevel(now, now, most[0], most[0])

    monkeypatch.setattr(CpuDevice, "memory", memory)
    monkeypatch.setattr(CpuDevice, "reset_peak", lambda device: most.__setitem__(0, 0))
    return found


def test_what_copies_tables_is_known(model: nn.Module) -> None:
    """Also inside of a root that nobody shards."""
    assert copies_tables(model)
    assert copies_tables(nn.Sequential(nn.Tanh(), model))
    assert not copies_tables(nn.Sequential(nn.Linear(2, 2)))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("plan", ["auto", "keep-all"])
def test_a_step_starts_before_the_root_gathers(
    model: nn.Module, levels: list[int], plan: str
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_hooks = len(model._forward_pre_hooks)
    with ssdtrain.offload(model, target="host", min_bytes=1, plan=plan) as session:
        train(model, optimizer, 4)
        start, _ = session.cache.ledger.levels
        report, profile = session.steps[-1], session.profile
    assert start is not None and start.allocated_bytes == WEIGHTS
    assert report.allocated is not None
    assert report.allocated.backward_start_bytes == GATHERED
    if plan == "auto":
        assert profile is not None and profile.base_bytes == WEIGHTS
        # In use beside the first saved tensor, whose bytes no allocator tells here.
        assert profile.marks[0].other_bytes > 0.99 * GATHERED
    assert WEIGHTS + GATHERED in levels
    assert len(model._forward_pre_hooks) == num_hooks


def test_a_forward_without_gradients_tells_of_no_step(
    model: nn.Module, levels: list[int]
) -> None:
    """And what is not the session's root tells nothing."""
    with ssdtrain.offload(
        model, target="host", min_bytes=1, plan="keep-all"
    ) as session:
        ledger = session.cache.ledger
        del levels[:]
        with torch.no_grad():
            model(torch.ones(4, 16))
        assert not levels and is_whole(model)  # FSDP2 leaves it so
        model.reshard()  # type: ignore[operator]
        model(torch.ones(4, 16)).sum().backward()
        start, _ = ledger.levels
    assert start is not None and start.allocated_bytes == WEIGHTS


def test_a_unit_inside_a_layer_may_keep_its_weights() -> None:
    """As torchtitan leaves experts under pipelines. Checkpointing runs such a layer
    again, and so do we: the weights that are there behind its forward are the same."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        found = []
        for settings in (None, {**AT_ONCE, "recompute": "regions"}):
            torch.manual_seed(0)
            layers = [
                nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.GELU())
                for _ in range(2)
            ]
            net = nn.Sequential(*layers)
            for part in (*(layer[1] for layer in layers), *layers, net):
                fully_shard(part, mesh=mesh, reshard_after_forward=part is net)
            session = None if settings is None else ssdtrain.offload(net, **settings)
            net(torch.ones(4, 16)).square().sum().backward()
            found.append([p.grad for p in net.parameters()])
            if session is not None:
                report = session.last_step
                assert report is not None and report.recipes.get("region", 0) > 0
                assert not session.regions_refused
                session.close()
        assert same_bits(*found)
    finally:
        dist.destroy_process_group()
