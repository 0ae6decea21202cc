"""`os.fork` under a session: the child never touches the parent's slots or waits for
its threads; see [Note: after a fork] in ssdtrain/transfer/workers.py."""

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.errors import ForkedError, StorageFullError
from ssdtrain.storage import PosixStorage
from ssdtrain.transfer.device import CpuDevice
from ssdtrain.transfer.pinned import page_aligned
from ssdtrain.transfer.workers import Workers

PAGE = 4096
LIMIT_S = 20
OK, WRONG, RAISED = 0, 3, 4

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(run: Callable[[], int]) -> int:
    """The exit code of a fork that calls `run`; killed if it takes too long."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        code = 70
        signal.alarm(LIMIT_S)
        with contextlib.suppress(BaseException):
            code = run()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_threads_of_another_process_are_not_waited_for() -> None:
    workers = Workers(1, "ssdtrain-test")
    assert workers.submit(lambda: 3).result() == 3

    def child() -> int:
        workers.shutdown(wait=True)
        try:
            workers.submit(lambda: 3)
        except ForkedError as error:
            return OK if str(os.getppid()) in str(error) else WRONG
        return WRONG

    assert in_child(child) == OK
    assert workers.submit(lambda: 4).result() == 4
    workers.shutdown()


def test_a_copy_under_way_at_the_fork_is_an_error() -> None:
    device, started, go = CpuDevice(), threading.Event(), threading.Event()

    class Slow:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            started.set()
            go.wait()

    source, target = torch.ones(8), torch.zeros(8)
    event = device.copy_out(source, target, [Slow()])
    started.wait()

    def child() -> int:
        try:
            event.synchronize()
        except ForkedError:
            device.close()
            return OK
        return WRONG

    code = in_child(child)
    go.set()
    event.synchronize()
    assert code == OK and torch.equal(source, target)
    device.close()


def aligned(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return page_aligned(PAGE).random_(0, 256, generator=generator)


def test_slots_stay_the_parents(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    storage = PosixStorage([tmp_path], extent_bytes=1 << 20)
    slot, sent, back = storage.allocate(PAGE), aligned(1), aligned(3)
    storage.write(slot, sent)

    def child() -> int:
        for call in (
            lambda: storage.allocate(PAGE),
            lambda: storage.write(slot, aligned(2)),
        ):
            with contextlib.suppress(StorageFullError):
                call()
                return WRONG
        storage.free(slot)
        storage.close()
        return OK

    # While a thread of the parent holds the lock, as a writer may.
    with storage._lock:
        assert in_child(child) == OK
    storage.read(slot, back)
    assert torch.equal(sent, back)
    assert storage.stats().used_bytes == PAGE
    storage.close()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


def step(net: nn.Module) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).requires_grad_()
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("target", ["host", "ssd"])
@pytest.mark.parametrize("plan", ["offload-all", "auto"])
def test_a_child_trains_without_us_and_the_parent_with_us(
    num_steps: int, target: str, plan: str, tmp_path: Path, everything: Any
) -> None:
    net = model()
    expected = step(net)
    settings = {**everything, "target": target, "plan": plan}
    if target == "ssd":
        tmp_path.chmod(0o700)
        settings["directory"] = str(tmp_path)

    def equal() -> bool:
        return all(map(torch.equal, step(net), expected))

    with ssdtrain.offload(net, **settings) as session:
        for _ in range(num_steps):
            assert equal()

        def child() -> int:
            return OK if all(equal() for _ in range(4)) else WRONG

        assert in_child(child) == OK
        for _ in range(4):
            assert equal()
        assert session.last_step is not None


def test_what_was_moved_before_the_fork_is_an_error_in_the_child(
    everything: Any,
) -> None:
    net = model()
    expected = step(net)
    with ssdtrain.offload(net, **everything) as session:
        net.zero_grad()
        x = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).requires_grad_()
        loss = net(x).square().sum()
        session.cache.offloader.wait_io()

        def child() -> int:
            try:
                loss.backward()
            except RuntimeError as error:
                return RAISED if "process" in str(error) else WRONG
            return WRONG

        assert in_child(child) == RAISED
        loss.backward()
        found = [p.grad for p in net.parameters()]
        assert all(map(torch.equal, found, expected))
