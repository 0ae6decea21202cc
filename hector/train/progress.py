"""What a training run is doing, on standard error, and what it has written."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""Between two lines, where standard error is no terminal."""


class Progress:
    """A bar on a terminal; elsewhere a line a stage, and one every `INTERVAL_S`."""

    def __init__(
        self,
        num_epochs: int,
        *,
        shown: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._shown, self._clock = shown, clock
        self._printed_s = clock()
        hidden = not (shown and self._console.is_terminal)
        self._bar = Bar(console=self._console, transient=True, disable=hidden)
        self._task = self._bar.add_task("starting", total=num_epochs)

    def stage(self, text: str) -> None:
        """What is being prepared."""
        self._bar.update(self._task, description=text)
        self._print(text)

    def tell(self, text: str) -> None:
        """How far it is; from any thread."""
        self._bar.update(self._task, description=text)
        if self._clock() - self._printed_s >= INTERVAL_S:
            self._print(text)

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch has ended. row: of the metrics."""
        self._bar.advance(self._task)
        self.tell(f"seed {row['seed']} epoch {row['epoch']} loss {row['loss']:.4f}")

    def _print(self, text: str) -> None:
        if self._shown and not self._console.is_terminal:
            self._printed_s = self._clock()
            self._console.print(f"hector: {text} ...", highlight=False, soft_wrap=True)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()


def kept_rows(path: Path, end: tuple[int, int]) -> list[str]:
    """Rows of a metrics file before `end`, a (seed, epoch); damaged ones are left out,
    with a warning: they are no reason not to go on."""
    kept, num_damaged = [], 0
    for row in path.read_text(errors="replace").splitlines(keepends=True):
        try:
            values = json.loads(row)
            if (values["seed"], values["epoch"]) < end:
                kept.append(row)
        except (ValueError, LookupError, TypeError, RecursionError):
            num_damaged += 1
    if num_damaged:
        logger.warning("%s: %d damaged rows are left out", path, num_damaged)
    return kept
