"""Deaths: a killed process leaves nothing, and a dead neighbour hangs nobody."""

import datetime
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import ssdtrain
from tests.ranks import LONGEST_S, server
from tests.ssdtrain.mlp import ROWS, WIDTH, batch, mlp
from tests.ssdtrain.targets import all_written


@contextmanager
def started(target: Any, *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that is told something, and what it says; killed at the end."""
    context = server()
    hears, says = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, says))
    process.start()
    says.close()
    try:
        yield process, hears
    finally:
        process.kill()
        process.join()
        process.close()
        hears.close()


def said(hears: Connection) -> Any:
    """The next thing that it says."""
    assert hears.poll(LONGEST_S)
    return hears.recv()


def wait_in_mid_step(place: str, says: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    net = mlp(6)
    session = ssdtrain.offload(net, **all_written(Path(place)), host_bytes=64 << 20)
    loss = net(batch()).sum()
    session.cache.offloader.wait_io()
    says.send(session.cache.offloader.storage.stats().used_bytes)
    time.sleep(600)
    loss.backward()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_in_mid_step(number: signal.Signals, tmp_path: Path) -> None:
    with started(wait_in_mid_step, str(tmp_path)) as (child, hears):
        assert said(hears) > 0, "nothing was on the disk yet"
        assert child.pid is not None
        os.kill(child.pid, number)
        child.join(LONGEST_S)
        assert child.exitcode not in (0, None)
    assert not list(tmp_path.rglob("*"))


def train_beside(rank: int, place: str, meet: str, says: Connection) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=240),
    )
    here, net = torch.empty(ROWS, WIDTH), mlp(6)
    if rank == 1:
        dist.recv(here, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    settings = {**all_written(Path(place)), "host_bytes": 64 << 20}
    with ssdtrain.offload(net, **settings) as session:
        output = net(batch())
        offloader = session.cache.offloader
        offloader.wait_io()
        assert offloader.storage.stats().used_bytes > 0
        try:
            dist.send(output.detach(), 1)
            dist.recv(here, 1)
            output.backward(here)
        except RuntimeError as error:
            says.send(f"stopped: {error}")
        del output
        assert session.cache.is_idle
    assert offloader.pool.total_bytes == 0
    says.send("clean")
    os._exit(0)


def test_a_rank_dies_in_a_pipeline(tmp_path: Path) -> None:
    """The survivor gets the collective's error, closes, and leaves nothing."""
    places = [tmp_path / f"ssd{rank}" for rank in range(2)]
    for place in places:
        place.mkdir(mode=0o700)
    both = [(str(place), str(tmp_path / "meet")) for place in places]
    with (
        started(train_beside, 0, *both[0]) as (survivor, hears),
        started(train_beside, 1, *both[1]) as (neighbour, _),
    ):
        assert said(hears).startswith("stopped:")
        assert said(hears) == "clean"
        for process in (survivor, neighbour):
            process.join(LONGEST_S)
        assert (survivor.exitcode, neighbour.exitcode) == (0, -signal.SIGKILL)
    assert not [path for place in places for path in place.rglob("*")]
