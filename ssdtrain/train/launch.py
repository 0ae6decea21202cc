"""Start the ranks of a run on this node, when no launcher did."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TextIO

from ssdtrain.train.ranks import PARENT, RUN_DIRECTORY
from ssdtrain.train.stop import SIGNALS

GRACE_S = 10.0
"""Ranks whose neighbour has failed get so long to end by themselves."""
_PR_SET_PDEATHSIG = 1


def start_ranks(num_ranks: int, words: Sequence[str], run_directory: str) -> int:
    """Run `python -m ssdtrain <words>` as `num_ranks` ranks; wait for them.

    Signals are handed on, each once: the ranks are sessions of their own.

    Returns:
        0 if every rank returned 0; 128 + signal if one stopped the run; 2 if a rank
        refused its input; otherwise 1. The ranks have said why.
    """
    port = str(free_port())
    children = [
        _start(rank, num_ranks, words, port, run_directory) for rank in range(num_ranks)
    ]

    def hand_on(signum: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(signum)

    before = {signum: signal.signal(signum, hand_on) for signum in SIGNALS}
    try:
        return _status(_wait(children))
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _kill(children)


def run_in_order(words: Sequence[str], stdout: TextIO | None) -> int:
    """Run `python -m ssdtrain <words>`, and wait for it also behind a signal, which is
    handed on: the run finishes its step and saves. Returns its status."""
    child: subprocess.Popen[bytes] | None = None

    def hand_on(signum: int, frame: FrameType | None) -> None:
        if child is not None and child.poll() is None:
            child.send_signal(signum)

    before = {signum: signal.signal(signum, hand_on) for signum in SIGNALS}
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "ssdtrain", *words],
            env={**os.environ, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            start_new_session=True,  # or a terminal's SIGINT would come twice
        )
        return child.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if child is not None and child.poll() is None:
            child.kill()


def end_with_parent() -> None:
    """Let SIGTERM end this rank when the process that started it is gone."""
    parent = os.environ.get(PARENT)
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGTERM)


def _start(
    rank: int, num_ranks: int, words: Sequence[str], port: str, run_directory: str
) -> "subprocess.Popen[bytes]":
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        RUN_DIRECTORY: run_directory,
        PARENT: str(os.getpid()),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "ssdtrain", *words],
        env={**os.environ, **place},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait(children: "Sequence[subprocess.Popen[bytes]]") -> list[int]:
    """Return the ranks' statuses; one that fails ends the others."""
    left = {child.pid: child for child in children}
    killer = threading.Timer(GRACE_S, _kill, (children,))
    killer.daemon = True
    while left:
        pid, status = os.wait()
        child = left.pop(pid, None)
        if child is None:
            continue
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode and left and not killer.is_alive():
            for other in left.values():
                other.terminate()
            killer.start()
    killer.cancel()
    return [child.returncode for child in children]


def _kill(children: "Sequence[subprocess.Popen[bytes]]") -> None:
    for child in children:
        child.kill()


def _status(codes: Sequence[int]) -> int:
    stopped = [code for code in codes if code > 128]
    for rank, code in enumerate(codes):
        if code < 0 and not stopped and not any(other > 0 for other in codes):
            name = signal.Signals(-code).name
            hint = " (is host memory full?)" if -code == signal.SIGKILL else ""
            print(f"ssdtrain: rank {rank} was ended by {name}{hint}", file=sys.stderr)
    if 1 in codes:
        return 1
    if 2 in codes:
        return 2
    return stopped[0] if stopped else int(any(codes))


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
