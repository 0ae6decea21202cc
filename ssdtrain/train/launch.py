"""Start the ranks of a run on this node, when no launcher did."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO, TypeAlias

from ssdtrain.train.ranks import PARENT, RUN_DIRECTORY
from ssdtrain.train.stop import SIGNALS

GRACE_S = 10.0
"""Ranks whose neighbour has failed get so long to end by themselves."""
_PR_SET_PDEATHSIG = 1
Child: TypeAlias = "subprocess.Popen[bytes]"


def start_ranks(num_ranks: int, words: Sequence[str], run_directory: str) -> int:
    """Run `python -m ssdtrain <words>` as `num_ranks` ranks; hand signals on, each
    once. Returns 0 if all did; 128 + signal if one stopped the run; 2 if a rank refused
    its input; otherwise 1."""
    children: list[Child] = []
    places = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places[RUN_DIRECTORY] = run_directory
    with _handing_on(children):
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(_start(words, {**places, **own}))
        return _status(_wait(children))


def run_in_order(words: Sequence[str], stdout: TextIO | None) -> int:
    """Run `python -m ssdtrain <words>`, and wait for it also after a signal, which is
    handed on: the run finishes its step and saves. Returns its status."""
    children: list[Child] = []
    with _handing_on(children):
        children.append(_start(words, {}, stdout))
        return children[0].wait()


@contextmanager
def _handing_on(children: list[Child]) -> Iterator[None]:
    """Hand signals on to the children, and leave none of them behind."""

    def hand_on(signum: int, frame: FrameType | None) -> None:
        for child in children:
            _tell(child, signum)

    before = {signum: signal.signal(signum, hand_on) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _kill(children)


def _start(
    words: Sequence[str], place: Mapping[str, str], stdout: TextIO | None = None
) -> Child:
    return subprocess.Popen(
        [sys.executable, "-m", "ssdtrain", *words],
        env={**os.environ, **place, PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,  # or a terminal's SIGINT would come twice
    )


def end_with_parent() -> None:
    """Let SIGTERM end this rank when the process that started it is gone."""
    parent = os.environ.get(PARENT)
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGTERM)


def _wait(children: Sequence[Child]) -> list[int]:
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
                _tell(other, signal.SIGTERM)
            killer.start()
    killer.cancel()
    return [child.returncode for child in children]


def _tell(child: Child, signum: int) -> None:
    """Send a signal, if its status is not known. Not by `Popen`, which would collect
    one that has ended, and `os.wait` would miss it."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signum)


def _kill(children: Sequence[Child]) -> None:
    for child in children:
        _tell(child, signal.SIGKILL)


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
