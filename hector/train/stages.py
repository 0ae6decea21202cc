"""Stages of a mini-batch that run ahead of training.

[Note: stages ahead] Drawing neighbours waits for the device, and gathering features
from host memory takes the link's time. Neither needs the model, so each has a thread
and a stream of its own and works on the next batches while this one trains. Streams
that wait for one another's events keep the order; nothing but drawing waits on the
host. Kernels of these stages are short, and go first.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Made = TypeVar("Made")

DEPTH = 2
"""Results that may wait to be taken."""


class _Done(NamedTuple):
    """One result, there once `event` has passed; or what ended the thread."""

    result: Any = None
    event: Any = None
    error: BaseException | None = None
    last: bool = False


class Ahead(Generic[Item, Made]):
    """Iterate over `stage(item)` for each item, made ahead by a thread; see
    [Note: stages ahead].

    A context manager: leaving it stops the thread. Items may come from another `Ahead`,
    which this one's thread then takes from.
    """

    def __init__(
        self,
        stage: Callable[[Item], Made],
        items: Iterable[Item],
        device: torch.device,
    ) -> None:
        """`stage` returns tensors, or tuples of them and of other values."""
        self._stage, self._items = stage, items
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        if self._stream is not None:
            # What the items were made of.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._permits = threading.Semaphore(DEPTH)
        self._done: queue.Queue[_Done] = queue.Queue()
        self._stopping = threading.Event()
        name = f"hector-{getattr(stage, '__name__', 'stage').strip('_')}"
        self._thread = threading.Thread(target=self._work, name=name)

    def __enter__(self) -> "Ahead[Item, Made]":
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the thread and wait for it."""
        self._stopping.set()
        self._permits.release()
        self._thread.join()

    def __iter__(self) -> Iterator[Made]:
        """Yield results in order, each ordered before the current stream; raises what
        the stage raised."""
        while not (done := self._done.get()).last:
            if done.error is not None:
                raise done.error
            self._permits.release()
            if done.event is not None:
                here = torch.cuda.current_stream()
                here.wait_event(done.event)
                for tensor in _tensors(done.result):
                    tensor.record_stream(here)
            yield done.result

    def _work(self) -> None:
        stream = self._stream
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                for item in self._items:
                    self._permits.acquire()
                    if self._stopping.is_set():
                        break
                    result = self._stage(item)
                    event = stream.record_event() if stream else None
                    self._done.put(_Done(result, event))
        except BaseException as error:  # handed to whoever takes the results
            self._done.put(_Done(error=error))
        finally:
            self._done.put(_Done(last=True))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
