"""A Python that has imported the trainers, and forks once for each script: importing
them takes longer than four steps of a tiny model. Not a test file."""

import atexit
import gc
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path

IMPORTED = "transformers.trainer", "datasets", "peft", "trl", "lightning"
"""What scripts import; those that are not installed are left to the scripts."""


def run_forked(script: Path, environment: Mapping[str, str]) -> int:
    """Run a script in its directory; what it prints is in out.txt and err.txt there.

    Returns:
        The exit status, as `subprocess` tells it.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    request = {"script": str(script), "environment": dict(environment)}
    print(json.dumps(request), file=server.stdin, flush=True)
    return int(server.stdout.readline())


@cache
def _server() -> "subprocess.Popen[str]":
    environment = {k: v for k, v in os.environ.items() if k != "SSDTRAIN"}
    environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    # It ends with this process: its standard input does.
    return subprocess.Popen(
        [sys.executable, __file__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports may print
    for name in IMPORTED:
        try:
            for part in range(name.count(".") + 1):
                __import__(".".join(name.split(".")[: part + 1]))
        except ImportError:
            pass
    gc.freeze()  # no collection of a child touches, and so copies, these pages
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            _end(_run(**json.loads(line)))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(script: str, environment: dict[str, str]) -> int:
    directory = Path(script).parent
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in enumerate((os.devnull, "out.txt", "err.txt")):
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(name, flags), number)
    sys.stdin = open(0, closefd=False)
    own = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(directory), *own, *(p for p in sys.path[1:] if p not in own)]
    try:
        exec(
            compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__"}
        )
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """End the process without taking every module apart, which takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
