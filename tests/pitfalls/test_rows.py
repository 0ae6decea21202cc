"""Rows of PITFALLS that are about what is saved, held and counted (see also
`test_order.py` for races and `test_scenarios.py` for gradients)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.counters import Fallback
from ssdtrain.transfer.device import CpuDevice
from ssdtrain.transfer.pinned import PinnedPool
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.mlp import ROWS, WIDTH, batch, mlp

ONE = ROWS * WIDTH * 4


class Checkpointed(nn.Module):
    """Three checkpointed blocks, and an operator of the root's own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(mlp(2) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.exp().sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_keep_their_inputs_only(
    reentrant: bool, everything: Any
) -> None:
    """pytorch#84907, verl#3629: hooks inside a region undo the checkpointing.

    accelerate#4172: hooks on the children miss what the layer itself saves."""
    net = Checkpointed(reentrant)
    with ssdtrain.offload(net, **everything) as session:
        net(batch()).backward()
        report = session.last_step
    assert report is not None
    # The inputs of three blocks, and the result of exp.
    assert report.bytes_saved == 4 * ONE
    assert report.num_records == 4


def test_weights_are_not_activations(everything: Any) -> None:
    """llama-cookbook#115, axolotl#2927: `weight.t()` reaches the hook as a tensor."""
    net = mlp(3)
    with ssdtrain.offload(net, **everything) as session:
        net(batch()).sum().backward()
        report = session.last_step
    assert report is not None
    assert report.bytes_saved == 6 * ONE
    assert report.bytes_parameters >= 2 * WIDTH * WIDTH * 4


def test_views_leave_with_their_base(everything: Any) -> None:
    """DeepSpeed#8387: skipping views keeps the base, the view is its last owner."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            head, tail = (x * self.weight).split(ROWS // 2)
            return (head * tail).sum()

    net = Net()
    with ssdtrain.offload(net, **everything) as session:
        net(batch()).backward()
        report = session.last_step
    assert report is not None
    # x, and the product once, although both of its halves are saved.
    assert report.bytes_offloaded == 2 * ONE
    assert report.num_records == 2


def test_recomputation_inside_a_forward_stays(everything: Any) -> None:
    """A reentrant region recomputed while the hooks are on: backward runs already."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(2)

        def forward(self, x: Tensor) -> Tensor:
            checkpoint(self.body, x, use_reentrant=True).sum().backward()
            return x.grad.clone()

    net = Whole()
    expected = net(batch())
    with ssdtrain.offload(net, **everything) as session:
        assert same_bits(net(batch()), expected)
        report = session.last_step
    assert report is not None
    assert report.bytes_saved == ONE
    assert report.fallbacks[Fallback.KEPT_IN_BACKWARD.value] > 0


