"""Deaths: a killed process leaves nothing, and a dead neighbour hangs nobody."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import LONGEST_S, ROOT, reaped

SETTINGS = (
    "dict(target='ssd', directory={place!r}, min_bytes=0, plan='offload-all', "
    "recompute='off', window_bytes=1, host_bytes=64 << 20)"
)
STEP = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
import torch
import ssdtrain
from torch import nn
pairs = [(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
net = nn.Sequential(*[m for pair in pairs for m in pair])
session = ssdtrain.offload(net, **{settings})
loss = net(torch.randn(32, 64, requires_grad=True)).sum()
session.cache.offloader.wait_io()
written = session.cache.offloader.storage.stats().used_bytes
print("mid-step", written, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_in_mid_step(number: signal.Signals, tmp_path: Path) -> None:
    settings = SETTINGS.format(place=str(tmp_path))
    child = subprocess.Popen(
        [sys.executable, "-c", STEP.format(settings=settings)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    with reaped(child):
        words = child.stdout.readline().split()
        assert words[0] == "mid-step"
        assert int(words[1]) > 0, "nothing was on the disk yet"
        child.send_signal(number)
        assert child.wait(LONGEST_S) != 0
    assert not list(tmp_path.rglob("*"))


NEIGHBOURS = """
import datetime, os, signal, sys
import torch
import torch.distributed as dist
import ssdtrain
from torch import nn
rank, rendezvous = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method="file://" + rendezvous, rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=240),
)
pairs = [(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
net = nn.Sequential(*[m for pair in pairs for m in pair])
here = torch.empty(32, 64)
if rank == 1:
    dist.recv(here, 0)
    os.kill(os.getpid(), signal.SIGKILL)
with ssdtrain.offload(net, **{settings}) as session:
    output = net(torch.randn(32, 64, requires_grad=True))
    session.cache.offloader.wait_io()
    assert session.cache.offloader.storage.stats().used_bytes > 0
    try:
        dist.send(output.detach(), 1)
        dist.recv(here, 1)
        output.backward(here)
    except RuntimeError as error:
        print("stopped:", str(error).splitlines()[0], flush=True)
    del output
    assert session.cache.is_idle
    offloader = session.cache.offloader
assert offloader.pool.total_bytes == 0
print("clean", flush=True)
os._exit(0)
"""


def test_a_rank_dies_in_a_pipeline(tmp_path: Path) -> None:
    """The survivor gets the collective's error, closes, and leaves nothing."""
    places = [tmp_path / f"ssd{rank}" for rank in range(2)]
    ranks = []
    for rank, place in enumerate(places):
        place.mkdir(mode=0o700)
        settings = SETTINGS.format(place=str(place))
        code = NEIGHBOURS.replace("{settings}", settings)
        command = [sys.executable, "-c", code, str(rank), str(tmp_path / "meet")]
        ranks.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    with reaped(*ranks):
        said = [rank.communicate(timeout=LONGEST_S)[0] for rank in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode == 0, said[0]
    assert "stopped:" in said[0]
    assert "clean" in said[0]
    assert not [path for place in places for path in place.rglob("*")]
