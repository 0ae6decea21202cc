"""A function in a fresh process that is forked from one with all its imports done.

What is imported beforehand must not touch CUDA, which does not survive a fork; where it
has, the process starts from nothing.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

Cell = dict[str, Any]
POISONED = {"error": "CUDA was initialized before the fork"}


def answer_of(
    work: Callable[..., Cell],
    arguments: tuple[Any, ...],
    limit_s: float,
    preload: Sequence[str] = (),
) -> Cell:
    """What `work` gives; what it raises as `error`.

    Args:
        preload: modules that are imported once, before the first process is forked.
    """
    # Asked through NVML, whether there is a GPU does not initialize CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    until = time.monotonic() + limit_s
    found = _started("forkserver", work, arguments, until, preload)
    if found == POISONED:
        print("started from nothing:", POISONED["error"], flush=True)
        found = _started("spawn", work, arguments, until, ())
    return found


def _started(
    method: str,
    work: Callable[..., Cell],
    arguments: tuple[Any, ...],
    until: float,
    preload: Sequence[str],
) -> Cell:
    context: Any = multiprocessing.get_context(method)
    if preload:
        context.set_forkserver_preload(list(preload))
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(work, arguments, there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(max(0.0, until - time.monotonic())):
            return {"error": "took too long"}
        found: Cell = here.recv()
    except EOFError:
        process.join(5)
        return {"error": f"the process ended early, exit {process.exitcode}"}
    finally:
        here.close()
        process.join(3)
        if process.is_alive():
            process.kill()
        process.join()
    return found


def _tell(
    work: Callable[..., Cell], arguments: tuple[Any, ...], answer: Connection
) -> None:
    import torch

    try:
        found = POISONED if torch.cuda._is_in_bad_fork() else work(*arguments)
    except Exception as error:
        where = traceback.format_exc().splitlines()[-8:]
        found = {"error": f"{type(error).__name__}: {error}"[:700], "traceback": where}
    answer.send(found)
    answer.close()
