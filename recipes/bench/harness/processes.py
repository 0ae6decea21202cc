"""Functions and modules in processes of their own, whose death or delay is an answer
too."""

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from recipes.bench.harness.records import ROOT

Cell = dict[str, Any]
POISONED = {"error": "CUDA was initialized before the fork"}
TOO_LONG = "took too long"
"""Error of a process that had to be ended."""


def answer_of(
    work: Callable[..., Cell],
    arguments: tuple[Any, ...],
    limit_s: float,
    preload: Sequence[str] = (),
    *,
    ranks: int = 1,
) -> Cell:
    """What `work` gives on rank 0, or the first error of a rank as `error`.

    The processes are forked from one that has all imports done; where these have
    initialized CUDA, which does not survive a fork, they start from nothing.

    Args:
        preload: modules that are imported once, before the first process is forked.
        ranks: processes; each sees the environment of a rank of one host.
    """
    # Asked through NVML, whether there is a GPU does not initialize CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    until = time.monotonic() + limit_s
    from ssdtrain.train.launch import free_port  # not where peers are measured

    port = free_port()
    given = [(work, arguments, _place(rank, ranks, port)) for rank in range(ranks)]
    found, why = _answers("forkserver", given, until, preload)
    if found == POISONED:
        print("started from nothing:", POISONED["error"], flush=True)
        found, why = _answers("spawn", given, until)
    return found if not why else {"error": why}


def _answers(  # noqa: C901
    method: str,
    given: Sequence[tuple[Any, ...]],
    until: float,
    preload: Sequence[str] = (),
) -> tuple[Any, str]:
    """The first process's answer once all have spoken, or the first error of one; why
    there is none."""
    context: Any = multiprocessing.get_context(method)
    if preload:
        context.set_forkserver_preload(list(preload))
    ends: list[Connection] = []
    processes = []
    for arguments in given:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_tell, args=(there, *arguments))
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    found, waiting = None, list(ends)
    try:
        while waiting:
            ready = wait(waiting, max(until - time.monotonic(), 0.0))
            if not ready:
                return None, TOO_LONG
            for end in ready:
                waiting.remove(end)  # type: ignore[arg-type]
                said = end.recv()  # type: ignore[union-attr, call-arg]
                if isinstance(said, dict) and "error" in said:
                    return said, ""
                found = said if end is ends[0] else found
    except EOFError:
        for process in processes:
            process.join(5)
        codes = [process.exitcode for process in processes if process.exitcode]
        return None, f"the process ended early, exit {codes[0] if codes else None}"
    finally:
        for end in ends:
            end.close()
        for process in processes:
            # Those that have answered leave their process group first.
            process.join(0.0 if waiting else 3)
            if process.is_alive():
                process.kill()
            process.join()
    return found, ""


def _tell(
    answer: Connection,
    work: Callable[..., Cell],
    arguments: tuple[Any, ...],
    place: dict[str, str],
) -> None:
    os.environ.update(place)
    import torch

    try:
        found = POISONED if torch.cuda._is_in_bad_fork() else work(*arguments)
    except torch.OutOfMemoryError as error:
        found = {"error": f"out of memory: {error}"[:300]}
    except Exception as error:
        where = traceback.format_exc().splitlines()[-8:]
        found = {"error": f"{type(error).__name__}: {error}"[:700], "traceback": where}
    answer.send(found)
    answer.close()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        with contextlib.suppress(Exception):
            # Rank 0 holds the store that the others' watchdogs ask.
            if "error" not in found:
                torch.distributed.barrier()
            torch.distributed.destroy_process_group()


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank of one host; alone it is none."""
    if ranks == 1:
        return {}
    return {
        "WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # No name has to be looked up.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def join_ranks(kind: str) -> Any:
    """Let this process be one of the ranks of a host; its device."""
    import torch

    torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind != "cuda":
        return torch.device(kind)
    torch.cuda.set_device(torch.distributed.get_rank())
    return torch.device(kind, torch.distributed.get_rank())


def any_rank(own: bool) -> bool:
    """Whether one rank says so: all take the same steps."""
    import torch

    every = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    return any(every)


def command_of(name: str, *words: str) -> list[str]:
    """The command of another process that runs a benchmark of the checkout."""
    return [sys.executable, "-m", "recipes.bench", name, *words]


def child_environment() -> dict[str, str]:
    """This process's environment, with the checkout where Python looks first."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