def test_broadcasts_are_not_materialised(everything: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            row = (x[0] * self.weight).expand(10_000, WIDTH)
            return (row * row).sum()

    net = Net()
    with ssdtrain.offload(net, **everything) as session:
        net(batch()).backward()
        report = session.last_step
    assert report is not None
    assert report.bytes_saved == ONE + WIDTH * 4


def test_evaluation_between_forward_and_backward(everything: Any) -> None:
    """Megatron#3043, NeMo-RL#2279: an evaluation pass consumes what was learned."""
    net = mlp(6)
    settings = {**everything, "window_bytes": 3 * ONE}
    with ssdtrain.offload(net, **settings) as session:
        kept = []
        for evaluate in (False, False, True, False):
            loss = net(batch()).sum()
            if evaluate:
                with torch.no_grad():
                    net(batch())
            loss.backward()
            assert session.last_step is not None
            kept.append(session.last_step.bytes_kept)
        assert len(session.steps) == 4
    assert kept[1:] == [3 * ONE] * 3


def test_the_tail_does_not_leave(everything: Any) -> None:
    """DeepSpeed keep_last, Megatron margin: backward asks for the last at once."""
    net = mlp(6)
    settings = {**everything, "window_bytes": 3 * ONE}
    with ssdtrain.offload(net, **settings) as session:
        for _ in range(2):
            net(batch()).sum().backward()
            report = session.last_step
    assert report is not None
    assert report.bytes_kept == 3 * ONE
    assert report.bytes_forwarded == 0


def test_the_users_own_hooks(everything: Any) -> None:
    """Only the innermost hook runs: the user's inside ours take theirs, and only it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            with torch.autograd.graph.save_on_cpu():
                x = x.exp()
            return self.body(x).sum()

    net, x = Net(), batch()
    expected = torch.autograd.grad(net(x), [x])[0]
    with (
        ssdtrain.offload(net, **everything) as session,
        torch.autograd.graph.save_on_cpu(),
    ):
        loss = net(x)
        outside = x.exp()
        assert same_bits(torch.autograd.grad(loss, [x])[0], expected)
        assert same_bits(torch.autograd.grad(outside.sum(), [x])[0], x.exp())
        report = session.last_step
    assert report is not None
    # Two bodies of four tensors each; what `exp` saves is the second one's input.
    assert report.bytes_saved == 8 * ONE


def test_every_byte_is_written(everything: Any, tmp_path: Path) -> None:
    """axolotl#3738: a disk tier that nobody used."""
    net = mlp(6)
    settings = {
        "max_overhead": 0.01,
        **everything,
        "target": "ssd",
        "directory": str(tmp_path),
    }
    with ssdtrain.offload(net, **settings) as session:
        loss = net(batch()).sum()
        session.cache.offloader.wait_io()
        loss.backward()
        report = session.last_step
    assert report is not None
    assert report.bytes_written == report.bytes_offloaded > 0
    assert not list(tmp_path.iterdir())


MIB = 1024 * 1024


@pytest.mark.parametrize("num_bytes", [5000, MIB + 1, 5 * MIB + 3, 33 * MIB, 129 * MIB])
def test_pinned_memory_is_not_doubled(num_bytes: int) -> None:
    """pytorch#95823: powers of two."""
    pool = PinnedPool(CpuDevice(), 1 << 40)
    buffer = pool.take(num_bytes)
    assert buffer is not None
    assert buffer.capacity_bytes <= max(num_bytes * 1.07, num_bytes + 4096)


def test_pinned_memory_is_given_back(everything: Any) -> None:
    """pytorch#171662, zoo#1257: never returned."""
    net, pinned = mlp(6), dict[int, int]()

    def pin(buffer: torch.Tensor) -> bool:
        pinned[buffer.data_ptr()] = buffer.numel()
        return True

    with ssdtrain.offload(net, **everything) as session:
        pool = session.cache.offloader.pool
        session.cache.device.pin = pin
        session.cache.device.unpin = pinned.pop
        net(batch()).sum().backward()
        assert pool.total_bytes == sum(pinned.values()) > 0
    assert pool.total_bytes == 0 and not pinned


def test_other_sizes_do_not_add_up(everything: Any) -> None:
    """verl#6193: old buffers and new ones at once, twice the peak."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    with ssdtrain.offload(net, **{**everything, "host_bytes": 80 * 1024}) as session:
        for rows in (32, 96, 64, 32, 96):
            net(torch.randn(rows, WIDTH, requires_grad=True)).sum().backward()
            report = session.last_step
            assert report is not None
            assert Fallback.KEPT_HOST_FULL.value not in report.fallbacks
            # All three, or all but the one that backward asks for first.
            assert report.bytes_offloaded >= 2 * rows * WIDTH * 4
        assert session.cache.offloader.pool.total_bytes <= 80 * 1024


def test_memory_that_cannot_be_pinned_is_said(everything: Any) -> None:
    """pytorch#181094: WSL caps pinned memory, and the error says that CUDA is out."""
    net, x = mlp(6), batch()
    expected = torch.autograd.grad(net(x).sum(), [x])[0]
    with ssdtrain.offload(net, **everything) as session:
        session.cache.device.pin = lambda buffer: False
        assert same_bits(torch.autograd.grad(net(x).sum(), [x])[0], expected)
        report = session.last_step
    assert report is not None
    assert report.fallbacks[Fallback.KEPT_PIN_FAILED.value] > 0
    assert report.bytes_offloaded == 0
