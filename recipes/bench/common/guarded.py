"""A function in a process of its own, whose death or delay is an answer too."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def guarded(
    function: Callable[..., Any], *given: Any, limit_s: float, method: str
) -> tuple[Any, str]:
    """What `function(*given)` returned, and why there is nothing otherwise.

    Args:
        function: at module level.
        given: its arguments.
        limit_s: seconds until the process is ended.
        method: `fork` or `spawn`.
    """
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(theirs, function, given))  # type: ignore[attr-defined]
    child.start()
    theirs.close()
    try:
        if ours.poll(limit_s):
            return ours.recv(), ""
        return None, f"no end within {limit_s} s"
    except EOFError:
        child.join()
        return None, f"the process ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()


def _send(
    out: Connection, function: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    out.send(function(*given))
