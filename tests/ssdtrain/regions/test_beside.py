"""A region's call that begins while another thread runs one again."""

import threading
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.unseen import Behind

WIDTH = 32


class Meeting:
    """Where the two threads wait for one another."""

    def __init__(self) -> None:
        self.backward: threading.Thread | None = None
        self.is_within, self.may_go_on = threading.Event(), threading.Event()

    def inside(self) -> None:
        """In a region's forward: the other thread's re-run waits."""
        if threading.current_thread() is self.backward and not self.is_within.is_set():
            self.is_within.set()
            self.may_go_on.wait(0.5)

    def between(self) -> None:
        """Between the regions of a forward: until the other thread is in a re-run."""
        backward = self.backward
        if backward is not None and threading.current_thread() is not backward:
            backward.start()
            assert self.is_within.wait(30)


class Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: Any) -> Tensor:
        meeting.inside()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Block(nn.Module):
    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.meeting = Behind(meeting)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(Meet.apply(self.first(x).sin(), self.meeting))
        return made.cos()


class Net(nn.Module):
    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(meeting) for _ in range(2))
        self.meeting = Behind(meeting)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.meeting.between()
        made: Tensor = self.blocks[1](x)
        return made.sum()


def test_a_call_notes_its_own_conditions() -> None:
    """The re-run has set the precision and the random state of its own forward."""
    meeting = Meeting()
    net = Net(meeting)
    x = torch.randn(WIDTH, WIDTH)
    settings = {"recompute": "regions", "plan": "keep-all", "min_bytes": 64}
    before = torch.get_float32_matmul_precision()
    with ssdtrain.offload(net, **settings) as session:
        for _ in range(4):
            net(x).backward()
        torch.set_float32_matmul_precision("medium")
        try:
            first = net(x)
        finally:
            torch.set_float32_matmul_precision(before)
        torch.randn(3)
        meeting.backward = threading.Thread(target=first.backward)
        last = net(x)
        meeting.may_go_on.set()
        meeting.backward.join(30)
        meeting.backward = None
        found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        last.backward()
        assert session.cache.regions.reasons == {}
    plain = Net(meeting)
    plain(x).backward()
    once = [p.grad for p in plain.parameters()]
    gained = [p.grad for p in net.parameters()]
    expected = [a + b for a, b in zip(found, once, strict=True) if b is not None]
    assert same_bits(gained, expected)
