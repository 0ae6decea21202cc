"""Who is told what the compiler is doing: nobody, or the trainer around the call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]


def _nobody(text: str) -> None:
    """For calls that nobody watches."""


_LISTENER: ContextVar[Listener] = ContextVar("hector_listener", default=_nobody)


@contextmanager
def telling(listener: Listener) -> Iterator[None]:
    """Tell `listener`, from any thread, what is compiled or timed inside the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def listener() -> Listener:
    """Who is to be told; for threads that do not inherit this one's context."""
    return _LISTENER.get()
