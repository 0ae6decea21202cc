"""What a long command is doing and how far it is, on standard error."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

T = TypeVar("T")
PLAIN_INTERVAL_S = 10.0


class Progress:
    """A live line on a terminal; elsewhere a line now and then."""

    def __init__(self, total: int, interval_s: float = PLAIN_INTERVAL_S) -> None:
        """total: how many parts there are; interval_s: between two plain lines, 0 for
        few and long parts, each of which is said as it begins."""
        self._console = Console(stderr=True)
        self._interval_s = interval_s
        self._total = total
        self._done = -1
        self._printed_s = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)

    def part(self, text: str) -> None:
        """Begin this part: the one before has ended."""
        self._done += 1
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done, description=text)
        elif time.monotonic() - self._printed_s >= self._interval_s:
            self._printed_s = time.monotonic()
            line = f"ssdtrain: {self._done + 1} of {self._total}: {text} ..."
            self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()


def each(items: Iterable[T], text: Callable[[T], str]) -> Iterator[T]:
    """Yield the items, one part of a `Progress` each."""
    known = list(items)
    with Progress(len(known)) as progress:
        for item in known:
            progress.part(text(item))
            yield item
