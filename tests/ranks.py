"""Processes that tests start: ample time, none left behind, their own errors shown."""

import gc
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch
from torch import distributed
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 280.0
"""Below pytest's own limit, so that a failure shows what the processes printed."""
SOON_S = 60.0
"""For what happens at once, however busy the machine: reached by what hangs alone."""
GRACE_S = 10.0
"""Ranks whose neighbour has failed get so long to say why themselves."""
SHOWN_LINES = 40
ERROR = re.compile(
    r"^.*(Traceback \(most|Fatal Python error|terminate called|Error\b|FAILED).*$",
    re.MULTILINE,
)

PRELOADED = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch._inductor.compile_fx",
    "hydra",
]
"""Four seconds of imports. Nothing of this repository, and no library whose presence
ssdtrain looks for in `sys.modules`."""


def first_error(text: str) -> str:
    """The first lines from where an error begins: what follows is its consequence.

    The last lines if none is recognized.
    """
    found = ERROR.search(text)
    if found is None:
        return "\n".join(text.splitlines()[-SHOWN_LINES:])
    return "\n".join(text[found.start() :].splitlines()[:SHOWN_LINES])


def server() -> ForkServerContext:
    """Forks of one process that has imported torch, and nothing of ours."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextmanager
def own_server() -> Iterator[None]:
    """Forks that a block starts come from a server that imports what the block wants.

    A process has one, which has imported what was wanted when it began, and which
    Python has no public way to end.
    """
    stop = forkserver._forkserver._stop  # type: ignore[attr-defined]
    stop()
    try:
        yield
    finally:
        stop()


def run_ranks(
    command: Sequence[str | Path],
    directory: Path,
    num_ranks: int = 2,
    *,
    limit_s: float = LONGEST_S,
    **environment: str,
) -> None:
    """Run `command`, a script and its words, once a rank until all have ended.

    What each prints is in `directory/log<rank>`. Fails with the first error of each
    rank; one that fails ends the others. Ranks are forks of a server that has imported
    torch, and nothing of ours.
    """
    # Served by this process: no rank guesses a free port, none is gone too early.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        **environment,
    }
    context = server()
    logs = [directory / f"log{rank}" for rank in range(num_ranks)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            own = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [str(Path(command[0]).resolve()), *map(str, command[1:])]
            ranks.append(context.Process(target=run_script, args=(words, own, log)))
            ranks[-1].start()
        codes = _wait(ranks, limit_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if any(code != 0 for code in codes):
        raise AssertionError(
            "\n".join(
                f"-- rank {rank}: {_ended(code)}\n{first_error(path.read_text())}"
                for rank, (code, path) in enumerate(zip(codes, logs, strict=True))
                if code != 0
            )
        )


def run_script(words: list[str], environment: dict[str, str], log: Path) -> None:
    """Do what `python *words` does, in a fork of the server; prints to `log`."""
    gc.freeze()  # no collection goes through what the server has imported
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # OpenMP has read the server's environment
    if chosen := environment.get("PYTHONWARNINGS"):
        warnings.simplefilter(chosen)  # type: ignore[arg-type]
    sys.argv = words
    sys.path[:0] = [str(Path(words[0]).parent), str(ROOT)]
    runpy.run_path(words[0], run_name="__main__")


def leave() -> NoReturn:
    """End this rank, when all are about to, without the interpreter's own end.

    Threads of gloo drop the tensors of the last collective when they come to it. In an
    interpreter that ends they abort there: "terminate called without an active
    exception".
    """
    distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait(ranks: Sequence[BaseProcess], limit_s: float) -> list[int | None]:
    """The statuses; None of those that had not ended."""
    deadline = time.monotonic() + limit_s
    failed = False
    while True:
        codes = [rank.exitcode for rank in ranks]
        if None not in codes or time.monotonic() > deadline:
            return codes
        if not failed and any(codes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)


def _ended(code: int | None) -> str:
    if code is None:
        return "had not ended"
    return signal.Signals(-code).name if code < 0 else f"exit {code}"
