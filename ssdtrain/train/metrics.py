"""Where a run's numbers go while it runs: JSON lines, TensorBoard, the terminal."""

import json
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ssdtrain.errors import ConfigError
from ssdtrain.train.stop import STDERR

PLAIN_INTERVAL_S = 10.0
"""Seconds between two lines where there is no terminal."""


class Sink(Protocol):
    """Takes the numbers of one step."""

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """Take the numbers of one step of one leg."""

    def close(self) -> None:
        """Flush."""


class JsonLines:
    """One JSON object a step, flushed at once."""

    def __init__(self, path: Path) -> None:
        # A resumed run goes on behind the lines that are there.
        self._file = path.open("a", encoding="utf-8")

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """Append one line: {"leg", "step", ...}."""
        self._file.write(json.dumps({"leg": leg, "step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_tensorboard() -> None:
    """Raise ConfigError if TensorBoard's writer is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "train.tensorboard=true needs tensorboard, which is not installed: pip "
            "install 'ssdtrain[train]', or set train.tensorboard=false"
        ) from error


class TensorBoard:
    """Scalars under `<leg>/<name>`."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """Write one scalar for each number."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{leg}/{name}", value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class Terminal:
    """A live line on a terminal; elsewhere a line every `PLAIN_INTERVAL_S` seconds, and
    of the first and last step of each leg and each phase."""

    def __init__(
        self,
        console: Console,
        steps: int,
        tokens_per_step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._leg = ""
        self._first = (0, 0.0)
        self._phase = ""
        self._printed_s = -math.inf
        self._height = 1
        """Lines of what stands there live."""
        self._live = Live(console=console, transient=True)
        if console.is_terminal:
            self._live.start()

    def stage(self, text: str) -> None:
        """Show what is being prepared."""
        if self._console.is_terminal:
            self._show(f"{text} ...")
        else:
            self._console.print(f"ssdtrain: {text} ...", highlight=False)

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """Show the step that has ended."""
        now, phase = self._clock(), str(values.get("phase") or "")
        begins = (leg, phase) != (self._leg, self._phase)
        self._phase = phase
        if leg != self._leg:  # the first step warms up, so it says nothing of the pace
            self._leg, self._first = leg, (step, now)
        parts = self._parts(leg, step, values, now)
        if self._console.is_terminal:
            self._show(_wrapped(parts, self._console.width))
            return
        last = step + 1 == self._steps
        if begins or last or now - self._printed_s >= PLAIN_INTERVAL_S:
            self._printed_s = now
            line = "  ".join(parts)
            self._console.print(line, highlight=False, soft_wrap=True)

    def _show(self, text: str) -> None:
        shown = Text(text)
        self._height = len(shown.wrap(self._console, self._console.width))
        self._live.update(shown)

    def beside(self, line: str) -> str:
        """Return what to write for the line to stay: the live one is erased, and the
        cursor left as far below as the next erasing goes up. For signal handlers, which
        cannot print."""
        if not self._live.is_started:
            return line
        up = "\x1b[1A\x1b[2K" * (self._height - 1)
        return f"\r\x1b[2K{up}{line}" + "\n" * (self._height - 1)

    def _parts(
        self, leg: str, step: int, values: dict[str, Any], now: float
    ) -> list[str]:
        first, since = self._first
        pace_s = values["step_ms"] / 1e3
        if step > first:
            pace_s = (now - since) / (step - first)
        tokens_per_s = self._tokens_per_step / max(values["step_ms"], 1e-3) * 1e3
        left_s = int(pace_s * (self._steps - step - 1))
        parts = [
            f"{leg:>16}",
            f"step {step + 1}/{self._steps}",
            f"loss {values['loss']:.6f}",
            f"{values['step_ms']:.0f} ms",
            f"{tokens_per_s:,.0f} tokens/s",
            f"peak {values['peak_bytes'] / 1e6:.1f} MB",
            str(values.get("phase") or ""),
            f"ETA {timedelta(seconds=left_s)}",
        ]
        return [part for part in parts if part]

    def close(self) -> None:
        """Remove the live line."""
        self._live.stop()


def _wrapped(parts: list[str], width: int) -> str:
    """Return the parts in as few lines as they fit into, none broken in two."""
    lines = parts[:1]
    for part in parts[1:]:
        longer = f"{lines[-1]}  {part}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"{'':>{len(parts[0])}}  {part}")
    return "\n".join(lines)


class Sinks:
    """Several sinks as one; none on ranks that write nothing. A context manager."""

    def __init__(self, terminal: Terminal | None = None) -> None:
        self._terminal = terminal
        self._sinks: list[Sink] = [] if terminal is None else [terminal]

    def open(self, directory: Path, *, tensorboard: bool) -> None:
        """Write to files of `directory` as well."""
        directory.mkdir(parents=True, exist_ok=True)
        self._sinks.insert(0, JsonLines(directory / "metrics.jsonl"))
        if tensorboard:
            self._sinks.insert(1, TensorBoard(directory / "tensorboard"))

    def stage(self, text: str) -> None:
        """Show what is being prepared, if a terminal is attached."""
        if self._terminal is not None:
            self._terminal.stage(text)

    def beside(self, line: str) -> str:
        """Return what to write to standard error for the line to stay there."""
        if self._terminal is None or not os.isatty(STDERR):
            return line
        return self._terminal.beside(line)

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """Hand the numbers to every sink."""
        for sink in self._sinks:
            sink.write(leg, step, values)

    def close(self) -> None:
        """Close the files, and remove the live line."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
